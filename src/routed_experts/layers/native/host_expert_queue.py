"""HostExpertQueue: jobs for experts in host memory, submitted and awaited inside a compiled program. Threads of the
host run them while the program goes on, on the CPU or on an NVIDIA GPU.

A job computes some experts of a layer, or copies their weights for the accelerator to compute with. Jobs run in the
order of submission; at most three are outstanding. Dims: N tokens, D hidden, K experts per token, E experts of a layer,
R layers of a store, F expert width, C experts whose weights are copied."""

import ctypes
import dataclasses
import enum
import functools
import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt

from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.layers.native import toolchain

_TARGETS = ("RexSubmitHostJob", "RexWaitHostSums", "RexWaitHostWeights")
_DTYPES = {"float16": 10, "float32": 11, "bfloat16": 16}  # XLA's numbers (xla_data.proto, PrimitiveType)


class _JobKind(enum.IntEnum):
    """As in host_expert_queue.h."""

    EXPERTS = 0
    DEFERRED_EXPERTS = 1
    WEIGHTS = 2


@functools.cache
def register_ffi_targets() -> bool:
    """Register the handlers for both platforms, once a process. Compiles the library at first use. Raises OSError where
    that fails."""
    library = toolchain.library()
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[f"{name}OnGpu"]), platform="CUDA")
    library.RexQueueOpen.restype = ctypes.c_int64
    library.RexQueueOpen.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    library.RexQueueClose.argtypes = (ctypes.c_int64,)
    library.RexQueueSwapWeights.restype = ctypes.c_bool
    library.RexQueueSwapWeights.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    library.RexQueueSetSignals.argtypes = (ctypes.c_int64, ctypes.c_bool, ctypes.c_bool)
    library.RexQueueStats.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Jobs run so far, and for how long the host's threads ran them. `uses_callbacks`: the GPU signals by callbacks of
    its driver, because the driver refused to write and await words in memory."""

    num_jobs: int
    busy_s: float
    uses_callbacks: bool


class HostExpertQueue:
    """Jobs over stores of experts in host memory, and `num_threads` threads that run them.

    Stores are read in place: they are kept alive, and must not change while a job is under way. The threads end when
    the queue is collected."""

    def __init__(self, stores: Sequence[ExpertTable], *, num_experts: int, num_threads: int) -> None:
        assert register_ffi_targets() and num_threads >= 1, num_threads
        self._stores, self._views, pointers = tuple(stores), _views(stores), _pointers(stores)
        dtypes = np.array([_DTYPES[str(store.down.dtype)] for store in stores], np.int32)
        shapes = [(num_experts, *(store.down.shape[axis] for axis in (0, 2, 1))) for store in stores]
        sizes = np.array(shapes, np.int64)  # [stores, 4]: experts, rows, hidden, width
        self._library = toolchain.library()
        self._number = self._library.RexQueueOpen(
            num_threads, len(stores), pointers.ctypes.data, dtypes.ctypes.data, sizes.ctypes.data
        )
        weakref.finalize(self, self._library.RexQueueClose, self._number)

    def swap_weights(self, stores: Sequence[ExpertTable]) -> None:
        """Use other stores of the same shapes and dtypes from now on. No job may be under way."""
        old, new = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(list(s))] for s in (self._stores, stores))
        assert old == new, (old, new)
        pointers = _pointers(stores)
        assert self._library.RexQueueSwapWeights(self._number, pointers.ctypes.data), "a job is under way"
        self._stores, self._views = tuple(stores), _views(stores)

    def submit(
        self,
        x: Float[Array, "N D"],
        layer: Int[Array, ""],
        ids: Int[Array, "N K"],
        weights: Float[Array, "N K"],
        *,
        store: int,
        deferred: bool = False,
    ) -> Float[Array, "N D"]:
        """Submit the experts `ids` (-1: none) of a layer of a store. Returns x for the operations that run in parallel
        with the job."""
        bits = lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
        words = jnp.concatenate([_word(layer), ids.astype(jnp.int32).reshape(-1), bits.reshape(-1)])
        kind = _JobKind.DEFERRED_EXPERTS if deferred else _JobKind.EXPERTS
        return self._submit(x, words, kind, store=store, top_k=ids.shape[1])

    def wait(
        self, after: Float[Array, "N D"], *, deferred: bool = False
    ) -> tuple[Float[Array, "N D"], Float32[Array, "N D"]]:
        """Wait, once `after` is computed, for the oldest outstanding job of this kind. Returns `after`, and the job's
        weighted sums; 0 for a token without slots."""
        shapes = (jax.ShapeDtypeStruct(after.shape, after.dtype), jax.ShapeDtypeStruct(after.shape, jnp.float32))
        run = jax.ffi.ffi_call("RexWaitHostSums", shapes, input_output_aliases={0: 0}, has_side_effect=True)
        kind = _JobKind.DEFERRED_EXPERTS if deferred else _JobKind.EXPERTS
        same, sums = run(after, queue=np.int64(self._number), kind=np.int64(kind))
        return same, sums

    def submit_weights(
        self, x: Float[Array, "N D"], layer: Int[Array, ""], ids: Int[Array, " C"], *, store: int
    ) -> Float[Array, "N D"]:
        """Submit a copy of the weights of experts `ids` (-1: zeros) of a layer of a store. Returns x."""
        words = jnp.concatenate([_word(layer), ids.astype(jnp.int32)])
        return self._submit(x, words, _JobKind.WEIGHTS, store=store, top_k=0)

    def wait_weights(
        self, after: Float[Array, "N D"], count: int, *, store: int
    ) -> tuple[Float[Array, "N D"], ExpertTable]:
        """Wait, once `after` is computed, for the oldest outstanding copy of `count` experts of a store. Returns
        `after`, and their weights on the accelerator, in the store's dtype."""
        arrays = (self._stores[store].gate_up, self._stores[store].down)
        shapes = [jax.ShapeDtypeStruct((count, *array.shape[1:]), array.dtype) for array in arrays]
        shapes = [jax.ShapeDtypeStruct(after.shape, after.dtype), *shapes]
        run = jax.ffi.ffi_call("RexWaitHostWeights", shapes, input_output_aliases={0: 0}, has_side_effect=True)
        same, gate_up, down = run(after, queue=np.int64(self._number))
        return same, ExpertTable(gate_up, down)

    def set_signals(self, *, serial: bool = False, callbacks: bool = False) -> None:
        """For measurements. `serial`: the accelerator waits for each job where it is submitted. `callbacks`: it signals
        by callbacks of its driver."""
        self._library.RexQueueSetSignals(self._number, serial, callbacks)

    def stats(self) -> QueueStats:
        """Counts since the queue was opened."""
        numbers = np.zeros(3, np.int64)
        self._library.RexQueueStats(self._number, numbers.ctypes.data)
        return QueueStats(num_jobs=int(numbers[0]), busy_s=int(numbers[1]) / 1e9, uses_callbacks=bool(numbers[2]))

    def _submit(
        self, x: Float[Array, "N D"], words: Int[Array, " words"], kind: _JobKind, *, store: int, top_k: int
    ) -> Float[Array, "N D"]:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = jax.ffi.ffi_call("RexSubmitHostJob", shape, input_output_aliases={0: 0}, has_side_effect=True)
        numbers = {"queue": self._number, "kind": kind, "store": store, "top_k": top_k}
        return run(x, words, **{name: np.int64(number) for name, number in numbers.items()})


def _word(layer: Int[Array, ""]) -> Int[Array, " 1"]:
    return layer.astype(jnp.int32).reshape(1)


def _views(stores: Sequence[ExpertTable]) -> list[np.ndarray]:
    """Views that keep the memory of stores alive where their arrays are deleted or donated: threads read it in
    place."""
    return [np.asarray(array) for array in jax.tree.leaves(list(stores))]


def _pointers(stores: Sequence[ExpertTable]) -> UInt[np.ndarray, " arrays"]:
    """Addresses of the arrays of stores, once they are computed."""
    arrays = [array for store in stores for array in (store.gate_up, store.down)]
    assert all(device.platform == "cpu" for array in arrays for device in array.devices()), "stores are in host memory"
    jax.block_until_ready(arrays)
    return np.array([array.unsafe_buffer_pointer() for array in arrays], np.uintp)
