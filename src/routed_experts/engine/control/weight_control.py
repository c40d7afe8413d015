"""WeightControl: swaps the weights of a running engine between two steps. New arrays are checked, loaded and copied to
their devices beside the steps."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.control.served_model import ServedModel
from routed_experts.engine.control.weights import Weights, load_state, to_state
from routed_experts.memory.hugepages import advise_hugepages


class WeightControl:
    """The weights of one engine. Thread-safe."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def update(self, state: Weights, *, version: int, cache: str, donate: bool) -> None:
        """`Engine.update_weights`."""
        if not isinstance(donate, bool):
            raise InvalidRequestError(f"donate={short_repr(donate)} must be True or False", param="donate")
        with self._context.exclusive_weights():  # this swap deletes weights that were donated before
            served = self._context.served_model
            self._swap(
                lambda: self._device_put(served, to_state(state, served.arrays), donate=donate),
                version=version,
                cache=cache,
                donate=donate,
            )

    def update_from_disk(self, path: str | Path, *, version: int, cache: str) -> None:
        """`Engine.update_weights_from_disk`."""
        with self._context.exclusive_weights():
            served = self._context.served_model
            self._swap(lambda: self._load_from_disk(served, path), version=version, cache=cache, donate=False)

    def update_version(self, version: int) -> None:
        """`Engine.update_weight_version`."""
        core = self._context.core

        def rename() -> None:
            self._context.check_not_released("update_weight_version")
            core.update_weights(None, version=version, cache="keep")

        with self._context.weights_lock:  # a swap that is under way has already checked its version
            self._context.thread.run_drained(rename)

    def _swap(self, load: Callable[[], nnx.State[Any, Any]], *, version: int, cache: str, donate: bool) -> None:
        """Serve the arrays that `load` returns, which are on their devices."""
        core = self._context.core
        if cache not in ("flush", "keep"):
            raise InvalidRequestError(f"cache={short_repr(cache)} is unknown; choose flush or keep", param="cache")
        core.runner.check_version(version)  # before a donated array is touched
        state = load()
        advise_hugepages(leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))  # beside the steps
        self._context.thread.run_drained(
            lambda: core.update_weights(state, version=version, cache=cache, donate=donate)
        )
        if self._context.offload_runner is not None:
            # Walks through trees of weights leave cycles behind, which hold the old host store: the largest object.
            gc.collect()

    def _device_put(self, served: ServedModel, state: nnx.State[Any, Any], *, donate: bool) -> nnx.State[Any, Any]:
        """The arrays, each copied to where it is served."""
        runner = self._context.offload_runner
        return (
            served.device_put(state, donate=donate) if runner is None else runner.model.device_put(state, donate=donate)
        )

    def _load_from_disk(self, served: ServedModel, path: str | Path) -> nnx.State[Any, Any]:
        """The arrays of a checkpoint. Those that the host keeps in another number format exist in both, one array at a
        time."""
        runner = self._context.offload_runner
        if runner is None:
            return load_state(path, served)
        return runner.model.device_put(load_state(path, served, device_for=runner.model.device_for), donate=True)
