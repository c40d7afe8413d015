"""Kernels for NVIDIA GPUs, written in Pallas for its Triton compiler. Imported only where a GPU serves, or where a
test runs them in the interpreter."""
