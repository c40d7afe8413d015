"""POST /v1/chat/completions. Knows no templates but the checkpoint's."""

import asyncio
import dataclasses
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.server.body import read_struct
from routed_experts.server.limits import INLINE_BYTES
from routed_experts.server.openai.chat_template import render
from routed_experts.server.openai.choice_state import Choice, Piece, chat_logprobs
from routed_experts.server.openai.handler import OpenAIHandler
from routed_experts.server.openai.params import Length, parse_options, to_sampling_params
from routed_experts.server.protocol import ChatRequest
from routed_experts.server.routing.response import openai_defaults, routing_keywords
from routed_experts.server.state import ServerState

_NAMES = MappingProxyType(
    {"max_new_tokens": "max_tokens", "input_ids": "messages", "rid": "request_id", "text": "messages"}
)


class ChatForm:
    """Choices of messages."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer | None, *, logprobs: bool, token_ids: bool) -> None:
        self._tokenizer, self._logprobs, self._token_ids = tokenizer, logprobs, token_ids

    def whole(self, choice: Choice) -> dict[str, object]:
        """All of a choice."""
        piece = choice.whole()
        body: dict[str, object] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
        }
        return {**body, **self._told(choice, piece)}

    def opening(self, choice: Choice) -> dict[str, object] | None:
        """Who speaks."""
        return {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """What a piece adds."""
        return {"index": choice.index, "delta": {"content": piece.text}, **self._told(choice, piece)}

    def closing(self, choice: Choice) -> dict[str, object]:
        """Nothing but the finish reason."""
        return {"index": choice.index, "delta": {}, "logprobs": None}

    def _told(self, choice: Choice, piece: Piece) -> dict[str, object]:
        told: dict[str, object] = {
            "logprobs": chat_logprobs(self._tokenizer, piece.logprobs) if self._logprobs else None
        }
        if self._token_ids:
            told |= {"token_ids": list(piece.token_ids), "prompt_token_ids": choice.request.input_ids.tolist()}
        return told


async def chat_completions(request: Request, service: ServerState) -> Response:
    """Answer messages."""
    settings = service.settings
    body = await read_struct(request, ChatRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields)
    said = body.value
    service.check_model(said.model)
    options = parse_options(request, service, said, body.ignored, prefix="chatcmpl-")
    length, wants = Length(max_tokens=_max_tokens(said)), said.logprobs is True
    if said.top_logprobs and not wants:
        raise InvalidRequestError("top_logprobs without logprobs; set logprobs to true", param="top_logprobs")
    asked = GenerateReqInput(
        input_ids=await _prompt_ids(service, said, body.num_bytes),
        sampling_params=to_sampling_params(said, length),
        rid=options.request_id,
        extra_key=said.extra_key or said.cache_salt,
        stream=said.stream is True,
        return_logprob=wants,
        top_logprobs_num=said.top_logprobs or 0,
        **routing_keywords(said, asked=said.return_routed_experts),
    )
    rest = service.door.context_length  # cut to what the prompt leaves
    routing = openai_defaults(settings)
    requests = await service.admit(
        asked, default_max_tokens=rest, routing=routing, num_bytes=body.num_bytes, names=_NAMES
    )
    form = ChatForm(service.door.tokenizer, logprobs=wants, token_ids=said.return_token_ids is True)
    call = OpenAIHandler(service, requests, form, dataclasses.replace(options, prompt_only=length.prompt_only))
    return await (call.stream(request) if said.stream else call.plain(request))


async def _prompt_ids(service: ServerState, said: ChatRequest, num_bytes: int) -> list[int]:
    tokenizer = service.tokenizer("messages")

    def ids() -> list[int]:
        wants_prompt = said.add_generation_prompt is not False
        text = render(tokenizer, said.messages, add_generation_prompt=wants_prompt, scalars=said.chat_template_kwargs)
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=service.door.context_length)

    return ids() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(ids)


def _max_tokens(said: ChatRequest) -> int | None:
    """Both names of one limit must agree."""
    one, other = said.max_tokens, said.max_completion_tokens
    if one is not None and other is not None and one != other:
        text = f"max_tokens={one} and max_completion_tokens={other} differ; send one of them"
        raise InvalidRequestError(text, param="max_completion_tokens", code="conflicting_parameters")
    return other if one is None else one
