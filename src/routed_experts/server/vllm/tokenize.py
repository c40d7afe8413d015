"""POST /tokenize, POST /detokenize (also below /v1) and GET /tokenizer_info."""

from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.server.body import ignored_params_header, json_response, read_body
from routed_experts.server.chat_template import render
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.protocol import DetokenizeRequest, TokenizeRequest
from routed_experts.server.state import ServerState
from routed_experts.server.tools import ToolChoice, check_tools


async def tokenize(request: Request, server: ServerState) -> Response:
    """Turn a prompt, a list of prompts, or messages, into token ids."""
    body = await read_body(request, TokenizeRequest, server.settings)
    server.check_model(body.value.model)
    with field_names({"text": "prompt" if body.value.messages is None else "messages"}):
        texts = await run_in_thread_if_large(body.num_bytes, lambda: _encode(server, body.value))
    is_list = isinstance(body.value.prompt, list)
    fields: dict[str, object] = {
        "tokens": texts if is_list else texts[0],
        "count": [len(tokens) for tokens in texts] if is_list else len(texts[0]),
        "max_model_len": server.engine.context_length,
        "token_strs": None,
    }
    if body.value.return_token_strs:
        tokenizer = server.tokenizer("return_token_strs")
        strings = await run_in_thread_if_large(
            body.num_bytes, lambda: [[tokenizer.token_string(token) for token in tokens] for tokens in texts]
        )
        fields["token_strs"] = strings if is_list else strings[0]
    return json_response(fields, headers=ignored_params_header(body.ignored))


async def detokenize(request: Request, server: ServerState) -> Response:
    """Turn token ids into text: vLLM's clients read `prompt`, SGLang's `text`, which dialects of vLLM leave out."""
    body = await read_body(request, DetokenizeRequest, server.settings)
    server.check_model(body.value.model)
    text = await run_in_thread_if_large(body.num_bytes, lambda: _decode(server, body.value))
    fields = {"prompt": text, "text": text} if server.settings.routed_experts_dialect == "sglang" else {"prompt": text}
    return json_response(fields, headers=ignored_params_header(body.ignored))


async def tokenizer_info(request: Request, server: ServerState) -> Response:
    """Return what a remote tokenizer needs."""
    tokenizer = server.tokenizer("tokenizer_info")
    named_tokens = tokenizer.named_tokens
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    fields: dict[str, object] = {name: named_tokens.get(name) for name in names}
    fields |= {
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "tokenizer_class": tokenizer.class_name,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template,
        "model_max_length": server.engine.context_length,
    }
    return json_response(fields)


def _encode(server: ServerState, body: TokenizeRequest) -> list[list[int]]:
    """The ids of each prompt, or those of the rendered messages."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("send either prompt or messages", param="prompt")
    tokenizer = server.tokenizer("prompt")
    if body.prompt is not None:
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        return [tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False) for text in prompts]
    continue_final_message = body.continue_final_message is True
    if continue_final_message and body.add_generation_prompt:
        message = "continue_final_message with add_generation_prompt; send one of them as true"
        raise InvalidRequestError(message, param="continue_final_message")
    choice = ToolChoice(mode="none") if body.tool_choice == "none" else None
    text = render(
        tokenizer,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False and not continue_final_message,
        continue_final_message=continue_final_message,
        scalars=body.chat_template_kwargs,
        tools=check_tools(body.tools, choice, parallel=True).to_template(),
    )
    return [tokenizer.encode(text, add_special_tokens=body.add_special_tokens is True)]


def _decode(server: ServerState, body: DetokenizeRequest) -> str | list[str]:
    """The text of the ids, or the texts of the lists of ids."""
    tokenizer = server.tokenizer("tokens")
    lists = [tokens for tokens in body.tokens if isinstance(tokens, list)]
    if lists and len(lists) < len(body.tokens):
        text = "tokens holds ids and lists of ids; send the ids of one text, or a list for each text"
        raise InvalidRequestError(text, param="tokens")

    def decode(tokens: list[int]) -> str:
        unknown = next((token for token in tokens if not 0 <= token < server.engine.vocab_size), None)
        if unknown is not None:
            text = f"tokens holds the id {unknown}, outside 0..{server.engine.vocab_size - 1}; use this model's ids"
            raise InvalidRequestError(text[:200], param="tokens")
        return tokenizer.decode(tokens, skip_special_tokens=body.skip_special_tokens is True)

    return [decode(tokens) for tokens in lists] if lists else decode(cast("list[int]", body.tokens))
