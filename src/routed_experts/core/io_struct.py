"""What travels through an engine: a request on its way in, tokens and text on their way out.

GenerateReqInput (as the caller wrote it) -> TokenizedGenerateReqInput (one sequence, validated) -> BatchTokenIDOut (per
step) -> StrOut (one request, with its text). The flag `return_routed_experts` is carried from end to end."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from routed_experts.core.grammar_state import CompiledGrammar
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import ResolvedSampling, SamplingParams
from routed_experts.core.speculative_stats import SpeculativeCounts
from routed_experts.core.weight_version import WeightVersion

AnySamplingParams = SamplingParams | Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """The routing options of a request, resolved. `start` is in tokens."""

    enabled: bool = False
    start: int = 0
    format: str = "int32"
    layers: str = "all"
    stream: bool = False  # rows as they are emitted
    include_last: bool = False  # feed the last token too, for its row
    weights: bool = False  # combine weights, too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReqInput:
    """One call as the caller wrote it: one prompt or many, as text or as token ids. None means unset. A field that may
    be a sequence has one value a prompt then."""

    text: str | Sequence[str] | None = None
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    sampling_params: AnySamplingParams | Sequence[AnySamplingParams] | None = None
    max_new_tokens: int | None = None
    rid: str | Sequence[str] | None = None
    extra_key: str | Sequence[str | None] | None = None
    stream: bool | None = False
    return_logprob: bool | Sequence[bool] | None = False
    logprob_start_len: int | Sequence[int] | None = -1
    top_logprobs_num: int | Sequence[int] | None = 0
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None
    prediction: str | Sequence[int] | None = None  # the expected answer, as a draft; changes speed alone
    data_parallel_rank: int | None = None  # that the request runs in; None: the engine chooses
    return_routed_experts: bool | Sequence[bool] | None = None
    return_routed_experts_weights: bool | None = None
    routed_experts_start_len: int | Sequence[int] | None = None
    routed_experts_prompt_start: int | None = None  # another name of routed_experts_start_len
    routed_experts_format: str | None = None
    routed_experts_layers: str | None = None
    routed_experts_stream: bool | None = None
    routed_experts_include_last: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedGenerateReqInput:
    """One validated sequence. `choice` is its index among the n of a prompt."""

    rid: str
    group: str  # shared by the requests of one prompt, which wait for the prefill of the first
    call_id: str = ""  # of the call, or of the prompt where a call has a list of ids; "" of internal requests
    choice: int
    input_ids: Int[np.ndarray, " S"]
    sampling: ResolvedSampling  # max_tokens fits the context and the pool
    stop_token_ids: frozenset[int]  # of the request and, unless ignore_eos, of the model
    prediction: Int[np.ndarray, " G"] | None = None  # the expected answer
    data_parallel_rank: int | None = None  # that it runs in; None: any
    extra_key: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()  # whose logprobs are returned beside each token's own
    routed_experts: RoutingOptions = RoutingOptions()
    stream_interval_s: float = 0.0  # between two outputs of a stream; the first token and the end do not wait
    grammar: CompiledGrammar | None = None  # that the output follows

    @property
    def return_routed_experts(self) -> bool:
        """Whether this request returns its rows."""
        return self.routed_experts.enabled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a request ended: stop (with what matched), length, abort, timeout or error (with a message)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the text may end anywhere: max_tokens, an abort or another limit ended it, and no stop."""
        return self.type != "stop"

    def to_dict(self) -> dict[str, object]:
        """The form of `meta_info.finish_reason`."""
        fields = {"type": self.type, "matched": self.matched, "length": self.length, "message": self.message}
        return {key: value for key, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Logprobs of a span of tokens: one value and the top alternatives (logprob, id) of each, then those of ids that
    the request names."""

    values: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[float, int], ...] | None, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReroutingCounts:
    """Expert slots of a request that capacities moved to an expert outside their token's K best, and slots that they
    left empty."""

    rerouted_slots: int
    dropped_slots: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenIDOut:
    """What one request has gained since its last output.

    `text`: that of the new tokens, where the engine thread decodes it to find stop strings; None: the caller decodes
    it. `routed_experts`: in the last output only, unless the request streams its rows. `exact` False: experts were
    added a layer late, or capacities changed some, so far; `rerouting`: how many of these, None where there are no
    capacities; `defers_experts`: the engine may add experts a layer late; `placement_epoch`: of the placement that ran
    the last step of the request, None where the engine has none, or before its first step. `queue_s`: seconds from
    acceptance to the first step, None for a request that never ran. `speculative`: what became of its drafts so far;
    None where the engine drafts nothing. `dp_rank`: its data rank; None where the engine has one. `weight_version`: of
    the weights that are served; `num_fed`: tokens that were fed so far, and `weight_changes` say by which weights: see
    `weight_runs`."""

    rid: str
    new_token_ids: tuple[int, ...]
    output_logprobs: Logprobs
    input_logprobs: Logprobs | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: WeightVersion
    finish_reason: FinishReason | None
    return_routed_experts: bool
    routed_experts: RoutedExperts | None
    text: str | None = None
    error: Exception | None = None
    exact: bool = True
    rerouting: ReroutingCounts | None = None
    defers_experts: bool = False
    placement_epoch: int | None = None
    queue_s: float | None = None
    speculative: SpeculativeCounts | None = None
    dp_rank: int | None = None
    weight_changes: tuple[tuple[int, WeightVersion], ...] = ()
    num_fed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokenIDOut:
    """The outputs of every request that a step advanced."""

    step: int
    outs: tuple[TokenIDOut, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrOut:
    """The output of one request with its text; `text` is the increment since the last."""

    out: TokenIDOut
    text: str
