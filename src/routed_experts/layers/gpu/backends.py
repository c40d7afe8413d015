"""The GPU's way to run each part of a layer, under the names that the engine chooses by. Knows no kernel's inside."""

from collections.abc import Mapping
from types import MappingProxyType

from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.gpu.attention import GPU_ATTENTION
from routed_experts.layers.gpu.linear import GPU_LINEAR
from routed_experts.layers.gpu.moe import GPU_MOE
from routed_experts.layers.gpu.router import GPU_ROUTER
from routed_experts.layers.kernels import Kernels

GPU_KERNELS: Mapping[str, Kernels] = MappingProxyType({"gpu": Kernels(moe=GPU_MOE, linear=GPU_LINEAR, router=GPU_ROUTER)})
GPU_ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = MappingProxyType({"gpu": GPU_ATTENTION})
