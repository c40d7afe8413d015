"""A request from its arguments to its outputs: validation, text and tokens, accumulated outputs."""
