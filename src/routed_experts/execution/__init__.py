"""Runs the model: one batch in, arrays out one step late. Programs, their memory, and the runners of device state."""
