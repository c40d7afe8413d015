"""Kernels for TPU, in Pallas. Imported when a TPU backend is traced, not before.

Each kernel is tested on a CPU in Pallas' interpreter (`interpret`), and compiled ahead of time for the chips."""
