"""The arithmetic of a transformer layer: functions take arrays and return arrays.

kernels.py, moe.py, linear.py, attention.py   contracts of the backends, and the reference implementations
routing.py                                    the routing laws of all families; other files: one operation each
gpu/  tpu/  native/                           kernels for NVIDIA GPUs (Triton), TPUs (Mosaic) and CPUs (C++)
balanced_selection/                           expert selection under capacities and replicas"""
