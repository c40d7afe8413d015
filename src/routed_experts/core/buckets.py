"""Buckets: the padded shapes of a step that are compiled, and the choice of one for a step.

Decode steps are padded in requests, extend steps in tokens, verify steps in both; deterministic mode has one size for
all of them."""

import dataclasses

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs

SHORT_DRAFT = 3  # drafts a request of the smaller of two verify steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The padded sizes of an engine's steps, for each of which a program is compiled.

    `decode`: padded requests of decode steps (none in deterministic mode). `extend`: padded tokens of the others,
    which are all padded to `max_requests` requests. `table_width`: pages a request may have. `num_drafts`: drafts that
    a request may verify in a step, 0 without speculative decoding; `verify`: padded requests and tokens of these steps,
    in order. `draft_model`: a model drafts; `lookahead`: tokens behind those that a step feeds, for which it needs
    pages where drafts follow it, as a draft model feeds its own."""

    decode: tuple[int, ...]
    extend: tuple[int, ...]
    max_requests: int
    table_width: int
    num_drafts: int = 0
    verify: tuple[tuple[int, int], ...] = ()
    draft_model: bool = False
    lookahead: int = 0

    @staticmethod
    def from_args(
        args: ServerArgs,
        *,
        context_length: int,
        num_drafts: int = 0,
        draft_model: bool = False,
        lookahead: int = 0,
    ) -> "Buckets":
        """Build the shapes of `args`, without those above the largest step: one token of every running request, and a
        prefill. `num_drafts`: the longest draft of a request, 0 without speculative decoding."""
        width = -(-context_length // args.page_size)
        requests, tokens = args.batch_paddings, args.token_paddings
        tokens = tokens[: 1 + sum(size < args.prefill_limit + args.running_limit for size in tokens)]
        if args.deterministic:
            verify = ((requests[-1], tokens[-1]),) if num_drafts else ()
            decode, tokens = (), tokens[-1:]
        else:
            ends = (requests[0], requests[-1])
            verify = tuple(
                (size, size * queries) for size in requests for queries in _verify_queries(num_drafts, size in ends)
            )
            decode = requests
        return Buckets(
            decode=decode,
            extend=tokens,
            max_requests=requests[-1],
            table_width=width,
            num_drafts=num_drafts,
            verify=verify,
            draft_model=draft_model,
            lookahead=lookahead,
        )

    def shape(self, num_tokens: int, num_requests: int, *, all_decode: bool) -> tuple[ForwardMode, int, int]:
        """Return (mode, padded tokens, padded requests) of the smallest shape that holds a step."""
        if all_decode and self.decode:
            size = next(size for size in self.decode if size >= num_requests)
            return ForwardMode.DECODE, size, size
        size = next(size for size in self.extend if size >= num_tokens)
        return ForwardMode.EXTEND, size, self.max_requests

    def verify_capacity(self, num_requests: int) -> int:
        """Return the most tokens of a verify step of so many requests: rows are sampled in whole blocks of requests."""
        return max(tokens - tokens % size for size, tokens in self.verify if size >= num_requests)

    def verify_shape(self, num_tokens: int, num_requests: int) -> tuple[int, int] | None:
        """Return (padded tokens, padded requests) of the smallest verify step that holds so many; None if none does."""
        fits = ((tokens, size) for size, tokens in self.verify if size >= num_requests and tokens >= num_tokens)
        return next(fits, None)

    def all_shapes(self) -> tuple[tuple[ForwardMode, int, int], ...]:
        """Return every shape that `shape` can return."""
        decode = [(ForwardMode.DECODE, size, size) for size in self.decode]
        extend = [(ForwardMode.EXTEND, size, self.max_requests) for size in self.extend]
        verify = [(ForwardMode.TARGET_VERIFY, tokens, size) for size, tokens in self.verify]
        return (*decode, *extend, *verify)


def continuation_size(num_drafts: int) -> int:
    """Return the tokens of a text that hold what a verify step adds to a request at most, and the drafts of the
    next."""
    return 2 * num_drafts + 1


def _verify_queries(num_drafts: int, has_short: bool) -> tuple[int, ...]:
    """Tokens a request of the verify steps that are compiled: the longest draft of each and, with `has_short`, short
    ones. On an accelerator padding is not free: few requests read fewer experts, many compute fewer scores."""
    if num_drafts == 0:
        return ()
    return tuple(sorted({*((min(SHORT_DRAFT, num_drafts) + 1,) if has_short else ()), num_drafts + 1}))
