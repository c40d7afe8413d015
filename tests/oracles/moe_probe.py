"""The probe: a MoE backend, registered in tests alone, that notes which experts it runs. Shares no code with capture.

The ids pass through the host on their way into the experts, so what was noted is what was run. Layers of a step come in
order, one call each. Dims: N padded tokens, M MoE layers, K experts per token."""

import dataclasses
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import io_callback

from routed_experts.engine.build.backends import BackendEntry, BackendRegistry
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import ALL_EXPERTS, MoeBackend, reference_experts

PLAIN = Kernels(moe=MoeBackend(name="reference", run=reference_experts, features=ALL_EXPERTS))


class MoeProbe:
    """Every call of the experts since the last `clear`. `kernels` are those that stand behind the probe."""

    def __init__(self, num_moe_layers, kernels=PLAIN):
        self._num_layers, self._kernels = num_moe_layers, kernels
        self._calls = []

    @property
    def kernels(self):
        """The kernels, probed where ids enter experts."""
        assert self._kernels.layer_stack is None, "a kernel of a whole run cannot be probed"
        moe = dataclasses.replace(self._kernels.moe, name="probed", run=self._probed(self._kernels.moe.run))
        fused = self._kernels.fused_layer
        fused = None if fused is None else dataclasses.replace(fused, slots=self._probed(fused.slots))
        return dataclasses.replace(self._kernels, moe=moe, fused_layer=fused)

    @property
    def registry(self):
        """The engine's backends, and "probed"; "unprobed" is what stands behind the probe."""
        registry = BackendRegistry()
        more = {"probed": BackendEntry(load=lambda: self.kernels), "unprobed": BackendEntry(load=lambda: self._kernels)}
        return dataclasses.replace(registry, moe=MappingProxyType({**registry.moe, **more}))

    def clear(self):
        """Forget the steps so far; none may be in flight."""
        self._calls.clear()

    def step(self, index):
        """[N, M, K]: the ids that entered the experts in the `index`-th forward."""
        calls = self._calls[index * self._num_layers : (index + 1) * self._num_layers]
        assert len(calls) == self._num_layers, (
            f"forward {index} has {len(calls)} of {self._num_layers} layers: is it still in flight?"
        )
        return np.stack(calls, axis=1)

    def _probed(self, run):
        def probed(call):
            ids = io_callback(self._note, jax.ShapeDtypeStruct(call.ids.shape, call.ids.dtype), call.ids, ordered=True)
            return run(dataclasses.replace(call, ids=ids))

        return probed

    def _note(self, ids):
        self._calls.append(np.array(ids))
        return self._calls[-1]
