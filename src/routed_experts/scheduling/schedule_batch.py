"""Req, one sequence on its way through the engine, and ScheduledChunk, its part of a step.

Only Req changes, and only on the engine thread. Its token counts are ordered
    0 .. num_committed .. num_dispatched .. num_known + num_pending
Committed tokens were fed by a step whose outputs are on the host (their rows are filed). Dispatched tokens were fed in
order (their keys are or will be in the pool; what a step scheduled ahead feeds counts once it is read). Known tokens
are on the host. Pending tokens were sampled by a step that has not been read yet (one a step, of at most two).

A request with a grammar may have forced tokens: those that follow the token sampled last, whatever that is. They are
fed as one chunk with it, and become tokens of the request when that step is committed: until then they are in the
chunk alone, so that a request that ends or is retracted before has nothing to take back. They count as pending."""

import dataclasses
import enum

import numpy as np
from jaxtyping import Int32

from routed_experts.capture.host_cache import SavedRows
from routed_experts.core.grammar_state import GrammarState
from routed_experts.core.io_struct import FinishReason, TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.core.speculative_stats import SpeculativeCounter
from routed_experts.core.weight_version import WeightVersion
from routed_experts.memory.prefix_cache import PrefixNode

NO_TOKENS: Int32[np.ndarray, " 0"] = np.zeros(0, np.int32)


class ReqState(enum.Enum):
    """WAITING holds no page; RUNNING holds a slot and pages; FINISHED has a reason, and pages until it is released."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Req:
    """A sequence: its tokens, its progress, its pages and its outputs."""

    def __init__(self, source: TokenizedGenerateReqInput) -> None:
        self.source = source
        self.rid = source.rid
        self.prompt_len = int(source.input_ids.size)
        self.max_len = self.prompt_len + source.sampling.max_tokens
        self.min_stop_len = self.prompt_len + source.sampling.min_tokens
        self.tokens: Int32[np.ndarray, " max_len"] = np.zeros(self.max_len, np.int32)
        self.tokens[: self.prompt_len] = source.input_ids
        ranks_tokens = source.return_logprob and source.top_logprobs_num > 0
        self.sampling_mode = SamplingMode.FULL if ranks_tokens else SamplingMode.required_by(source.sampling)
        self.state = ReqState.WAITING
        self.finish_reason: FinishReason | None = None
        # Why it finishes once its last token has been fed, for that token's row.
        self.pending_finish: FinishReason | None = None
        self.num_known, self.num_pending, self.num_dispatched, self.num_committed = self.prompt_len, 0, 0, 0
        self.dp_rank = 0  # the data rank that it belongs to, from when it is queued
        self.slot, self.num_pages, self.num_shared = 0, 0, 0
        self.node: PrefixNode | None = None
        self.cached_tokens, self.weight_version = 0, 0
        self.placement_epoch: int | None = None  # of the last step that was committed
        self.most_fed = 0  # tokens that it had fed when it was last retracted, or before
        self.weight_changes: tuple[tuple[int, WeightVersion], ...] = ()  # see `weight_runs`
        self.is_prefilled = False  # its whole prompt has been committed once
        self.saved_rows: SavedRows | None = None
        self.output_logprobs: list[float] = []
        self.output_top: list[tuple[tuple[float, int], ...] | None] = []
        self.has_stop_strings = bool(source.sampling.stop)  # its tokens are decoded one by one
        self.speculative = SpeculativeCounter()
        self.grammar: GrammarState | None = None if source.grammar is None else source.grammar.start()
        self.forced = NO_TOKENS  # that follow the token sampled last, and are in no step yet
        self.input_logprobs: dict[int, tuple[float, tuple[tuple[float, int], ...] | None]] = {}

    @property
    def num_output(self) -> int:
        """Generated tokens that the host knows."""
        return self.num_known - self.prompt_len

    @property
    def num_fed(self) -> int:
        """Tokens that were fed at least once, or came with pages of the prefix cache."""
        return max(self.most_fed, self.num_committed, self.num_known - 1 if self.num_output else 0)

    @property
    def output_ids(self) -> Int32[np.ndarray, " G"]:
        """Generated tokens, the one that stopped it included."""
        return self.tokens[self.prompt_len : self.num_known]

    @property
    def wants_decode(self) -> bool:
        """Whether the next step feeds the token sampled last: one more token, or that token's row, is still to come."""
        length = self.num_known + self.num_pending
        has_more = length < self.max_len + self.source.routed_experts.include_last
        if self.pending_finish is not None:
            has_more = self.num_dispatched < self.num_known
        return has_more and self.num_dispatched == length - 1 and self.num_dispatched >= self.prompt_len

    @property
    def num_unfed(self) -> int:
        """Known tokens to feed before the next is sampled; a decoding request has one or none."""
        return self.num_known - self.num_dispatched

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are requested."""
        return self.source.return_logprob and 0 <= self.source.logprob_start_len < self.prompt_len

    @property
    def max_drafts(self) -> int:
        """Drafts that the next step may verify, so that all of its rows share one set of sampling parameters and no
        row is sampled past the end. 0: none."""
        if not self.is_prefilled or self.num_pending or self.pending_finish is not None or self.grammar is not None:
            return 0
        most = self.max_len - self.num_known - 1
        if self.num_known < self.min_stop_len:  # stop ids are banned in all rows of a step, or in none
            most = min(most, self.min_stop_len - self.num_known - 1)
        return max(most, 0)

    def required_mode(self, num_forced: int = 0) -> SamplingMode:
        """Return the sampler mode that the next token needs, after so many forced ones."""
        length = self.num_known + self.num_pending + num_forced
        return SamplingMode.FULL if length < self.min_stop_len else self.sampling_mode

    def bias_now(self, num_forced: int = 0) -> tuple[tuple[int, float], ...]:
        """Return the logit bias of the next token, after so many forced ones: the request's own, and stop ids banned
        before min_tokens."""
        sampling = self.source.sampling
        if self.num_known + self.num_pending + num_forced >= self.min_stop_len:
            return sampling.logit_bias
        return (*sampling.logit_bias, *((token, -np.inf) for token in sorted(self.source.stop_token_ids)))

    def note_update(self, version: WeightVersion) -> None:
        """Note that other weights replace these: they feed what has not been fed yet. No step may be in flight."""
        num_fed = self.num_fed
        if num_fed > (self.weight_changes[-1][0] if self.weight_changes else 0):
            self.weight_changes = (*self.weight_changes, (num_fed, version))

    def finish(self, reason: FinishReason) -> None:
        """Finish this request; it keeps its pages until it is released."""
        assert self.state is not ReqState.FINISHED, (self.rid, self.finish_reason, reason)
        self.state, self.finish_reason = ReqState.FINISHED, reason

    def end(self, reason: FinishReason) -> None:
        """Finish this request with its last token: now, or with include_last once that token has been fed for its
        row."""
        if self.source.routed_experts.include_last:
            self.pending_finish = reason
        else:
            self.finish(reason)

    def stop_at(self, matched: str) -> None:
        """Finish this request at a stop string, which takes precedence over a length that the same token reached."""
        self.state = ReqState.RUNNING
        self.end(FinishReason(type="stop", matched=matched))

    @property
    def met_stop_token(self) -> bool:
        """Whether its last token is a stop token that ended it."""
        reason = self.finish_reason or self.pending_finish
        return reason is not None and isinstance(reason.matched, int)

    @property
    def last_row_ready(self) -> bool:
        """Whether the last token has been fed and committed, so that its row is filed."""
        return self.pending_finish is not None and self.num_committed == self.num_known


@dataclasses.dataclass(slots=True, eq=False)
class ScheduledChunk:
    """One request's part of a step: it feeds tokens [start, start + count), and samples the next one if `samples`. The
    last of these tokens are its drafts, if it has some; then one is sampled after each token. Or the last of them are
    forced by its grammar; then one is sampled after the last. Never changed; not frozen, as each step makes one or two
    a request and a frozen one takes four times as long to make."""

    req: Req
    start: int
    count: int
    samples: bool
    drafts: Int32[np.ndarray, " k"] | None = None
    forced: Int32[np.ndarray, " k"] | None = None

    @property
    def is_masked(self) -> bool:
        """Whether the token that is sampled after it has to be one that a grammar allows."""
        return self.samples and self.req.grammar is not None

    @property
    def num_forced(self) -> int:
        """How many of its tokens are forced."""
        return 0 if self.forced is None else self.forced.size
