"""The nouns: what every other room talks about. Standard library and NumPy only; knows no device."""
