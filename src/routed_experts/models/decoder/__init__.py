"""The decoder and its parts: attention, feed-forward, their parameters and their fused path."""
