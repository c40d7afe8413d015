"""What a OffloadRunner compiles, and the two sides that it compiles for. Knows shapes, not arrays.

Layers of one kind share their programs: the place of a layer is an argument. Which residents there are is one, too."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from routed_experts.execution.aot_programs import RunnerConfig, sampling_jobs
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.offload.offload_programs import (
    OffloadSpec,
    close_step,
    home_step,
    host_step,
    layer_step,
    open_step,
    stream_step,
)
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.models.offload.layers import ExpertInputs, LayerIndex, LayerIndexArrays, layers_at
from routed_experts.models.offload.offloaded_model import OffloadedModel, write_rows

Jobs = dict[tuple[object, ...], Callable[[], jax.stages.Lowered]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DevicePair:
    """The accelerator and the host, two devices or one, and the copies between them. Those of one platform are started
    and not waited for; between platforms `arrived` and `bring` wait."""

    device: Any
    host: Any

    def send(self, arrays: tuple[Array, ...]) -> tuple[Any, ...]:
        """Start copies to the host."""
        if self.device == self.host:
            return arrays
        if self.alike:
            return jax.device_put(arrays, self.host)
        for array in arrays:
            array.copy_to_host_async()
        return arrays

    def arrived(self, sent: tuple[Any, ...]) -> tuple[Any, ...]:
        """What was sent, as a program of the host takes it."""
        return sent if self.alike else tuple(np.asarray(array) for array in sent)

    def bring(self, array: Array) -> Any:
        """An array of the host, as a program of the accelerator takes it."""
        if self.device in array.devices():
            return array
        return jax.device_put(array, self.device) if self.alike else np.asarray(array)

    @property
    def alike(self) -> bool:
        """Whether both are of one platform, so that a copy between them need not be waited for."""
        return self.device.platform == self.host.platform


def numbers_of(layer: LayerIndex) -> LayerIndexArrays:
    """The numbers of a layer as arrays, still on the host."""
    return LayerIndexArrays(*(np.asarray(number, np.int32) for number in (layer.place, layer.ordinal, layer.column)))  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitJobs:
    """The programs of a split model, by key, each as a call that lowers it. `state` and `spec` are those of its rim."""

    model: OffloadedModel
    split: OffloadSpec
    state: nnx.State[Any, Any]
    spec: ProgramSpec
    config: RunnerConfig
    sides: DevicePair
    streams_from: int | None
    found: Jobs = dataclasses.field(default_factory=dict)

    def collect(self) -> Jobs:
        """All of them."""
        for shape in self.config.shapes:
            self._of_shape(shape)
        if self.split.num_resident:
            for kind, table in self.model.tables.items():
                args = (shapes_of(table), _rows(table, 1), jax.ShapeDtypeStruct((), jnp.int32))
                self.found["write", kind] = functools.partial(write_rows.lower, *args)
        return self.found

    def _job(
        self, key: tuple[object, ...], program: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        """Note a program down, and give the shapes of what it returns."""
        self.found[key] = functools.partial(jax.jit(program, donate_argnums=donate).lower, *args)
        return jax.eval_shape(program, *args)

    def _of_shape(self, shape: BatchShape) -> None:
        """Walk through a step of one padded size; a program that the layers share is met once."""
        model, split, rim, static = self.model, self.split, self.model.embed_head, {"spec": self.split, "shape": shape}
        last_tokens = jax.ShapeDtypeStruct((self.config.num_request_slots,), jnp.int32)
        opening = functools.partial(open_step, **static)
        stream, tokens, packed = self._job(("open", shape), opening, shapes_of(rim.embed), last_tokens, shape.packed)
        given: tuple[Any, ...] = ()
        for layer in layers_at(model.config):
            kind, key = layer.kind, ("layer", shape, layer.kind, len(given))
            if key not in self.found:
                args = (shapes_of(model.layers[kind]), shapes_of(numbers_of(layer)), packed, given, maps_of(self.split))
                program = functools.partial(layer_step, **static, kind=kind)
                errand = self._job(key, program, stream, self.config.pool.abstract, *args, donate=(0, 1))[1]
                if errand is not None:
                    self._of_experts(shape, layer, packed, errand)
            given = (jax.ShapeDtypeStruct(stream.x.shape, jnp.float32),) * split.num_given(layer, shape)
        closing, counts = functools.partial(close_step, **static), self.spec.counts
        counted, donated = ((), ()) if counts is None else ((counts,), (5,))
        out = self._job(
            ("close", shape, len(given)),
            closing,
            shapes_of(rim),
            stream,
            given,
            tokens,
            packed,
            *counted,
            donate=donated,
        )
        self.found.update(sampling_jobs(self.state, self.spec, self.config, shape, out))

    def _of_experts(self, shape: BatchShape, layer: LayerIndex, packed: Any, errand: ExpertInputs) -> None:
        """What runs the experts of a kind of layer."""
        kind, split, num_tokens = layer.kind, self.split, shape.num_tokens
        table, stored = self.model.tables[kind], self.model.host[kind]
        if split.has_device_experts(kind):
            program = functools.partial(home_step, spec=split, shape=shape, kind=kind)
            args = (shapes_of(table), shapes_of(self.model.layers[kind]), shapes_of(numbers_of(layer)), packed, errand)
            self._job(("home", shape, kind), program, *args)
        if not split.has_host:
            return
        place = jax.ShapeDtypeStruct((), jnp.int32)
        args = _at((shapes_of(stored), place, errand.fed, errand.away, errand.weights), self.sides.host)
        self._job(("host", num_tokens, kind), functools.partial(host_step, spec=split), *args)
        if self.streams_from is not None and num_tokens >= self.streams_from and not split.deferred_in(shape):
            block, row = (
                _rows(table, split.num_experts - split.num_resident),
                jax.ShapeDtypeStruct((split.num_experts,), jnp.int32),
            )
            self._job(("stream", num_tokens, kind), functools.partial(stream_step, spec=split), block, row, errand)


def maps_of(split: OffloadSpec) -> jax.ShapeDtypeStruct:
    """The shape of the map of residents that programs take."""
    return jax.ShapeDtypeStruct((split.num_moe_layers, split.num_experts), jnp.int32)


def shapes_of(tree: Any) -> Any:
    """Shapes and dtypes of arrays, without their devices: programs are compiled for the default one."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)


def _rows(table: ExpertTable, count: int) -> Any:
    """Shapes of `count` experts of a table."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype), table)


def _at(tree: Any, device: Any) -> Any:
    """The same shapes, on another device."""
    where = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)
