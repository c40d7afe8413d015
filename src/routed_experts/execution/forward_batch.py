"""ForwardBatch: one step on the device, unpacked from a single int32 array.

All metadata of a step is one host-to-device put; floats travel as their bits. With data ranks the arrays of all ranks,
of one shape, are side by side, and the devices of a rank get theirs. The sampler's part comes first and
depends on the padded requests alone, so one sampler serves steps of any number of tokens. Dims: N padded tokens, B
padded requests, R request slots, W pages of a request."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from routed_experts.core.errors import ProcessMismatchError
from routed_experts.core.model_worker_batch import FROM_DEVICE, ForwardMode, ModelWorkerBatch, SamplingMode
from routed_experts.execution.orders import Order
from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.logprobs import bitcast_int32
from routed_experts.layers.sampling import SamplingBatch

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
# Before the page table, so that it begins at a multiple of 256 bytes. XLA passes a slice at a multiple of 128 to a
# kernel as it lies, without a copy, and Pallas' Mosaic GPU kernels refuse arrays that begin at no multiple of 256.
_PADDING, _ALIGNED_WORDS = "padding", 64


def _num_words(segments: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, segments.values()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The padded sizes of a step: one compiled forward each."""

    mode: ForwardMode
    num_tokens: int
    num_requests: int
    table_width: int

    def to_json(self) -> list[str | int]:
        """The sizes as orders hold them."""
        return [self.mode.value, self.num_tokens, self.num_requests, self.table_width]

    @staticmethod
    def from_json(sizes: Sequence[Any]) -> "BatchShape":
        """Read what `to_json` returned. Raises ValueError for other values."""
        mode, tokens, requests, width = sizes
        return BatchShape(mode=ForwardMode(mode), num_tokens=tokens, num_requests=requests, table_width=width)

    def segments(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every array in the packed form, in order."""
        n, b, w = (self.num_tokens,), (self.num_requests,), self.table_width
        tokens = {"num_tokens": (), "token_ids": n, "positions": n, "token_rows": n}
        rows = {"query_starts": (b[0] + 1,), "seq_lens": b, "prompt_len": b}
        before = sampler_segments(self.num_requests) | tokens | rows
        return before | {_PADDING: (-_num_words(before) % _ALIGNED_WORDS,), "page_table": (b[0], w)}

    @property
    def packed(self) -> jax.ShapeDtypeStruct:
        """Shape of the packed array."""
        return jax.ShapeDtypeStruct((_num_words(self.segments()),), jnp.int32)


def sampler_segments(num_requests: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of what the sampler reads, in order: the beginning of the packed form."""
    b = (num_requests,)
    return {"request_slots": b, "top_k": b, "seed": (num_requests, 2), "choice": b, "position": b} | dict.fromkeys(
        _FLOATS, b
    )


_ORDER = tuple(
    BatchShape(mode=ForwardMode.DECODE, num_tokens=1, num_requests=1, table_width=1).segments()
)  # the same for all shapes


def num_sampler_words(num_requests: int) -> int:
    """How many words of the packed form the sampler reads."""
    return _num_words(sampler_segments(num_requests))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """A step's metadata on the device, as the layers need it."""

    token_ids: Int[Array, " N"]
    request_slots: Int[Array, " B"]
    paged: PagedBatch
    prompt_len: Int[Array, " B"]

    def resolve_tokens(self, last_tokens: Int[Array, " R"]) -> Int[Array, " N"]:
        """Put in the ids that the host did not know: the last token sampled in the request's slot."""
        known = self.token_ids != FROM_DEVICE
        return jnp.where(known, self.token_ids, last_tokens[self.request_slots[self.paged.token_rows]])

    @property
    def generated(self) -> Bool[Array, " N"]:
        """Which tokens were generated; the others are of prompts, or padding."""
        return self.paged.positions >= self.prompt_len[self.paged.token_rows]

    def of_last_tokens(self, x: Float[Array, "N D"]) -> Float[Array, "B D"]:
        """What there is of each request's last token; for padding rows, of the step's last one."""
        return jnp.take(x, jnp.maximum(self.paged.query_starts[1:] - 1, 0), axis=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerBatch:
    """A step's metadata on the device, as the sampler needs it."""

    request_slots: Int[Array, " B"]
    sampling: SamplingBatch
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    repetition: Float[Array, " B"]


def to_batch_shape(batch: ModelWorkerBatch) -> BatchShape:
    """The padded sizes of a batch."""
    (rows, width), tokens = batch.page_table.shape, batch.token_ids.shape[0]
    return BatchShape(mode=batch.mode, num_tokens=tokens, num_requests=rows, table_width=width)


def pack_ranks(batches: Sequence[ModelWorkerBatch]) -> Int32[np.ndarray, " R*words"]:
    """The packed form of each data rank's batch, one after another."""
    return concatenate([pack(batch) for batch in batches])


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
    parts = list[np.ndarray]()
    for name in _ORDER:
        if name == _PADDING:
            parts.append(np.zeros(-sum(part.size for part in parts) % _ALIGNED_WORDS, np.int32))
            continue
        array = named[name]
        assert array.dtype.itemsize == 4, (name, array.dtype)
        parts.append(array if array.dtype == np.int32 else array.view(np.int32))
    return np.concatenate(parts, axis=None)


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """What the programs of a step take from the host, in every process that runs them: the packed metadata; in the FULL
    mode ids and values of the logit bias [B, X]; with prompt logprobs the next prompt token of each token [N]. With
    data ranks, those of all ranks along the first axis."""

    shape: BatchShape
    sampling_mode: SamplingMode
    packed: Any  # int32 [words]; on the device where a model drafts ahead
    bias: tuple[Int32[np.ndarray, "B X"], Float[np.ndarray, "B X"]] | None
    prompt_targets: Int32[np.ndarray, " N"] | None

    @staticmethod
    def from_batches(batches: Sequence[ModelWorkerBatch], shape: BatchShape, packed: Any) -> "StepInputs":
        """Build the inputs from the batch of each data rank and their packed metadata."""
        bias, first = None, batches[0]
        if first.sampling_mode is SamplingMode.FULL:
            ids, values = zip(*map(_bias, batches), strict=True)
            bias = concatenate(ids), concatenate(values)
        targets = [batch.prompt_targets for batch in batches if batch.prompt_targets is not None]
        return StepInputs(shape, first.sampling_mode, packed, bias, concatenate(targets) if targets else None)

    @staticmethod
    def from_order(order: Order, *, num_ranks: int) -> "StepInputs":
        """Read the inputs from a STEP order. Raises ProcessMismatchError for a malformed order."""
        try:
            *sizes, sampling, has_targets = order.head["step"]
            shape = BatchShape.from_json(sizes)
            packed, *rest = order.arrays
            targets = rest.pop() if has_targets else None
            bias = (rest[0], rest[1]) if rest else None
            inputs = StepInputs(shape, SamplingMode(sampling), packed, bias, targets)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProcessMismatchError(f"order {order.seq} is no step: {error!r}") from error
        needs_bias = inputs.sampling_mode is SamplingMode.FULL
        if packed.size != num_ranks * shape.packed.size or (bias is not None) != needs_bias:
            raise ProcessMismatchError(f"order {order.seq} has arrays of another shape than {shape}")
        return inputs

    @property
    def head(self) -> dict[str, object]:
        """The head of its order."""
        return {"step": [*self.shape.to_json(), int(self.sampling_mode), self.prompt_targets is not None]}

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays of its order."""
        targets = () if self.prompt_targets is None else (self.prompt_targets,)
        return (self.packed, *(self.bias or ()), *targets)


def unpack_words(packed: Int[Array, " words"], shape: BatchShape) -> dict[str, Array]:
    """Cut the packed array into its named arrays."""
    return _cut(packed, shape.segments())


def pack_words(parts: Mapping[str, Array]) -> Int32[Array, " words"]:
    """The packed form of what `unpack_words` returns."""
    words = [bitcast_int32(parts[name]) if name in _FLOATS else parts[name] for name in _ORDER]
    return jnp.concatenate([part.ravel() for part in words])


def unpack(packed: Int[Array, " words"], shape: BatchShape) -> ForwardBatch:
    """Cut the packed array into the parts that layers need; static slices, no data movement that XLA does not fuse."""
    parts = unpack_words(packed, shape)
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
    return ForwardBatch(paged=paged, **{name: parts[name] for name in ("token_ids", "request_slots", "prompt_len")})


def unpack_sampler(words: Int[Array, " words"], num_requests: int) -> SamplerBatch:
    """Cut the first words of the packed array into the parts that the sampler needs; the words after them are not
    looked at."""
    parts = _cut(words, sampler_segments(num_requests))
    seed = lax.bitcast_convert_type(parts["seed"], jnp.uint32)
    names = ("temperature", "top_k", "top_p", "min_p", "choice", "position")
    sampling = SamplingBatch(seed=seed, **{name: parts[name] for name in names})
    return SamplerBatch(
        sampling=sampling, **{name: parts[name] for name in ("request_slots", "presence", "frequency", "repetition")}
    )


def _cut(words: Int[Array, " words"], segments: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    parts: dict[str, Array] = {}
    start = 0
    for name, dims in segments.items():
        size = math.prod(dims)
        part = words[start : start + size].reshape(dims)
        parts[name] = lax.bitcast_convert_type(part, jnp.float32) if name in _FLOATS else part
        start += size
    return parts


def _bias(batch: ModelWorkerBatch) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of the logit bias of a batch in the FULL mode."""
    ids, values = batch.sampling.bias_ids, batch.sampling.bias_values
    assert ids is not None and values is not None, "in the FULL mode"
    return ids, values


def concatenate(parts: Sequence[np.ndarray]) -> Any:
    """The arrays of all data ranks along their first axis; a single one as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def split_ranks(array: Any, num_ranks: int) -> list[Any]:
    """The part of each data rank of an array, on the host; None for each where there is none."""
    return [None] * num_ranks if array is None else np.split(np.asarray(array), num_ranks)
