"""POST /v1/completions. Knows no chat."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.engine.requests.input_processor import MAX_PROMPTS
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.server.body import read_struct
from routed_experts.server.errors import ApiError
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.openai.choice_state import Choice, Piece, completion_logprobs
from routed_experts.server.openai.handler import OpenAIHandler
from routed_experts.server.openai.params import Length, parse_options, to_sampling_params
from routed_experts.server.protocol import CompletionRequest
from routed_experts.server.routing.response import openai_defaults, routing_keywords
from routed_experts.server.state import ServerState

DEFAULT_MAX_TOKENS = 16
_NAMES = MappingProxyType(
    {"max_new_tokens": "max_tokens", "input_ids": "prompt", "rid": "request_id", "text": "prompt"}
)


class TextForm:
    """Choices of text; `text_offset` goes on from chunk to chunk."""

    object_name = chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer | None, *, logprobs: bool, token_ids: bool) -> None:
        self._tokenizer, self._logprobs, self._token_ids = tokenizer, logprobs, token_ids
        self._offsets: dict[int, int] = {}

    def whole(self, choice: Choice) -> dict[str, object]:
        """All of a choice."""
        return self.delta(choice, choice.whole())

    def opening(self, choice: Choice) -> dict[str, object] | None:
        """Text begins with its first piece."""
        return None

    def delta(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """What a piece adds."""
        body: dict[str, object] = {"index": choice.index, "text": piece.text, "logprobs": None}
        if self._logprobs:
            told = completion_logprobs(self._tokenizer, piece.logprobs, offset=self._offsets.get(choice.index, 0))
            self._offsets[choice.index] = self._offsets.get(choice.index, 0) + sum(
                len(str(text)) for text in _listed(told["tokens"])
            )
            body["logprobs"] = told
        if self._token_ids:
            body |= {"token_ids": list(piece.token_ids), "prompt_token_ids": choice.request.input_ids.tolist()}
        return body

    def closing(self, choice: Choice) -> dict[str, object]:
        """Nothing but the finish reason."""
        return {"index": choice.index, "text": "", "logprobs": None}


async def completions(request: Request, service: ServerState) -> Response:
    """Continue prompts: text, token ids, or lists of either."""
    settings = service.settings
    body = await read_struct(
        request, CompletionRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields
    )
    said = body.value
    service.check_model(said.model)
    if said.best_of is not None and said.best_of != (said.n or 1):
        raise ApiError(
            "best_of other than n is not supported; leave it out",
            status=400,
            code="unsupported_parameter",
            param="best_of",
        )
    options = parse_options(request, service, said, body.ignored, prefix="cmpl-")
    length, wants, top = Length(max_tokens=said.max_tokens), *_logprobs_of(said)
    prompt = await run_in_thread_if_large(body.num_bytes, lambda: _prompt_of(service, said))
    asked = GenerateReqInput(
        **prompt,
        sampling_params=to_sampling_params(said, length),
        rid=options.request_id,
        extra_key=said.extra_key or said.cache_salt,
        stream=said.stream is True,
        return_logprob=wants,
        logprob_start_len=0 if wants and said.echo else -1,
        top_logprobs_num=top,
        **routing_keywords(said, asked=said.return_routed_experts),
    )
    routing = openai_defaults(settings)
    requests = await service.admit(
        asked, default_max_tokens=DEFAULT_MAX_TOKENS, routing=routing, num_bytes=body.num_bytes, names=_NAMES
    )
    n = requests[0].sampling.n
    echo = (
        await run_in_thread_if_large(body.num_bytes, lambda: _echo(service, prompt, requests[::n]))
        if said.echo
        else None
    )
    form = TextForm(service.door.tokenizer, logprobs=wants, token_ids=said.return_token_ids is True)
    call = OpenAIHandler(
        service, requests, form, dataclasses.replace(options, echo=echo, prompt_only=length.prompt_only)
    )
    return await (call.stream(request) if said.stream else call.plain(request))


def _logprobs_of(said: CompletionRequest) -> tuple[bool, int]:
    """Were logprobs asked for, and how many alternatives."""
    wanted = said.logprobs
    if wanted is None or wanted is False:
        return False, 0
    if not 0 <= wanted <= 20:
        raise InvalidRequestError(f"logprobs={short_repr(wanted)} must be 0..20", param="logprobs")
    return True, int(wanted)


def _prompt_of(service: ServerState, said: CompletionRequest) -> dict[str, Any]:
    """The prompt as the engine takes it: `text` or `input_ids`. A list holds one kind of prompt."""
    prompt = said.prompt
    if prompt is None:
        raise InvalidRequestError("prompt is missing; send text or token ids", param="prompt")
    listed = [prompt] if isinstance(prompt, str) else prompt
    if all(isinstance(part, str) for part in listed):
        texts = [str(part) for part in listed]
        if "" in texts or not texts:
            raise InvalidRequestError("prompt holds no text; send at least one character", param="prompt")
        if len(texts) > MAX_PROMPTS:  # the engine says so too, but only once they are token ids
            raise InvalidRequestError(
                f"prompt has {len(texts)} prompts, above the limit of {MAX_PROMPTS}; send fewer", param="prompt"
            )
        tokenizer = service.tokenizer("prompt")
        if said.add_special_tokens is False:
            most = service.door.context_length
            return {"input_ids": [tokenizer.encode(text, add_special_tokens=False, max_tokens=most) for text in texts]}
        return {"text": texts}
    if all(isinstance(part, int) for part in listed) or all(isinstance(part, list) for part in listed):
        return {"input_ids": listed}
    raise InvalidRequestError("prompt mixes text, ids and lists of ids; send one kind in a call", param="prompt")


def _echo(
    service: ServerState, prompt: dict[str, object], requests: Sequence[TokenizedGenerateReqInput]
) -> Sequence[str]:
    """The prompts' own text."""
    if "text" in prompt:
        return [str(text) for text in _listed(prompt["text"])]
    tokenizer = service.tokenizer("echo")
    return [tokenizer.decode(one.input_ids.tolist(), skip_special_tokens=False) for one in requests]


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []
