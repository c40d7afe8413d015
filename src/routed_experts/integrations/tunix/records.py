"""RolloutRecord, an answer with its logprobs and rows, and the alignment of records with the tokens of an example.

Dims: B sequences, P tokens of a padded prompt, C of a padded answer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int32

from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.integrations.tunix.policy import Policy
from routed_experts.replay import RoutedBatch, Sample, align


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """One answer as the engine gave it: the prompt as it was fed (cut from the left to its limit), the sampled tokens
    (an end token included), their logprobs under the sampling distribution, and the rows; None where nothing was fed:
    of a request that was aborted in the queue."""

    prompt_ids: Int32[np.ndarray, " prompt"]
    output_ids: Int32[np.ndarray, " answer"]
    logprobs: Float32[np.ndarray, " answer"]
    routed: RoutedExperts | None
    finish_reason: str  # "stop", "length" or "abort"

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_ids.size + self.output_ids.size


def to_record(prompt: Int32[np.ndarray, " prompt"], result: Mapping[str, Any]) -> RolloutRecord:
    meta = result["meta_info"]
    logprobs = [value for value, _, _ in meta["output_token_logprobs"]]
    return RolloutRecord(
        prompt_ids=prompt,
        output_ids=np.asarray(result["output_ids"], np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        routed=record_from_meta_info(result),
        finish_reason=meta["finish_reason"]["type"],
    )


def token_key(prompt: Int[np.ndarray, " P"], answer: Int[np.ndarray, " C"], pad: int) -> tuple[bytes, bytes]:
    """The tokens of a sequence without padding. An answer's padding is behind its last token."""
    real = np.flatnonzero(answer != pad)
    end = real[-1] + 1 if real.size else 0
    return prompt[prompt != pad].astype(np.int32).tobytes(), answer[:end].astype(np.int32).tobytes()


def pad_logprobs(records: Sequence[RolloutRecord], width: int) -> Float32[np.ndarray, "B C"]:
    padded = np.zeros((len(records), width), np.float32)
    for row, record in zip(padded, records, strict=True):
        row[: record.logprobs.size] = record.logprobs
    return padded


def align_records(
    records: Sequence[RolloutRecord],
    prompt_tokens: Int[np.ndarray, "B P"],
    completion_tokens: Int[np.ndarray, "B C"],
    *,
    policy: Policy,
    pad_id: int,
    update_count: int,
) -> RoutedBatch:
    """Rows of records laid out like the padded tokens of Tunix's example. Raises RoutingAlignmentError for another
    number of records, for rows of other tokens than the example's, and for rows of another update of the weights."""
    prompts, answers = np.asarray(prompt_tokens), np.asarray(completion_tokens)
    if len(records) != prompts.shape[0]:
        raise RoutingAlignmentError(
            f"{len(records)} answers were sampled since the last push of weights, and the example has "
            f"{prompts.shape[0]}; make each example of one call of the learner"
        )
    for index, (record, prompt, answer) in enumerate(zip(records, prompts, answers, strict=True)):
        if token_key(record.prompt_ids, record.output_ids, pad_id) != token_key(prompt, answer, pad_id):
            raise RoutingAlignmentError(
                f"sample {index}: the example has other tokens than the answer that its rows are of; keep the order "
                "of the rollout's outputs"
            )
    return align(
        [Sample(record.routed, record.num_tokens, record.prompt_ids.size) for record in records],
        layout="pad_both",
        seq_len=prompts.shape[1] + answers.shape[1],
        prompt_width=prompts.shape[1],
        spec=policy.config.capture_spec,
        versions=(update_count,),
    )
