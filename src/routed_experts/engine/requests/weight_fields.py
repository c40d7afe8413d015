"""The weights behind an answer, by label and by count, as SGLang's dict, RequestOutput and /v1 tell them.

SGLang's fields have labels: `weight_version`, and `weight_versions` and `prefill_weight_versions` by span. Ours have
the engine's counts beside them: `update_count`, and `version_spans` with the label of each count."""

from routed_experts.core.weight_version import WeightRun, cut_runs, labelled_spans, to_labels, to_spans
from routed_experts.engine.requests.sequence_state import SequenceState


def output_runs(state: SequenceState, num_tokens: int) -> tuple[WeightRun, ...]:
    """Which weights sampled which of the first `num_tokens` output tokens."""
    before = state.last.prompt_tokens - 1  # the pass over the token before samples output token 0
    return cut_runs(state.weight_runs(), before, before + num_tokens) if num_tokens else ()


def weight_fields(state: SequenceState, *, num_tokens: int, is_last: bool) -> dict[str, object]:
    """The fields of an answer of `num_tokens` output tokens so far. `is_last`: with those that concern the prompt, and
    with counts by span. `weight_versions` begin at the first output token, the other spans at the first of the
    prompt."""
    out = state.last
    version, spans = out.weight_version, list[dict[str, object]]()
    if out.weight_changes and (runs := output_runs(state, num_tokens)):
        version, spans = runs[-1].version, labelled_spans(runs)
    fields: dict[str, object] = {
        "weight_version": version.label,
        "weight_versions": spans or [{"version": version.label, "start": 0, "end": num_tokens}],
        "update_count": version.update_count,
    }
    if is_last:
        runs = cut_runs(state.weight_runs(), 0, _num_fed_tokens(state, num_tokens))
        fields["prefill_weight_versions"] = labelled_spans(cut_runs(runs, 0, out.prompt_tokens))
        fields["version_spans"] = [list(span) for span in to_spans(runs)]
        fields["version_labels"] = {str(count): label for count, label in to_labels(run.version for run in runs)}
    return fields


def _num_fed_tokens(state: SequenceState, num_tokens: int) -> int:
    """Tokens of the answer that were fed: without what was generated, where an answer leaves that out."""
    num_fed = state.last.num_fed
    return num_fed if num_tokens == state.last.completion_tokens else min(num_fed, state.last.prompt_tokens)
