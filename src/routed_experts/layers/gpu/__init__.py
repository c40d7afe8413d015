"""Kernels for NVIDIA GPUs, written in Pallas for its Triton compiler. Imported only where a GPU serves, or a test
interprets them. Knows nothing of models."""
