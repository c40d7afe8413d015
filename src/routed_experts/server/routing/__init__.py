"""Routed experts over HTTP: rows in responses, rows kept for fetching, scores on given routes, expert counts."""
