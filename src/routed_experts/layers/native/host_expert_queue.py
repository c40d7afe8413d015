"""HostExpertQueue: experts of one engine that the host runs while a program runs on, inside that program: `begin` sends an
errand off, `end` takes what it gave. On the CPU, and on an NVIDIA GPU by calls of its driver. Knows nothing of layers'
order or of residency.

Errands of a lane follow one another: each ends before the next begins. Dims: N tokens, D hidden, K experts per token, E
experts of a layer, R layers of a store, F expert width."""

import ctypes
import dataclasses
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

_TARGETS = (("RexErrandBegins", "RexErrandBeginsOnGpu"), ("RexErrandEnds", "RexErrandEndsOnGpu"))
_DTYPES = {"float16": 10, "float32": 11, "bfloat16": 16}  # XLA's numbers (xla_data.proto, PrimitiveType)


@functools.cache
def register_ffi_targets() -> bool:
    """Register the handlers for both platforms, once a process; compiles the library at first use. Raises OSError where
    it cannot."""
    library = toolchain.library()
    for name, on_gpu in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[on_gpu]), platform="CUDA")
    library.RexLaneOpen.restype = ctypes.c_int64
    library.RexLaneOpen.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    library.RexLaneClose.argtypes = (ctypes.c_int64,)
    library.RexLaneRestock.restype = ctypes.c_bool
    library.RexLaneRestock.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    library.RexLaneSet.argtypes = (ctypes.c_int64, ctypes.c_bool, ctypes.c_bool)
    library.RexLaneTold.argtypes = (ctypes.c_int64, ctypes.c_void_p)
    return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneCounts:
    """Errands that were run so far and for how long the host's threads ran them; `calls_back`: the accelerator's
    signals are calls of the driver, for it refused to write and await words in memory."""

    num_errands: int
    busy_s: float
    calls_back: bool


class HostExpertQueue:
    """Stores of experts, all of them in the host's memory, and `num_threads` threads that run them. Stores are read
    where they lie, so they are kept, and must not change while an errand is under way. Its threads end when it is
    collected."""

    def __init__(self, stores: Sequence[ExpertTable], *, num_experts: int, num_threads: int) -> None:
        assert register_ffi_targets() and num_threads >= 1, num_threads
        self._stores, self._views, places = tuple(stores), _views(stores), _places(stores)
        dtypes = np.array([_DTYPES[str(store.down.dtype)] for store in stores], np.int32)
        shapes = [(num_experts, *(store.down.shape[place] for place in (0, 2, 1))) for store in stores]
        sizes = np.array(shapes, np.int64)  # [stores, 4]: experts, rows, hidden, width
        self._library = toolchain.library()
        self._number = self._library.RexLaneOpen(
            num_threads, len(stores), places.ctypes.data, dtypes.ctypes.data, sizes.ctypes.data
        )
        weakref.finalize(self, self._library.RexLaneClose, self._number)

    def restock(self, stores: Sequence[ExpertTable]) -> None:
        """Run the experts of other stores of the same shapes and dtypes from now on. No errand may be under way."""
        same = [jax.tree.map(lambda array: (array.shape, array.dtype), list(each)) for each in (self._stores, stores)]
        assert same[0] == same[1], same
        places = _places(stores)
        assert self._library.RexLaneRestock(self._number, places.ctypes.data), "an errand is under way"
        self._stores, self._views = tuple(stores), _views(stores)

    def begin(
        self,
        x: Float[Array, "N D"],
        place: Int[Array, ""],
        ids: Int[Array, "N K"],
        weights: Float[Array, "N K"],
        *,
        store: int,
    ) -> Float[Array, "N D"]:
        """Send off the experts `ids` (-1: none) of the layer at `place` of a store. Gives x: what runs meanwhile takes
        it from here."""
        bits = lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
        words = jnp.concatenate(
            [place.astype(jnp.int32).reshape(1), ids.astype(jnp.int32).reshape(-1), bits.reshape(-1)]
        )
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = jax.ffi.ffi_call("RexErrandBegins", shape, input_output_aliases={0: 0}, has_side_effect=True)
        return run(x, words, lane=np.int64(self._number), store=np.int64(store), top_k=np.int64(ids.shape[1]))

    def end(self, after: Float[Array, "N D"]) -> tuple[Float[Array, "N D"], Float32[Array, "N D"]]:
        """`after`, which is there before this is waited for, and the weighed sums of the last errand; 0 for a token
        without slots."""
        shapes = (jax.ShapeDtypeStruct(after.shape, after.dtype), jax.ShapeDtypeStruct(after.shape, jnp.float32))
        run = jax.ffi.ffi_call("RexErrandEnds", shapes, input_output_aliases={0: 0}, has_side_effect=True)
        same, out = run(after, lane=np.int64(self._number))
        return same, out

    def set_signals(self, *, in_turn: bool = False, calls_back: bool = False) -> None:
        """For measurements: let the accelerator wait for each errand at its begin; let signals be calls of the
        driver."""
        self._library.RexLaneSet(self._number, in_turn, calls_back)

    def counts(self) -> LaneCounts:
        """What it did so far."""
        told = np.zeros(3, np.int64)
        self._library.RexLaneTold(self._number, told.ctypes.data)
        return LaneCounts(num_errands=int(told[0]), busy_s=int(told[1]) / 1e9, calls_back=bool(told[2]))


def _views(stores: Sequence[ExpertTable]) -> list[np.ndarray]:
    """Views that hold the memory of stores, also where somebody deletes or donates their arrays: threads read it where
    it lies."""
    return [np.asarray(array) for array in jax.tree.leaves(list(stores))]


def _places(stores: Sequence[ExpertTable]) -> UInt[np.ndarray, " arrays"]:
    """Where the arrays of stores lie, once they are there."""
    arrays = [array for store in stores for array in (store.gate_up, store.down)]
    assert all(device.platform == "cpu" for array in arrays for device in array.devices()), (
        "stores lie in the host's memory"
    )
    jax.block_until_ready(arrays)
    return np.array([array.unsafe_buffer_pointer() for array in arrays], np.uintp)
