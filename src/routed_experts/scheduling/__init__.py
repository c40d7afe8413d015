"""Scheduling: requests, their pages, and the batch of a step. NumPy only."""
