"""RolloutControl: takes answers to prompts from the caller, as drafts of later requests.

Dims: S tokens of a prompt, G of an answer."""

import functools
from collections.abc import Sequence

from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.extra_key import check_extra_key
from routed_experts.core.integers import to_int
from routed_experts.core.sampling_params import MAX_SEED
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.requests.input_processor import InputProcessor
from routed_experts.speculation.drafter import DraftSample


class RolloutControl:
    """The answers that one engine's drafter remembers. Thread-safe."""

    def __init__(self, context: EngineContext, input_processor: InputProcessor) -> None:
        self._context, self._input_processor = context, input_processor

    def remember(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        seed: int | None,
        choice: int,
        extra_key: str | None,
    ) -> None:
        """`Engine.remember_rollouts`."""
        speculation = self._context.core.speculation
        if speculation is None or not speculation.shares_answers:
            text = "this engine takes no answers as drafts; build it with speculative_algorithm='NGRAM' or 'SUFFIX' and"
            raise InvalidRequestError(f"{text} speculative_scope='namespace'", param="speculative_scope")
        prompt = self._input_processor.check_rollout(prompt_ids, "prompt_ids")
        output = self._input_processor.check_rollout(output_ids, "output_ids")
        choice = _to_int("choice", choice)
        noise = None if seed is None else (_to_int("seed", seed), choice)
        sample = DraftSample(namespace=check_extra_key(extra_key), noise=noise)
        self._context.thread.run_between_steps(lambda: speculation.remember(prompt, output, sample))


def _to_int(param: str, value: object) -> int:
    return to_int(PARAM, value, 0, MAX_SEED, error=functools.partial(InvalidRequestError, param=param))
