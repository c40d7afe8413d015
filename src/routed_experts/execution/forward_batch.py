"""ForwardBatch: one step on the device, unpacked from a single int32 array. Knows nothing of the model.

All metadata of a step is one host-to-device put; floats travel as their bits. Dims: N padded tokens, B padded requests,
W pages of a request."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from routed_experts.core.model_worker_batch import FROM_DEVICE, ForwardMode, ModelWorkerBatch
from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.sampling import SamplingBatch

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The padded sizes of a step: one compiled forward each."""

    mode: ForwardMode
    num_tokens: int
    num_requests: int
    table_width: int

    def segments(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every array in the packed form, in order."""
        n, b, w = (self.num_tokens,), (self.num_requests,), self.table_width
        tokens = {"num_tokens": (), "token_ids": n, "positions": n, "token_rows": n}
        rows = {"query_starts": (b[0] + 1,), "seq_lens": b, "request_slots": b, "page_table": (b[0], w)}
        sampling = {"top_k": b, "seed": (b[0], 2), "choice": b, "position": b, "prompt_len": b}
        return tokens | rows | sampling | dict.fromkeys(_FLOATS, b)

    @property
    def packed(self) -> jax.ShapeDtypeStruct:
        """Shape of the packed array."""
        return jax.ShapeDtypeStruct((sum(math.prod(shape) for shape in self.segments().values()),), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """A step's metadata on the device."""

    token_ids: Int[Array, " N"]
    request_slots: Int[Array, " B"]
    paged: PagedBatch
    sampling: SamplingBatch
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    repetition: Float[Array, " B"]
    prompt_len: Int[Array, " B"]

    def resolve_tokens(self, last_tokens: Int[Array, " R"]) -> Int[Array, " N"]:
        """Put in the ids that the host did not know: the last token sampled in the request's slot."""
        known = self.token_ids != FROM_DEVICE
        return jnp.where(known, self.token_ids, last_tokens[self.request_slots[self.paged.token_rows]])

    @property
    def generated(self) -> Bool[Array, " N"]:
        """Which tokens were generated; the others are of prompts, or padding."""
        return self.paged.positions >= self.prompt_len[self.paged.token_rows]

    @property
    def last_token_of_row(self) -> Int[Array, " B"]:
        """Index among the step's tokens of each request's last one (0 for padding rows)."""
        return jnp.maximum(self.paged.query_starts[1:] - 1, 0)


def shape_of(batch: ModelWorkerBatch) -> BatchShape:
    """The padded sizes of a batch."""
    (rows, width), tokens = batch.page_table.shape, batch.token_ids.shape[0]
    return BatchShape(mode=batch.mode, num_tokens=tokens, num_requests=rows, table_width=width)


def pack(batch: ModelWorkerBatch) -> Int32[np.ndarray, " words"]:
    """Lay all metadata of a batch side by side."""
    sampling = batch.sampling
    named = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "choice": sampling.choice,
        "position": sampling.position,
        "presence": sampling.presence,
        "frequency": sampling.frequency,
        "repetition": sampling.repetition,
        "prompt_len": sampling.prompt_len,
        "num_tokens": np.array([batch.num_tokens], np.int32),
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "token_rows": batch.token_rows,
        "query_starts": batch.query_starts,
        "seq_lens": batch.seq_lens,
        "request_slots": batch.request_slots,
        "page_table": batch.page_table,
    }
    parts = []
    for name in shape_of(batch).segments():
        array = named[name]
        assert array.dtype.itemsize == 4, (name, array.dtype)
        parts.append(array.view(np.int32).reshape(-1))
    return np.concatenate(parts)


def unpack(packed: Int[Array, " words"], shape: BatchShape) -> ForwardBatch:
    """Cut the packed array into its parts; static slices, no data movement that XLA does not fuse."""
    parts: dict[str, Array] = {}
    start = 0
    for name, dims in shape.segments().items():
        size = math.prod(dims)
        part = packed[start : start + size].reshape(dims)
        parts[name] = lax.bitcast_convert_type(part, jnp.float32) if name in _FLOATS else part
        start += size
    valid: Bool[Array, " N"] = jnp.arange(shape.num_tokens) < parts["num_tokens"]
    paged = PagedBatch(
        positions=parts["positions"],
        token_rows=parts["token_rows"],
        valid=valid,
        query_starts=parts["query_starts"],
        seq_lens=parts["seq_lens"],
        page_table=parts["page_table"],
        decode=shape.mode is ForwardMode.DECODE,
    )
    seed = lax.bitcast_convert_type(parts["seed"], jnp.uint32)
    names = ("temperature", "top_k", "top_p", "min_p", "choice", "position")
    sampling = SamplingBatch(seed=seed, **{name: parts[name] for name in names})
    rest = {name: parts[name] for name in ("presence", "frequency", "repetition", "prompt_len", "token_ids", "request_slots")}
    return ForwardBatch(paged=paged, sampling=sampling, **rest)
