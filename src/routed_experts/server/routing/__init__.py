"""Routing over HTTP: rows by reference, statistics, scores, and where rows stand in a response."""
