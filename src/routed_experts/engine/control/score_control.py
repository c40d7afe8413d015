"""ScoreControl: validates what is to be scored, and scores it with the served weights. Dims: S tokens of a sequence."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int32

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    PARAM,
    CaptureDisabledError,
    InvalidRequestError,
    PromptTooLongError,
    prompt_index,
)
from routed_experts.core.integers import is_integer
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.engine.requests.token_ids import is_nested
from routed_experts.replay.check import check_num_records, check_record, check_weights


class ScoreControl:
    """The scores of one engine. Thread-safe."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def score(
        self, token_ids: Any, *, routed: Any, replay_weights: bool, return_routed_experts: bool | None
    ) -> list[ScoreOutput]:
        """`Engine.score`, a list also for one sequence."""
        self._context.check_not_released("score")
        several = is_nested(token_ids)
        sequences = list(self._sequences(token_ids if several else [token_ids]))
        records: Sequence[RoutedExperts | None] | None = None
        if routed is not None:
            records = list(routed) if several and isinstance(routed, Iterable) else [routed]
        if return_routed_experts is not None and not isinstance(return_routed_experts, bool):
            text = f"return_routed_experts={short_repr(return_routed_experts)} must be True, False or None"
            raise InvalidRequestError(text, param="return_routed_experts")
        self._check_records(records, sequences, return_routed_experts)
        _check_weights(records, replay_weights)
        self._context.wait_for_admission()
        core, thread = self._context.core, self._context.thread

        def served() -> tuple[nnx.State[Any, Any], WeightVersion]:
            self._context.check_not_released("score")
            return core.runner.state, core.weight_version

        outputs = self._context.scorer.run(
            sequences, records, lambda: thread.run_between_steps(served), replay_weights=replay_weights
        )
        if return_routed_experts is False:
            return [dataclasses.replace(output, routed_experts=None) for output in outputs]
        return outputs

    def _sequences(self, several: Sequence[Any]) -> Iterator[Int32[np.ndarray, " S"]]:
        """The token ids of each sequence. The error of one of several holds its index."""
        for index, ids in enumerate(several):
            with prompt_index(index if len(several) > 1 else None, "token_ids"):
                checked = self._check_ids(ids)
            yield checked

    def _check_ids(self, ids: Any) -> Int32[np.ndarray, " S"]:
        """Token ids of one sequence, of this model and within its context."""
        is_list = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, Sequence)
        is_list = is_list and len(ids) > 0
        if not is_list or not all(map(is_integer, ids)):
            text = f"{PARAM}={short_repr(ids)} must be at least one token id, or a list of such lists"
            raise InvalidRequestError(text, param="token_ids")
        vocab, context = self._context.components.vocab_size, self._context.components.context_length
        wrong = [token for token in ids if not 0 <= token < vocab]
        if wrong:
            token = short_repr(int(wrong[0]))
            text = f"{PARAM} holds the token id {token}, outside 0..{vocab - 1}; use this model's ids"
            raise InvalidRequestError(text, param="token_ids")
        if len(ids) > context:
            text = f"{PARAM} has {len(ids)} tokens, above the context of {context}; cut it"
            raise PromptTooLongError(text, param="token_ids")
        return np.asarray(ids, np.int32)

    def _check_records(
        self,
        records: Sequence[RoutedExperts | None] | None,
        sequences: Sequence[Int32[np.ndarray, " S"]],
        return_routed_experts: bool | None,
    ) -> None:
        spec = self._context.components.capture
        if spec is None and (return_routed_experts or records is not None):
            param = "routed" if records is not None else "return_routed_experts"
            text = (
                f"{param} is given, but this engine records none; build it with Engine(..., "
                "enable_return_routed_experts=True)"
            )
            raise CaptureDisabledError(text, param=param)
        if records is None or spec is None:
            return
        check_num_records(len(records), len(sequences))
        for sample, (record, ids) in enumerate(zip(records, sequences, strict=True)):
            if record is not None:
                check_record(record, spec, sample=sample, num_tokens=ids.size)


def _check_weights(records: Sequence[RoutedExperts | None] | None, replay_weights: bool) -> None:
    """Raise InvalidRequestError for an option that is no bool or has no records, RoutingAlignmentError for a record
    without weights to replay."""
    if not isinstance(replay_weights, bool):
        text = f"replay_weights={short_repr(replay_weights)} must be True or False"
        raise InvalidRequestError(text, param="replay_weights")
    if not replay_weights:
        return
    if records is None:
        text = "replay_weights=True without records to replay has no effect; give them, or leave it out"
        raise InvalidRequestError(text, param="replay_weights")
    for sample, record in enumerate(records):
        if record is not None:
            check_weights(record, sample=sample)
