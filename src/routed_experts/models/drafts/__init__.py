"""Draft models: small modules that propose tokens from the hidden states of the served model, and how they are read."""
