"""Shared helpers of the tests: small engines, checkpoints, servers and runners."""
