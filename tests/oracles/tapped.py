"""The tap: a MoE backend, registered in tests alone, that notes which experts it runs. Shares no code with capture.

The ids pass through the host on their way into the experts, so what was noted is what was run. Layers of a step come in order,
one call each. Dims: N padded tokens, M MoE layers, K experts per token."""

import dataclasses

import jax
import numpy as np
from jax.experimental import io_callback

from routed_experts.engine.backends import BackendRegistry
from routed_experts.layers.moe import ALL_EXPERTS, MoeBackend, reference_experts


class Tap:
    """Every call of the backend since the last `clear`."""

    def __init__(self, num_moe_layers):
        self._num_layers = num_moe_layers
        self._calls = []

    @property
    def registry(self):
        """The engine's backends, and "tapped"."""
        return BackendRegistry().with_moe(MoeBackend(name="tapped", run=self._run, features=ALL_EXPERTS))

    def clear(self):
        """Forget the steps so far; none may be in flight."""
        self._calls.clear()

    def step(self, index):
        """[N, M, K]: the ids that entered the experts in the `index`-th forward."""
        calls = self._calls[index * self._num_layers : (index + 1) * self._num_layers]
        assert len(calls) == self._num_layers, f"forward {index} has {len(calls)} of {self._num_layers} layers: is it still in flight?"
        return np.stack(calls, axis=1)

    def _run(self, call):
        def note(ids):
            self._calls.append(np.array(ids))
            return self._calls[-1]

        ids = io_callback(note, jax.ShapeDtypeStruct(call.ids.shape, call.ids.dtype), call.ids, ordered=True)
        return reference_experts(dataclasses.replace(call, ids=ids))
