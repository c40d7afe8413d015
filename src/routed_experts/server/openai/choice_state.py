"""ChoiceState: a sequence as a choice of a response, and the usage of all choices."""

import dataclasses
from collections.abc import Sequence

from routed_experts.core.io_struct import FinishReason, StrOut
from routed_experts.core.speculative_stats import SpeculativeCounts
from routed_experts.engine.requests.placement_fields import exactness_fields
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.engine.requests.weight_fields import weight_fields
from routed_experts.server.openai.logprobs import LogprobEntry, LogprobOptions, logprobs_by_id, prompt_entries


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a choice gains: by one output, or by all of them."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobEntry, ...]


class ChoiceState:
    """View of one SequenceState as a choice: it holds offsets, and no text, tokens or logprobs of its own.

    `echo`: the text of the prompt, which the first delta begins with; `prompt_only`: the one token that the engine
    generated is left out."""

    def __init__(
        self,
        index: int,
        sequence: SequenceState,
        *,
        echo: str | None,
        prompt_only: bool,
        logprobs: LogprobOptions,
    ) -> None:
        self.index, self.sequence, self.request, self.prompt_only = index, sequence, sequence.request, prompt_only
        self._logprobs = logprobs
        self._echo, self._has_sent_echo, self._has_sent_prompt = echo, False, False
        self._num_logprobs = 0  # sent in earlier deltas
        self.text_offset = 0  # characters of the token texts sent in earlier deltas

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has finished."""
        return self.sequence.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether a limit has ended the sequence, such as max_tokens."""
        return self.sequence.finish_reason is not None and self.sequence.finish_reason.is_cut

    def to_delta(self, output: StrOut) -> Delta:
        """Return what one output of the sequence adds."""
        delta = self._delta(
            output.text,
            output.out.new_token_ids,
            first_logprob=self._num_logprobs,
            with_echo=self._echo is not None and not self._has_sent_echo,
        )
        self._has_sent_echo, self._num_logprobs = True, len(self.sequence.output_logprobs)
        return delta

    def full(self) -> Delta:
        """Return the whole choice."""
        text, token_ids = self.sequence.text, self.sequence.token_ids
        return self._delta(text, token_ids, first_logprob=0, with_echo=self._echo is not None)

    def _delta(self, text: str, token_ids: tuple[int, ...], *, first_logprob: int, with_echo: bool) -> Delta:
        sequence, logprobs, num_top = self.sequence, list[LogprobEntry](), self._logprobs.top
        if with_echo and self._logprobs.echo:
            logprobs += prompt_entries(num_top, sequence.echoed_logprobs(self._echo or ""))
        if self.prompt_only:
            text, token_ids = "", ()
        else:
            has_given = bool(self.request.token_ids_logprob)
            tops = sequence.output_given_logprobs if has_given else sequence.output_top_logprobs
            for token, top in zip(sequence.output_logprobs[first_logprob:], tops[first_logprob:], strict=True):
                best = (top or ())[:num_top]
                alternatives = (token, *(other for other in top or () if other.token_id != token.token_id))
                logprobs.append(LogprobEntry(token=token, top=alternatives if has_given else best))
        echo = self._echo if with_echo else None
        return Delta(text=(echo or "") + text, token_ids=token_ids, logprobs=tuple(logprobs))

    def prompt_logprobs(self) -> list[dict[str, object] | None] | None:
        """Return the logprobs of the prompt by token id, in vLLM's form; None where they are not requested. `rank` is
        null for a token that is not among the alternatives."""
        if self._logprobs.prompt is None:
            return None
        pairs = zip(self.sequence.input_logprobs or (), self.sequence.input_top_logprobs, strict=True)
        entries = prompt_entries(self._logprobs.prompt, pairs)
        return [logprobs_by_id(entry) if entry.is_known else None for entry in entries]

    def num_tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt that came from the prefix cache, and the generated tokens so far."""
        if not self.sequence.has_output:
            return 0, 0
        last = self.sequence.last
        return last.cached_tokens, 0 if self.prompt_only else last.completion_tokens

    @property
    def has_sent_prompt(self) -> bool:
        """Whether `token_fields` has given the ids of the prompt."""
        return self._has_sent_prompt

    def token_fields(self, delta: Delta) -> dict[str, object]:
        """Return the ids of a delta, and the first time those of the prompt."""
        fields: dict[str, object] = {"token_ids": list(delta.token_ids)}
        if not self._has_sent_prompt:
            fields["prompt_token_ids"] = self.request.input_ids.tolist()
        self._has_sent_prompt = True
        return fields

    def weight_fields(self) -> dict[str, object]:
        """Return the fields that tell which weights made the choice."""
        return weight_fields(self.sequence, num_tokens=self.num_tokens()[1], is_last=self.is_finished)

    def meta_info(self) -> dict[str, object]:
        """Return the fields of `meta_info` but rows: the weights, and what the placement of experts changed."""
        changes = exactness_fields(self.sequence.last) if self.sequence.has_output else {}
        return self.weight_fields() | changes

    def metadata(self) -> dict[str, object]:
        """Return SGLang's field of a response. Its values are texts, for OpenAI's clients have no others."""
        fields = self.weight_fields()
        return {"metadata": {name: str(fields[name]) for name in ("weight_version", "update_count")}}

    def draft_counts(self) -> SpeculativeCounts:
        """Return what became of the drafts of this choice so far."""
        counts = self.sequence.last.speculative if self.sequence.has_output else None
        return counts or SpeculativeCounts()

    def finish_fields(self) -> dict[str, object]:
        """Return `finish_reason`, `stop_reason` (the stop string, or the stop id that the request named; vLLM's field),
        `matched_stop` (also an end token that the model has; SGLang's), and `exact` where it is false."""
        finish = self.sequence.finish_reason
        assert finish is not None, self.request.rid
        if self.prompt_only and finish.type == "stop":
            finish = FinishReason(type="length", length=0)
        is_named = isinstance(finish.matched, str) or finish.matched in self.request.sampling.stop_token_ids
        fields: dict[str, object] = {
            "finish_reason": finish.type,
            "stop_reason": finish.matched if is_named else None,
            "matched_stop": finish.matched,
        }
        return fields if self.sequence.last.exact else {**fields, "exact": False}


def usage_of(choices: Sequence[ChoiceState]) -> dict[str, object]:
    """Return the tokens of a call; a prompt counts once, however many choices it has."""
    first = [choice for choice in choices if choice.request.choice == 0]
    prompt = sum(int(choice.request.input_ids.size) for choice in first)
    cached = sum(choice.num_tokens()[0] for choice in first)
    completion = sum(choice.num_tokens()[1] for choice in choices)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(choice.request.prediction is not None for choice in choices):
        counts = [choice.draft_counts() for choice in choices]
        accepted = sum(count.predicted_accepted for count in counts)
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(count.predicted for count in counts) - accepted,
        }
    return usage
