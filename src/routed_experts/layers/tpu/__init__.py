"""Kernels for TPU, in Pallas. Knows nothing of models or steps; nothing imports it before a TPU backend is traced.

Each runs in Pallas' interpreter on a CPU (`interpret`), where it is tested, and is compiled ahead of time for the
chips."""
