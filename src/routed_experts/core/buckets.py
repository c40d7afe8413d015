"""Buckets: the padded shapes of a step that are compiled, and the choice of one for a step.

Decode steps are padded in requests, extend steps in tokens; deterministic mode has one shape for both."""

import dataclasses

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """`decode`: padded requests of decode steps (none in deterministic mode). `extend`: padded tokens of the others,
    which are all padded to `max_requests` requests. `table_width`: pages a request may have."""

    decode: tuple[int, ...]
    extend: tuple[int, ...]
    max_requests: int
    table_width: int

    @staticmethod
    def from_args(args: ServerArgs, *, context_length: int) -> "Buckets":
        """Build the shapes of `args`, without those above the largest step: one token of every running request, and a
        prefill."""
        width = -(-context_length // args.page_size)
        requests, tokens = args.batch_paddings, args.token_paddings
        tokens = tokens[: 1 + sum(size < args.prefill_limit + args.running_limit for size in tokens)]
        if args.deterministic:
            return Buckets(decode=(), extend=tokens[-1:], max_requests=requests[-1], table_width=width)
        return Buckets(decode=requests, extend=tokens, max_requests=requests[-1], table_width=width)

    def shape(self, num_tokens: int, num_requests: int, *, all_decode: bool) -> tuple[ForwardMode, int, int]:
        """Return (mode, padded tokens, padded requests) of the smallest shape that holds a step."""
        if all_decode and self.decode:
            size = next(size for size in self.decode if size >= num_requests)
            return ForwardMode.DECODE, size, size
        size = next(size for size in self.extend if size >= num_tokens)
        return ForwardMode.EXTEND, size, self.max_requests

    def all_shapes(self) -> tuple[tuple[ForwardMode, int, int], ...]:
        """Return every shape that `shape` can return."""
        decode = [(ForwardMode.DECODE, size, size) for size in self.decode]
        return (*decode, *((ForwardMode.EXTEND, size, self.max_requests) for size in self.extend))
