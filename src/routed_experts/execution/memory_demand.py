"""Estimates the device memory of an engine, and finds the flags that make a model fit.

Every term but the weights depends on a flag, so each flag is searched for the nearest value that fits."""

import bisect
import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from routed_experts.core.buckets import Buckets
from routed_experts.core.errors import MemoryPlanError
from routed_experts.core.server_args import ServerArgs
from routed_experts.memory.kv_pool import KVPoolSpec

DRAFT_TOKENS = "speculative_num_draft_tokens"
FlagChange = Mapping[str, int | float]  # fields of ServerArgs, and DRAFT_TOKENS
MAX_FRACTION = 0.95  # the largest that is advised: a step needs some of the device, too
_MIN_PAGE = 16  # the smallest that is advised; smaller ones are slow, and some kernels have none


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftDemand:
    """Bytes of a draft model: its weights, and what its layers keep of a token."""

    weights: int = 0
    bytes_per_token: int = 0


NO_DRAFT_MODEL = DraftDemand()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """Bytes that one device must hold. `model`: shapes of its pool, from `args`; `row_bytes`: what is recorded of a
    token, 0 with capture off; `device`: bytes of the device; `num_drafts`: the longest draft, 0 without speculative
    decoding; `draft`: of a model that drafts."""

    args: ServerArgs
    model: KVPoolSpec
    weights: int
    row_bytes: int
    vocab_size: int
    context_length: int
    device: int
    num_drafts: int = 0
    draft: DraftDemand = NO_DRAFT_MODEL

    @property
    def limit(self) -> int:
        """Bytes that weights and pools may take."""
        return int(self.device * self.args.mem_fraction_static)

    @property
    def penalties(self) -> int:
        """Bytes of the token counts of each request slot: a count and a mark for each token of the vocabulary."""
        return (
            (self.args.running_limit + 1)
            * self.vocab_size
            * (np.dtype(np.int32).itemsize + np.dtype(np.bool_).itemsize)
        )

    @property
    def capture_device(self) -> int:
        """Bytes of the rows of two steps of the largest padded size, those of all data ranks. Rows of small steps that
        wait to be filed are not included."""
        return 2 * max(tokens for _, tokens, _ in self._buckets.all_shapes()) * self.row_bytes * self.args.dp_size

    @property
    def verify_scores(self) -> int:
        """Bytes of the scores and the noise of the largest verify step, float32, and of what each of its rows adds to
        the counts of its slot, int8."""
        return self._verify_rows * self.vocab_size * (2 * np.dtype(np.float32).itemsize + np.dtype(np.int8).itemsize)

    @property
    def verify_inputs(self) -> int:
        """Bytes of what recurrent layers store of the largest verify step."""
        return self.model.input_bytes(self._verify_rows) if self._verify_rows else 0

    @property
    def _verify_rows(self) -> int:
        """Tokens of the largest verify step."""
        return max((min(tokens, size * (self.num_drafts + 1)) for size, tokens in self._buckets.verify), default=0)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers, those of a draft model included."""
        return (self.model.bytes_per_token + self.draft.bytes_per_token) * self.args.page_size

    @property
    def required_pages(self) -> int:
        """Pages that must fit: those of max_total_tokens, or of one request of the given context_length; else one."""
        if self.args.max_total_tokens is not None:
            return self.args.max_total_tokens // self.args.page_size
        return 1 if self.args.context_length is None else -(-self.args.context_length // self.args.page_size)

    @property
    def fitting_pages(self) -> int:
        """Pages that fit next to the padding page; below 1 if none does."""
        of_steps = self.capture_device + self.verify_scores + self.verify_inputs
        other = self.penalties + of_steps + self.model.state_bytes + self.draft.weights
        return (self.limit - self.weights - other) // self.page_bytes - 1

    @property
    def fits(self) -> bool:
        """Whether the required pages fit."""
        return self.fitting_pages >= self.required_pages

    @property
    def _buckets(self) -> Buckets:
        return Buckets.from_args(self.args, context_length=self.context_length, num_drafts=self.num_drafts)

    def with_flags(self, change: FlagChange) -> "MemoryDemand":
        """The same model with some arguments changed."""
        args = dataclasses.replace(self.args, **{name: value for name, value in change.items() if name != DRAFT_TOKENS})
        num_drafts = int(change.get(DRAFT_TOKENS, self.num_drafts + 1)) - 1
        model = dataclasses.replace(self.model, page_size=args.page_size, num_requests=args.running_limit + 1)
        context_length = args.context_length or self.context_length
        return dataclasses.replace(self, args=args, model=model, context_length=context_length, num_drafts=num_drafts)

    def require_fit(self) -> None:
        """Raise MemoryPlanError unless it fits: the terms, the limit, and what would fit."""
        if not self.fits:
            ways = fitting_configs(self)
            raise MemoryPlanError(_error_text(self, ways), ways=ways)


def fitting_configs(demand: MemoryDemand) -> tuple[FlagChange, ...]:
    """Changes of the arguments, each enough by itself: one flag, at the value nearest to its present one. Where no
    single flag is enough: with the largest advised fraction; then with one request at a time in the
    smallest steps, too. Empty: nothing helps."""
    largest = {"mem_fraction_static": max(MAX_FRACTION, demand.args.mem_fraction_static)}
    single = demand.with_flags({**largest, "max_running_requests": 1}).args
    smallest = largest | {"max_running_requests": 1, "max_prefill_tokens": _smallest_prefill(single)}
    for together in ({}, largest, smallest):
        base = demand.with_flags(together)
        if base.fits:
            return (together,)
        if ways := tuple({**together, **way} for way in _single_ways(base)):
            return ways
    return ()


def _smallest_prefill(args: ServerArgs) -> int:
    """The most prompt tokens of a step that cost no more than one; one request runs."""
    sizes = args.token_paddings
    least = max(next((size for size in sizes if size >= 2), sizes[-1]), args.batch_paddings[-1])
    return max(1, max(size for size in sizes if size <= least) - 1)


def _single_ways(demand: MemoryDemand) -> Iterator[FlagChange]:
    """For each flag that is enough by itself, its nearest value."""
    args, page = demand.args, demand.args.page_size
    parts = range(math.floor(args.mem_fraction_static * 1000) + 1, round(MAX_FRACTION * 1000) + 1)  # of a thousand
    index = bisect.bisect_left(
        parts, True, key=lambda part: demand.with_flags({"mem_fraction_static": part / 1000}).fits
    )
    if index < len(parts):
        yield {"mem_fraction_static": parts[index] / 1000}
    running = range(1, args.running_limit)
    few = bisect.bisect_left(
        running, True, key=lambda count: not demand.with_flags({"max_running_requests": count}).fits
    )
    if few:
        yield {"max_running_requests": running[few - 1]}
    for size in reversed(args.token_paddings):
        change = {"max_prefill_tokens": size - args.running_limit}
        if 1 <= size - args.running_limit < args.prefill_limit and demand.with_flags(change).fits:
            yield change
            break
    for tokens in range(demand.num_drafts, 1, -1):  # one draft is two tokens
        if demand.with_flags({DRAFT_TOKENS: tokens}).fits:
            yield {DRAFT_TOKENS: tokens}
            break
    if args.max_total_tokens is not None and demand.fitting_pages >= 1:
        yield {"max_total_tokens": demand.fitting_pages * page}
    elif args.context_length is not None and demand.fitting_pages * page >= 2:
        yield {"context_length": demand.fitting_pages * page}
    for size in (page >> halvings for halvings in range(1, page.bit_length())):
        if (
            size >= _MIN_PAGE
            and (args.max_total_tokens or size) >= size
            and demand.with_flags({"page_size": size}).fits
        ):
            yield {"page_size": size}
            break


def _error_text(demand: MemoryDemand, ways: tuple[FlagChange, ...]) -> str:
    args, pages, limit = demand.args, demand.required_pages, format_size(demand.limit).strip()
    cause = "" if args.context_length is None else f", one request of context_length={args.context_length}"
    cause = cause if args.max_total_tokens is None else f", max_total_tokens={args.max_total_tokens}"
    terms = {
        "weights": demand.weights,
        "weights of the draft model": demand.draft.weights,
        "penalties": demand.penalties,
        "rows of two steps": demand.capture_device,
        "scores of verify steps": demand.verify_scores,
        "recurrent inputs of verify steps": demand.verify_inputs,
        "states of requests": demand.model.state_bytes,
        "KV of the draft model": (pages + 1) * args.page_size * demand.draft.bytes_per_token,
        f"{pages + 1} KV pages of {args.page_size} tokens{cause}": (pages + 1)
        * args.page_size
        * demand.model.bytes_per_token,
    }
    plan = " + ".join(f"{name} {format_size(count).strip()}" for name, count in terms.items() if count)
    limit += f", mem_fraction_static={args.mem_fraction_static} of {format_size(demand.device).strip()}"
    fits = ", or with ".join(" and ".join(f"{name}={value}" for name, value in way.items()) for way in ways)
    advice = f"it fits with {fits}" if ways else "no value of these flags makes room"
    if demand.weights > demand.limit // 2:
        advice += f"; {'or' if ways else 'it takes'} a smaller dtype, a larger tp_size, or experts kept on the host"
    total = format_size(sum(terms.values())).strip()
    return f"this model does not fit: {plan} = {total}, above the limit of {limit}; {advice}"


def format_size(count: int) -> str:
    """Bytes as text with a unit, aligned."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:8.1f} {unit}"
    return f"{count:8} B  "
