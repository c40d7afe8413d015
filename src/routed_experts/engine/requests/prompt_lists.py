"""Fields of a call that are given for each prompt: a list with one value a prompt, as SGLang's clients send them."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput

PER_PROMPT = (
    "sampling_params",
    "rid",
    "extra_key",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_routed_experts",
    "routed_experts_start_len",
)
# Options of rows, which count for the prompts that return some.
_OF_ROWS = (
    "return_routed_experts_weights",
    "routed_experts_start_len",
    "routed_experts_prompt_start",
    "routed_experts_format",
    "routed_experts_layers",
    "routed_experts_stream",
    "routed_experts_include_last",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptCalls:
    """A call as each of its prompts sees it: `calls`, without lists in the fields of PER_PROMPT. `lists`: the fields
    that had a value for each; `prompt_field`: the field of the prompts."""

    calls: Sequence[GenerateReqInput]
    lists: frozenset[str]
    prompt_field: str

    def error_at(
        self, error: InvalidRequestError, index: int, own_fields: Collection[str | None] = ()
    ) -> InvalidRequestError:
        """The error with the index of the prompt, where it is one of several and the error is about this prompt, or
        about a field that has a value for each. `own_fields`: other fields of this prompt alone."""
        is_own = error.is_of_prompt or error.param in self.lists or error.param in own_fields
        return error.at_prompt(index, self.prompt_field) if is_own and len(self.calls) > 1 else error


def split_by_prompt(request: GenerateReqInput, num_prompts: int, *, is_batch: bool) -> PromptCalls:
    """Split a call by its prompts. `is_batch`: prompts are a list, too. Raises InvalidRequestError for a list of
    another length, or beside a single prompt, and for a request id that occurs twice."""
    lists: dict[str, Sequence[Any]] = {}
    for name in PER_PROMPT:
        value = getattr(request, name)
        if isinstance(value, list | tuple):
            if not is_batch:
                text = f"{PARAM}={short_repr(cast('object', value))} is a list, and the prompt is not; give one value"
                raise InvalidRequestError(text, param=name)
            lists[name] = cast("Sequence[Any]", value)
            if len(lists[name]) != num_prompts:
                text = f"{PARAM} has {len(lists[name])} values for {num_prompts} prompts"
                raise InvalidRequestError(f"{text}; give one each, or one value for all", param=name)
    token_ids = request.token_ids_logprob
    if isinstance(token_ids, list | tuple) and any(isinstance(ids, list | tuple) for ids in token_ids):
        if not is_batch or len(token_ids) != num_prompts:
            text = f"{PARAM}={short_repr(token_ids)} must be a flat list of integers"
            fix = f"for {num_prompts} prompts in a list a list of them for each"
            raise InvalidRequestError(f"{text}, or {fix}", param="token_ids_logprob")
        lists["token_ids_logprob"] = token_ids
    prompt_field = "prompt" if request.text is not None else "input_ids"
    if not lists:
        return PromptCalls(calls=[request] * num_prompts, lists=frozenset(), prompt_field=prompt_field)
    ids = list(lists.get("rid", ()))
    repeated = next((rid for index, rid in enumerate(ids) if rid in ids[:index]), None)
    if repeated is not None:
        text = f"Duplicate request ID: {PARAM} has {repeated!r} twice; give every prompt an id of its own"
        raise InvalidRequestError(text, param="rid", code="duplicate_request_id")
    own = [{name: values[index] for name, values in lists.items()} for index in range(num_prompts)]
    calls = [_of_prompt(request, fields) for fields in own]
    return PromptCalls(calls=calls, lists=frozenset(lists), prompt_field=prompt_field)


def check_prediction(prediction: object, num_prompts: int) -> None:
    """Raise InvalidRequestError for an expected answer to more than one prompt."""
    if prediction is not None and num_prompts > 1:
        text = f"{PARAM} is the expected answer to one prompt, and this call has {num_prompts}"
        raise InvalidRequestError(f"{text}; send one prompt a call", param="prediction")


def _of_prompt(request: GenerateReqInput, own: dict[str, Any]) -> GenerateReqInput:
    if own.get("return_routed_experts") is False:
        own = {**own, **dict.fromkeys(_OF_ROWS)}
    return dataclasses.replace(request, **own)
