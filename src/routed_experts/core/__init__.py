"""The nouns that all rooms share. Standard library and NumPy only."""
