"""Who goes next: requests, their pages, and the batch of a step. NumPy only; knows no device, no text."""
