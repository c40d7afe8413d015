"""Controlling a running engine: weights, memory, expert placement, scores and statistics."""
