"""POST /tokenize, POST /detokenize and GET /tokenizer_info."""

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError
from routed_experts.server.body import ignored_params_header, json_response, read_body
from routed_experts.server.chat_template import render
from routed_experts.server.errors import field_names
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.protocol import DetokenizeRequest, TokenizeRequest
from routed_experts.server.state import ServerState
from routed_experts.server.tools import check_tools


async def tokenize(request: Request, server: ServerState) -> Response:
    """Turn a prompt, or messages, into token ids."""
    body = await read_body(request, TokenizeRequest, server.settings)
    server.check_model(body.value.model)
    with field_names({"text": "prompt" if body.value.messages is None else "messages"}):
        tokens = await run_in_thread_if_large(body.num_bytes, lambda: _encode(server, body.value))
    fields: dict[str, object] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": server.engine.context_length,
    }
    if body.value.return_token_strs:
        tokenizer = server.tokenizer("return_token_strs")
        fields["token_strs"] = await run_in_thread_if_large(
            body.num_bytes, lambda: [tokenizer.token_string(token) for token in tokens]
        )
    return json_response(fields, headers=ignored_params_header(body.ignored))


async def detokenize(request: Request, server: ServerState) -> Response:
    """Turn token ids into text."""
    body = await read_body(request, DetokenizeRequest, server.settings)
    server.check_model(body.value.model)
    text = await run_in_thread_if_large(body.num_bytes, lambda: _decode(server, body.value))
    return json_response({"prompt": text, "text": text}, headers=ignored_params_header(body.ignored))


async def tokenizer_info(request: Request, server: ServerState) -> Response:
    """Return what a remote tokenizer needs."""
    tokenizer = server.tokenizer("tokenizer_info")
    named_tokens = tokenizer.named_tokens
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    fields: dict[str, object] = {name: named_tokens.get(name) for name in names}
    fields |= {
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "vocab_size": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template,
        "model_max_length": server.engine.context_length,
    }
    return json_response(fields)


def _encode(server: ServerState, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    tokenizer = server.tokenizer("prompt")
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    add_generation_prompt = body.add_generation_prompt is not False
    text = render(
        tokenizer,
        body.messages,
        add_generation_prompt=add_generation_prompt,
        scalars=body.chat_template_kwargs,
        tools=check_tools(body.tools, None, parallel=True).to_template(),
    )
    return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is True)


def _decode(server: ServerState, body: DetokenizeRequest) -> str:
    tokenizer, vocab_size = server.tokenizer("tokens"), server.engine.vocab_size
    unknown = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if unknown is not None:
        text = f"tokens holds the id {unknown}, outside 0..{vocab_size - 1}; use this model's ids"
        raise InvalidRequestError(text[:200], param="tokens")
    return tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens is True)
