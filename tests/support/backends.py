"""Registries of backends with one more, for tests of what an engine accepts."""

import dataclasses

from routed_experts.engine.build.backends import BackendEntry
from routed_experts.layers.kernels import Kernels


def with_moe(registry, backend):
    """The same registry with one more MoE backend, by its name."""
    entry = BackendEntry(load=lambda: Kernels(moe=backend))
    return dataclasses.replace(registry, moe={**registry.moe, backend.name: entry})
