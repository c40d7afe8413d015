"""The nouns that all rooms share. Standard library, NumPy, ml_dtypes and jaxtyping; never JAX."""
