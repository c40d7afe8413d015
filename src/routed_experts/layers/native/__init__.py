"""CPU kernels in C++: experts, projections and attention that read weights and pages in place, on all cores. XLA on
CPU copies every matrix that it slices before it multiplies; these do not. Compiled once a machine, at first use."""
