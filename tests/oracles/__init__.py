"""What a run is judged by: oracles that share no code with what they judge, and the driver that puts requests through a
core."""
