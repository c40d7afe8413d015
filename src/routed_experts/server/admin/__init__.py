"""What operators call: weights, pause, health, metrics and server information."""
