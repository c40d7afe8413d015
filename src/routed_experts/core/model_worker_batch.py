"""ModelWorkerBatch: one step, as the scheduler hands it to the runner. NumPy, padded to a bucket.

Tokens of one request are neighbours, in order of position; requests follow batch-row order. Padding tokens and rows
are zeros at the end. Dims: N padded tokens, B padded requests, W pages of a request, X bias entries of a request."""

import dataclasses
import enum
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from routed_experts.core.sampling_params import ResolvedSampling

FROM_DEVICE = -1  # a token id that the host does not know yet: the last one sampled in the request's slot
MAX_GIVEN_IDS = 32  # whose logprobs a request may ask for beside each token's own
MAX_BIAS = 1088  # logit_bias entries (1,024) and stop ids masked by min_tokens (64)


class ForwardMode(enum.Enum):
    """DECODE: every request feeds one token. EXTEND: prompt chunks, alone or mixed with decode tokens. TARGET_VERIFY:
    every request feeds its last known token and the drafts that are to follow it; all of them are sampled after."""

    EXTEND = "extend"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"


class SamplingMode(enum.IntEnum):
    """How much of the sampler a program holds. A step runs in the largest mode that one of its rows needs; rows with
    temperature 0 are greedy in every mode."""

    GREEDY = 0  # argmax only
    RANDOM = 1  # temperature and noise
    FILTERED = 2  # also top-k, top-p, min-p
    FULL = 3  # also penalties, logit bias, top logprobs

    @classmethod
    def required_by(cls, sampling: ResolvedSampling) -> "SamplingMode":
        """The smallest mode that serves these parameters."""
        if sampling.is_penalized or sampling.logit_bias:
            return cls.FULL
        if sampling.is_filtered:
            return cls.FILTERED
        return cls.GREEDY if sampling.is_greedy else cls.RANDOM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """Sampling parameters by batch row; rows that do not sample are greedy."""

    temperature: Float[np.ndarray, " B"]
    top_k: Int[np.ndarray, " B"]
    top_p: Float[np.ndarray, " B"]
    min_p: Float[np.ndarray, " B"]
    seed: UInt[np.ndarray, "B 2"]  # high and low word
    choice: Int[np.ndarray, " B"]
    position: Int[np.ndarray, " B"]  # of the token that is sampled
    presence: Float[np.ndarray, " B"]
    frequency: Float[np.ndarray, " B"]
    repetition: Float[np.ndarray, " B"]
    prompt_len: Int[np.ndarray, " B"]
    bias_ids: Int[np.ndarray, "B X"] | None  # only in the FULL mode; padding id = vocabulary size
    bias_values: Float[np.ndarray, "B X"] | None


class TokenOrigins(NamedTuple):
    """Positions of a step's tokens, prompt lengths of its rows, and the row of each token."""

    positions: Int[np.ndarray, " N"]
    prompt_len: Int[np.ndarray, " B"]
    token_rows: Int[np.ndarray, " N"]

    def generated(self, num_tokens: int) -> Bool[np.ndarray, " num_tokens"]:
        """Return which of the first `num_tokens` tokens were generated; the others are of prompts."""
        return (self.positions >= self.prompt_len[self.token_rows])[:num_tokens]


# Of a step without prompt tokens, recognised by identity.
ALL_GENERATED: Final = TokenOrigins(*np.zeros((3, 0), np.int32))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkerBatch:
    """One step. `return_routed_experts`: the rows that requested routed experts; all rows are captured (DESIGN law 6).
    `all_generated`: no token is of a prompt (a step of one token a row may have prompt tokens). Where a model drafts:
    `drafts_ahead`: the next step is to have drafts; `next_tokens`: of rows that do not sample, the token of the prompt
    that follows their last one, -1 of the others. `is_ahead`: a verify step that was scheduled before the one
    before it had been read. Its positions and lengths count from where the request slots stand on the device, where its
    tokens are, and its KV slots mean nothing, until the scheduler locates it. `continuations`: of such a batch, where
    the host drafts: by row, the position of the first token of a text, then its tokens; negative: no further.
    `is_masked`: a request that samples has a
    grammar, in a batch of any data rank: the sampler takes a mask. `given_ids`: by row, the ids whose logprobs its
    request asks for beside the token's own, padded; None where no request does. `given_targets`: the same by token,
    where they are asked for tokens of a prompt."""

    step: int
    mode: ForwardMode
    sampling_mode: SamplingMode
    num_tokens: int
    num_requests: int
    token_ids: Int[np.ndarray, " N"]
    positions: Int[np.ndarray, " N"]
    token_rows: Int[np.ndarray, " N"]
    kv_slots: Int[np.ndarray, " num_tokens"]
    query_starts: Int[np.ndarray, " B1"]
    seq_lens: Int[np.ndarray, " B"]
    request_slots: Int[np.ndarray, " B"]
    page_table: Int[np.ndarray, "B W"]
    sampling: SamplingArrays
    samples: tuple[bool, ...]  # by real row: whether it samples a token; a chunk before the last does not
    prompt_targets: Int[np.ndarray, " N"] | None  # next prompt token of each token, when a row requests prompt logprobs
    return_routed_experts: tuple[bool, ...]
    all_generated: bool = False
    drafts_ahead: bool = False
    next_tokens: Int[np.ndarray, " B"] | None = None
    is_ahead: bool = False
    continuations: Int[np.ndarray, "B C1"] | None = None
    is_masked: bool = False
    given_ids: Int[np.ndarray, "B G"] | None = None
    given_targets: Int[np.ndarray, "G N"] | None = None

    @property
    def origins(self) -> TokenOrigins:
        """Separates generated tokens of the step from those of prompts."""
        return (
            ALL_GENERATED
            if self.all_generated
            else TokenOrigins(self.positions, self.sampling.prompt_len, self.token_rows)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outputs of a step, on the host: a row is that of a request, in a verify step that of a token. `accepted`: of
    each request of a verify step, the drafts that the model sampled itself. `rows` are its routed experts [N, M*K], or
    an int32 table whose last columns are packed rows (CaptureSpec.row_words of them), real tokens first, or None
    without capture: any array that np.asarray can read; the host cache reads it when it files them. `placement_epoch`:
    of the placement of experts that it ran with, None where there is none. `rerouting`: of each token, slots that
    capacities moved to other experts and slots left empty; None without capacities. `drafts`: of each request k tokens
    that a draft model proposes (negative: none from there on), and the bits of their probabilities; None where it was
    not asked. `given_logprobs`: of the batch's `given_ids` after each row, and of its `given_targets` after each token,
    by the model at temperature 1."""

    tokens: Int[np.ndarray, " B"] | Int[np.ndarray, " N"]
    logprobs: Float[np.ndarray, " B"] | Float[np.ndarray, " N"]
    top_logprobs: Float[np.ndarray, "B T"] | Float[np.ndarray, "N T"] | None
    top_ids: Int[np.ndarray, "B T"] | Int[np.ndarray, "N T"] | None
    prompt_logprobs: Float[np.ndarray, " N"] | None
    prompt_top_logprobs: Float[np.ndarray, "N T"] | None
    prompt_top_ids: Int[np.ndarray, "N T"] | None
    rows: Any
    weight_version: int
    placement_epoch: int | None = None
    rerouting: Int[np.ndarray, "N 2"] | None = None
    accepted: Int[np.ndarray, " B"] | None = None
    drafts: Int[np.ndarray, "B 2k"] | None = None
    given_logprobs: Float[np.ndarray, "B G"] | None = None
    prompt_given_logprobs: Float[np.ndarray, "G N"] | None = None
