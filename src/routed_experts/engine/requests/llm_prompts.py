"""Prompts of LLM in vLLM's forms: text, token ids, or a dict of one of both with further keys
(https://docs.vllm.ai/en/stable/api/vllm/inputs/). A key that would change the answer and has no effect here is
refused."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.integers import is_integer
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.keywords import REQUEST_NAMES, log_without_effect
from routed_experts.engine.requests.token_ids import is_nested

# Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = 'text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LLMPrompt:
    """One prompt as it was given. `token_ids`, where there are some, are what is run; `text` is shown beside them.
    `cache_salt`: prompts of another salt share no cached prefix with it, and no remembered answer."""

    text: str | None
    token_ids: Any = None  # checked with the request
    cache_salt: Any = None

    @staticmethod
    def create(prompt: object) -> "LLMPrompt":
        """Read one prompt. Raises InvalidRequestError for another type, and for a key that is not known or is
        refused."""
        if isinstance(prompt, str):
            return LLMPrompt(text=prompt)
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                message = f'{PARAM} has "prompt": {short_repr(text)}, which is no text; give several as a list'
                raise InvalidRequestError(message, param="prompt")
            if ids is not None and not _is_row(ids):
                message = f'{PARAM} has "prompt_token_ids": {short_repr(ids)}, which is no row of token ids'
                raise InvalidRequestError(f"{message}; give several as a list", param="prompt")
            return LLMPrompt(text=text, token_ids=ids, cache_salt=prompt.get("cache_salt"))
        if not _is_row(prompt):
            raise InvalidRequestError(f"{PARAM}={short_repr(prompt)} must be {_FORMS}", param="prompt")
        return LLMPrompt(text=None, token_ids=prompt)

    def request(self, sampling_params: Any) -> GenerateReqInput:
        """The call of this prompt."""
        text = self.text if self.token_ids is None else None
        return GenerateReqInput(
            text=text, input_ids=self.token_ids, sampling_params=sampling_params, extra_key=self.cache_salt
        )


def list_prompts(prompts: object) -> list[object]:
    """One prompt or many as a list. Raises InvalidRequestError for none, and for what is neither."""
    value: Any = prompts
    if not _is_collection(value) or isinstance(value, set | frozenset):
        raise InvalidRequestError(f"{PARAM}={short_repr(value)} must be {_FORMS}, or a list of these", param="prompts")
    is_one = isinstance(value, str | bytes | Mapping) or (len(value) > 0 and all(map(is_integer, value)))
    prompt_list: list[object] = [value] if is_one else list(value)
    if not prompt_list:
        raise InvalidRequestError(f"{PARAM} is empty; give at least one", param="prompts")
    return prompt_list


def _is_collection(value: object) -> bool:
    """Whether it has members; an array of no dims has none."""
    return isinstance(value, Collection) and getattr(value, "ndim", 1) > 0


def _is_row(value: object) -> bool:
    """Whether this may be the token ids of one prompt."""
    is_other = isinstance(value, str | bytes | bytearray | set | frozenset | Mapping) or is_nested(value)
    return _is_collection(value) and not is_other


def _check_keys(prompt: Mapping[Any, Any]) -> None:
    without_effect: list[str] = []
    for key, value in prompt.items():
        if key in KEYS:
            continue
        reason = REQUEST_NAMES.refusal(key, value)
        if reason is not None:
            raise InvalidRequestError(f"{PARAM} has {short_repr(key)}, which is refused: {reason}", param="prompt")
        if REQUEST_NAMES.arity(key) is None:
            text = f"{PARAM} has the key {short_repr(key)}, which is not known; {suggestion(key, KEYS)}"
            raise InvalidRequestError(text, param="prompt")
        if value is not None:
            without_effect.append(key)
    log_without_effect("LLM.generate", without_effect, level=logging.DEBUG)
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise InvalidRequestError(f"{PARAM} has neither prompt nor prompt_token_ids; give one of them", param="prompt")
