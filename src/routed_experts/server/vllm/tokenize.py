"""POST /tokenize and /detokenize, GET /tokenizer_info. Knows no engine thread."""

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError
from routed_experts.server.body import Body, read_struct
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.fields import ignored_params_header
from routed_experts.server.openai.chat_template import render
from routed_experts.server.protocol import DetokenizeRequest, TokenizeRequest
from routed_experts.server.reply import json_reply
from routed_experts.server.state import ServerState


async def tokenize(request: Request, service: ServerState) -> Response:
    """Turn a prompt, or messages, into token ids."""
    settings = service.settings
    body = await read_struct(request, TokenizeRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields)
    service.check_model(body.value.model)
    tokens = await run_in_thread_if_large(body.num_bytes, lambda: _ids(service, body))
    said: dict[str, object] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.door.context_length}
    if body.value.return_token_strs:
        tokenizer = service.tokenizer("return_token_strs")
        said["token_strs"] = await run_in_thread_if_large(
            body.num_bytes, lambda: [tokenizer.token_string(token) for token in tokens]
        )
    return json_reply(said, headers=ignored_params_header(body.ignored))


async def detokenize(request: Request, service: ServerState) -> Response:
    """Turn token ids into text."""
    settings = service.settings
    body = await read_struct(
        request, DetokenizeRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields
    )
    service.check_model(body.value.model)
    text = await run_in_thread_if_large(body.num_bytes, lambda: _text(service, body.value))
    return json_reply({"prompt": text, "text": text}, headers=ignored_params_header(body.ignored))


def _text(service: ServerState, said: DetokenizeRequest) -> str:
    tokenizer, vocab = service.tokenizer("tokens"), service.door.vocab_size
    wrong = next((token for token in said.tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        text = f"tokens holds the id {wrong}, outside 0..{vocab - 1}; use this model's ids"
        raise InvalidRequestError(text[:200], param="tokens")
    return tokenizer.decode(said.tokens, skip_special_tokens=said.skip_special_tokens is True)


async def tokenizer_info(request: Request, service: ServerState) -> Response:
    """Say what a remote tokenizer needs to know."""
    tokenizer = service.tokenizer("tokenizer_info")
    named = tokenizer.named_tokens
    said: dict[str, object] = {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    said |= {"eos_token_ids": sorted(tokenizer.eos_token_ids), "vocab_size": tokenizer.vocab_size}
    return json_reply(
        {**said, "chat_template": tokenizer.chat_template, "model_max_length": service.door.context_length}
    )


def _ids(service: ServerState, body: Body[TokenizeRequest]) -> list[int]:
    said = body.value
    if (said.prompt is None) == (said.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    tokenizer = service.tokenizer("prompt")
    if said.prompt is not None:
        return tokenizer.encode(said.prompt, add_special_tokens=said.add_special_tokens is not False)
    wants_prompt = said.add_generation_prompt is not False
    text = render(tokenizer, said.messages, add_generation_prompt=wants_prompt, scalars=said.chat_template_kwargs)
    return tokenizer.encode(text, add_special_tokens=said.add_special_tokens is True)
