"""SGLang's dict: a SequenceState as `Engine.generate` and POST /generate return it, at any time of a stream."""

from collections.abc import Sequence

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.speculative_stats import SpeculativeCounts
from routed_experts.engine.requests.placement_fields import exactness_fields
from routed_experts.engine.requests.sequence_state import SequenceState, TokenLogprob, TopLogprobs
from routed_experts.engine.requests.weight_fields import weight_fields
from routed_experts.formats.wire import START_KEY, encode_rows

OUTPUT_LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_NOTHING_GENERATED = {"type": "length", "length": 0}


def sglang_output(
    state: SequenceState, *, prompt_only: bool = False, rows: RoutedExperts | None = None, to_encode: bool = False
) -> dict[str, object]:
    """`text`, `output_ids` and `meta_info`, cumulative. `prompt_only` leaves out what was generated: 0 new tokens were
    requested, but the engine makes one. `rows`: encode these instead of all. `to_encode`: the result is encoded as
    JSON at once, so it has the state's own logprobs and no copy of them."""
    out = state.last
    meta: dict[str, object] = {
        "id": out.rid,
        "finish_reason": None if out.finish_reason is None else out.finish_reason.to_dict(),
        "prompt_tokens": out.prompt_tokens,
        "completion_tokens": out.completion_tokens,
        "cached_tokens": out.cached_tokens,
        "cache_miss_count": state.num_compiled,  # of compiled programs; sgl-jax's name
        "e2e_latency": state.latency_s,
        **weight_fields(
            state, num_tokens=0 if prompt_only else out.completion_tokens, is_last=out.finish_reason is not None
        ),
        "logprobs_mode": state.logprobs_mode,
    }
    if out.dp_rank is not None:
        meta["dp_rank"] = out.dp_rank
    meta |= exactness_fields(out)
    if out.speculative is not None and out.finish_reason is not None:
        meta |= _speculative_fields(out.speculative)
    if state.request.return_logprob:
        for name, entries in _logprobs(state).items():
            meta[name] = entries if to_encode else _to_lists(entries)
    if out.return_routed_experts and (out.finish_reason is not None or state.record is not None):
        if rows is None:
            rows = state.rows_of_prompt() if prompt_only else state.rows
        meta |= _encoded_rows(state, rows)
    if not prompt_only:
        return {"text": state.text, "output_ids": list(state.token_ids), "meta_info": meta}
    meta |= {"completion_tokens": 0}
    meta |= {name: [] for name in OUTPUT_LOGPROBS if name in meta}
    if out.finish_reason is not None and out.finish_reason.type in ("stop", "length"):
        meta["finish_reason"] = dict(_NOTHING_GENERATED)
    return {"text": "", "output_ids": [], "meta_info": meta}


def _speculative_fields(counts: SpeculativeCounts) -> dict[str, object]:
    """What became of the drafts of a choice: SGLang's names, and those of older versions that trainers read."""
    return {
        "spec_verify_ct": counts.verify_steps,
        "spec_num_proposed_drafts": counts.proposed,
        "spec_num_correct_drafts": counts.accepted,
        "spec_accept_rate": counts.accept_rate,
        "spec_accept_length": counts.accept_length,
        "spec_correct_drafts_histogram": list(counts.histogram),
        "spec_accept_token_num": counts.accepted,
        "spec_draft_token_num": counts.proposed,
        "spec_accepted_drafts": counts.accepted,
        "spec_proposed_drafts": counts.proposed,
    }


def _logprobs(state: SequenceState) -> dict[str, Sequence[TokenLogprob | TopLogprobs]]:
    fields: dict[str, Sequence[TokenLogprob | TopLogprobs]] = {"output_token_logprobs": state.output_logprobs}
    if state.input_logprobs is not None:
        fields["input_token_logprobs"] = state.input_logprobs
    if state.request.top_logprobs_num > 0:
        fields["output_top_logprobs"] = state.output_top_logprobs
        if state.input_logprobs is not None:
            fields["input_top_logprobs"] = state.input_top_logprobs
    if state.request.token_ids_logprob:
        fields["output_token_ids_logprobs"] = state.output_given_logprobs
        if state.input_logprobs is not None:
            fields["input_token_ids_logprobs"] = state.input_given_logprobs
    return fields


def _to_lists(entries: Sequence[TokenLogprob | TopLogprobs]) -> list[object]:
    return [
        None if entry is None else list(entry) if isinstance(entry, TokenLogprob) else [list(token) for token in entry]
        for entry in entries
    ]


def _encoded_rows(state: SequenceState, rows: RoutedExperts) -> dict[str, object]:
    """The wire form of the rows. Of format ref, whose rows a server keeps, only their start."""
    options = state.request.routed_experts
    fields = {} if options.format == "ref" else encode_rows(rows, options, aborted=state.num_tokens == 0)
    return {START_KEY: rows.start, **fields}
