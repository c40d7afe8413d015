"""A MoE backend of the tests that records which experts it runs, and on which weights. Shares no code with capture.

Ids and weights pass through the host on their way into the experts, so what is recorded is what is executed. Layers of
a step arrive in order, one call each. Dims: N padded tokens, M MoE layers, K experts per token."""

import dataclasses
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import io_callback

from routed_experts.engine.build.backends import BackendEntry, BackendRegistry
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import ALL_EXPERTS, MoeBackend, reference_experts

PLAIN = Kernels(moe=MoeBackend(name="reference", run=reference_experts, features=ALL_EXPERTS, batch_invariant=True))


class MoeProbe:
    """Every call of the experts since the last `clear`. `kernels` run the experts."""

    def __init__(self, num_moe_layers, kernels=PLAIN):
        self._num_layers, self._kernels = num_moe_layers, kernels
        self._calls = []

    @property
    def kernels(self):
        """The kernels with a probe where ids enter the experts."""
        assert self._kernels.layer_stack is None, "a kernel of several layers cannot be probed"
        moe = dataclasses.replace(self._kernels.moe, name="probed", run=self._probed(self._kernels.moe.run))
        fused = self._kernels.fused_layer
        fused = None if fused is None else dataclasses.replace(fused, slots=self._probed(fused.slots))
        return dataclasses.replace(self._kernels, moe=moe, fused_layer=fused)

    @property
    def registry(self):
        """The engine's backends, "probed", and "unprobed": the same kernels without the probe."""
        registry = BackendRegistry()
        more = {"probed": BackendEntry(load=lambda: self.kernels), "unprobed": BackendEntry(load=lambda: self._kernels)}
        return dataclasses.replace(registry, moe=MappingProxyType({**registry.moe, **more}))

    def clear(self):
        """Forget the steps so far; none may be in flight."""
        self._calls.clear()

    def step(self, index):
        """[N, M, K]: the ids that entered the experts in the `index`-th forward."""
        return np.stack([ids for ids, _ in self._layers(index)], axis=1)

    def step_weights(self, index):
        """[N, M, K]: the combine weights that entered the experts in the `index`-th forward."""
        return np.stack([weights for _, weights in self._layers(index)], axis=1)

    def _layers(self, index):
        calls = self._calls[index * self._num_layers : (index + 1) * self._num_layers]
        assert len(calls) == self._num_layers, (
            f"forward {index} has {len(calls)} of {self._num_layers} layers: is it still in flight?"
        )
        return calls

    def _probed(self, run):
        def probed(call, *shared):
            given = call.ids, call.weights
            shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), given)
            ids, weights = io_callback(self._record, shapes, *given, ordered=True)
            return run(dataclasses.replace(call, ids=ids, weights=weights), *shared)

        return probed

    def _record(self, ids, weights):
        self._calls.append((np.array(ids), np.array(weights)))
        return self._calls[-1]
