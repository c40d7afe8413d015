"""Speculation: drafters, which propose the next tokens of a request, and how many of them to verify. NumPy only."""
