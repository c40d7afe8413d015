"""WeightControl: swaps the weights of a running engine between two steps. New arrays are checked, loaded and copied to
their devices beside the steps.

An update is one call, or two: `prepare` loads and checks, `commit` swaps, so that several engines can all swap or all
keep what they have. Callers name weights by labels, which may repeat; each update gets the next count."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    InvalidRequestError,
    PeerLostError,
    RoutedExpertsError,
    UpdateInProgressError,
    WeightsMismatchError,
)
from routed_experts.core.weight_version import WeightVersion, to_label
from routed_experts.engine.control.context import EngineContext, PreparedWeights
from routed_experts.engine.control.served_model import ServedModel
from routed_experts.engine.control.weights import (
    Weights,
    delete_quantized,
    load_ready,
    load_state,
    to_copies,
    to_state,
    value_digests,
)
from routed_experts.engine.group.process_group import LeadingGroup
from routed_experts.execution.orders import OrderKind
from routed_experts.memory.hugepages import advise_hugepages_beside


def _prepare(group: LeadingGroup, served: ServedModel, path: str | Path, update_count: int) -> nnx.State[Any, Any]:
    """The first phase of an update in several processes: each loads and checks its part beside the steps. The second,
    the swap, is one order between two steps. Orders know an update by its count. Raises WeightsMismatchError naming
    every process that refuses; then all keep the old weights."""
    seq = group.send(OrderKind.PREPARE_WEIGHTS, {"path": os.path.abspath(path), "version": update_count})
    refusals: list[str] = []
    state: nnx.State[Any, Any] | None = None
    digests: dict[str, str] = {}
    try:
        state = load_ready(path, served)
        digests = value_digests(path)
    except RoutedExpertsError as error:
        refusals.append(f"process 0: {error}")
    except BaseException:
        group.send(OrderKind.DROP_WEIGHTS)
        raise
    try:
        replies = group.collect(seq, group.dist.dist_timeout, "loaded the new weights")
        refusals += [f"process {rank}: {reply['error']}" for rank, reply in replies.items() if "error" in reply]
        if not refusals:
            refusals += _other_values(digests, {rank: reply.get("values") for rank, reply in replies.items()})
    except PeerLostError:
        if group.error is not None:
            raise
        refusals.append(f"a process that has not loaded them within dist_timeout={group.dist.dist_timeout:g} s")
    if state is None or refusals:
        group.send(OrderKind.DROP_WEIGHTS)
        text = f"model_path={short_repr(str(path))} is refused by {'; '.join(refusals)}"
        raise WeightsMismatchError(f"{text}; the old weights serve on in all processes", param="model_path")
    return state


def _other_values(ours: Mapping[str, str], of_ranks: Mapping[int, Any]) -> list[str]:
    """A refusal for each process whose copy of the checkpoint has other values, with the first that differ."""
    refusals: list[str] = []
    for rank, theirs in of_ranks.items():
        received = theirs if isinstance(theirs, Mapping) else {}
        name = next((name for name in sorted({*ours, *received}) if ours.get(name) != received.get(name)), None)
        if name is not None:
            text = f"process {rank}: its values of {name} are not those of process 0"
            refusals.append(f"{text}; give every host a copy of one checkpoint")
    return refusals


class WeightControl:
    """The weights of one engine. Thread-safe."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._update = threading.Lock()

    @contextlib.contextmanager
    def _only_update(self) -> Generator[None, None, None]:
        """Bring other weights, as the only call that does. Raises UpdateInProgressError: updates are not queued."""
        if not self._update.acquire(blocking=False):
            raise UpdateInProgressError("another update of the weights is under way; call again once that has returned")
        try:
            yield
        finally:
            self._update.release()

    def update(self, state: Weights, *, version: object, cache: str, donate: bool, copy: bool) -> WeightVersion:
        """`Engine.update_weights`."""
        label = self._label(version)
        for name, value in (("donate", donate), ("copy", copy)):
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name}={short_repr(value)} must be True or False", param=name)
        if donate and copy:
            text = "donate=True and copy=True: copies are the engine's anyway; choose one of them"
            raise InvalidRequestError(text, param="donate")
        self._context.check_one_process("update_weights", "call update_weights_from_disk")
        with self._only_update(), self._context.exclusive_weights():  # this swap deletes weights donated before
            self._context.check_not_prepared("update_weights")
            served, new = self._context.served_model, self._next(label)
            check = to_copies if copy else to_state

            def load() -> nnx.State[Any, Any]:
                arrays = check(state, served.arrays, served.coded_config)
                arrays = self._device_put(served, arrays, donate=donate or copy)
                if donate and served.coded_config is not None:
                    delete_quantized(state, jax.block_until_ready(arrays), served.coded_config)
                return arrays

            self._swap(
                load,
                version=new,
                cache=cache,
                donate=donate or copy,
            )
        return new

    def update_from_disk(self, path: str | Path, *, version: object, cache: str) -> WeightVersion:
        """`Engine.update_weights_from_disk`."""
        label = self._label(version)
        with self._only_update(), self._context.exclusive_weights():
            self._context.check_not_prepared("update_weights_from_disk")
            new = self._next(label)
            self._swap(lambda: self._load(path, new.update_count), version=new, cache=cache, donate=False)
        return new

    def prepare(self, path: str | Path, *, version: object, update_count: int | None) -> None:
        """`Engine.prepare_weights`."""
        label = self._label(version)
        with self._only_update(), self._context.weights_lock:  # scores go on: the served weights stay
            self._context.check_not_prepared("prepare_weights")
            new = self._next(label, update_count)
            state = jax.block_until_ready(self._load(path, new.update_count))
            self._context.prepared.weights = PreparedWeights(new, state)

    def commit(self, *, version: object, cache: str) -> WeightVersion:
        """`Engine.commit_weights`."""
        label = self._label(version)
        slot = self._context.prepared
        with self._only_update(), self._context.exclusive_weights():
            prepared = slot.weights
            if prepared is None or label not in (None, prepared.version.label):
                state = "none are" if prepared is None else f"those of label {short_repr(prepared.version.label)} are"
                text = f"weights of version={short_repr(label)} cannot be committed: {state} prepared"
                raise InvalidRequestError(f"{text}; call prepare_weights first", param="version")
            self._swap(lambda: prepared.state, version=prepared.version, cache=cache, donate=False)
            slot.weights = None
        return prepared.version

    def drop(self) -> None:
        """`Engine.drop_weights`."""
        with self._context.weights_lock:
            if self._context.prepared.weights is None:
                return
            self._context.prepared.weights = None
            if self._context.components.group is not None:
                self._context.components.group.send(OrderKind.DROP_WEIGHTS)
        gc.collect()  # trees of weights have cycles that hold their arrays

    @property
    def prepared_version(self) -> str | None:
        """`Engine.prepared_version`."""
        prepared = self._context.prepared.weights
        return None if prepared is None else prepared.version.label

    def update_version(self, version: object, *, update_count: int | None) -> WeightVersion:
        """`Engine.update_weight_version`."""
        core, label = self._context.core, to_label(version, param="version")

        def rename() -> None:
            self._context.check_not_released("update_weight_version")
            core.update_weights(None, version=new, cache="keep")

        with self._context.weights_lock:  # a swap that is under way has already chosen its count
            self._context.check_not_prepared("update_weight_version")
            new = self._next(label, update_count)
            self._context.thread.run_drained(rename)
        return new

    @staticmethod
    def _label(version: object) -> str | None:
        """The label that a caller gave; None keeps the served one. Raises InvalidRequestError."""
        return None if version is None else to_label(version, param="version")

    def _next(self, label: str | None, update_count: int | None = None) -> WeightVersion:
        """The version of the update that follows; under `weights_lock`. Raises WeightsMismatchError for a count that
        does not rise."""
        return self._context.next_version(label, update_count)

    def _swap(
        self, load: Callable[[], nnx.State[Any, Any]], *, version: WeightVersion, cache: str, donate: bool
    ) -> None:
        """Serve the arrays that `load` returns, which are on their devices."""
        core = self._context.core
        if cache not in ("flush", "keep"):
            raise InvalidRequestError(f"cache={short_repr(cache)} is unknown; choose flush or keep", param="cache")
        state = load()
        self._context.thread.run_drained(
            lambda: core.update_weights(state, version=version, cache=cache, donate=donate)
        )
        advise_hugepages_beside([leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)])
        if self._context.offload_runner is not None:
            # Walks through trees of weights leave cycles behind, which hold the old host store: the largest object.
            gc.collect()

    def _device_put(self, served: ServedModel, state: nnx.State[Any, Any], *, donate: bool) -> nnx.State[Any, Any]:
        """The arrays, each copied to where it is served."""
        runner = self._context.offload_runner
        return (
            served.device_put(state, donate=donate) if runner is None else runner.model.device_put(state, donate=donate)
        )

    def _load(self, path: str | Path, update_count: int) -> nnx.State[Any, Any]:
        """The arrays of a checkpoint, once every process of the engine has its part."""
        if not isinstance(path, str | Path):
            text = f"path={short_repr(path)}: expected str or pathlib.Path; give the folder of a checkpoint"
            raise InvalidRequestError(text, param="path")
        served, group = self._context.served_model, self._context.components.group
        return self._load_from_disk(served, path) if group is None else _prepare(group, served, path, update_count)

    def _load_from_disk(self, served: ServedModel, path: str | Path) -> nnx.State[Any, Any]:
        """The arrays of a checkpoint. Those that the host keeps in another number format exist in both, one array at a
        time."""
        runner = self._context.offload_runner
        if runner is None:
            return load_state(path, served)
        return runner.model.device_put(load_state(path, served, device_for=runner.model.device_for), donate=True)
