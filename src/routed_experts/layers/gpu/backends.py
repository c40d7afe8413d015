"""The GPU's way to run each matrix of a layer, as one bundle. Knows no kernel's inside."""

from routed_experts.layers.gpu.linear import GPU_LINEAR
from routed_experts.layers.gpu.moe import GPU_MOE
from routed_experts.layers.gpu.router import GPU_ROUTER
from routed_experts.layers.kernels import Kernels

GPU_KERNELS = Kernels(moe=GPU_MOE, linear=GPU_LINEAR, router=GPU_ROUTER)
