"""POST /v1/messages and /v1/messages/count_tokens. Nothing is stored. The model thinks if `thinking` asks for it. An
answer to messages that end with one of the assistant continues that message, and holds the new text alone. A form of
the output is one of a whole answer, so that such messages are refused with it, as Anthropic does."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.tokenizer import Scalar
from routed_experts.server.anthropic.message_blocks import MessageWriter
from routed_experts.server.body import ParsedBody, ignored_params_header, json_response, read_body
from routed_experts.server.chat_handler import ChatHandler
from routed_experts.server.chat_prompt import ChatPrompt, build_prompt
from routed_experts.server.errors import ApiError, ErrorResponse, to_anthropic
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.forced_calls import forced_call_grammar
from routed_experts.server.generation_handler import CallOptions, to_seed
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.protocol import (
    AnthropicMessage,
    ChatMessage,
    CountTokensRequest,
    Function,
    FunctionCall,
    MessagesRequest,
    MessagesTool,
    Tool,
    ToolCall,
)
from routed_experts.server.sse import StreamForm, event
from routed_experts.server.state import ServerState
from routed_experts.server.tools import ToolChoice, ToolOptions, check_tools

# The fields of this route by the engine's parameters, for errors.
_FIELDS = MappingProxyType(
    dict.fromkeys(("prompt", "text", "input_ids", "continue_final_message"), "messages")
    | {"stop": "stop_sequences", "rid": "request_id"}
)
_SAMPLING_FIELDS = "temperature top_p top_k min_p ignore_eos speculative max_tokens".split()
_UNUSED = ("metadata", "service_tier")  # fields without effect
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def _stream_error(response: ErrorResponse) -> bytes:
    return event(to_anthropic(response).body, "error")


class MessagesHandler(ChatHandler):
    """A call of /v1/messages: its streams end without a marker."""

    stream_form = StreamForm(done=b"", error=_stream_error)


async def messages(request: Request, server: ServerState) -> Response:
    """Answer messages in Anthropic's form."""
    body = await read_body(request, MessagesRequest, server.settings)
    call = body.value
    server.check_model(call.model)
    if call.max_tokens is None:
        raise InvalidRequestError("max_tokens is missing; send the number of tokens to generate", param="max_tokens")
    for name in ("container", "mcp_servers"):
        if getattr(call, name):
            text = f"{name} is not supported: this server runs no tools and stores nothing; leave it out"
            raise ApiError(text, status=400, code="unsupported_parameter", param=name)
    tools = _tools(call)
    ignored = [*body.ignored, *(name for name in _UNUSED if getattr(call, name) is not None)]
    server.metrics.ignored(ignored)
    options = CallOptions(
        request_id=resolve_request_id(request, call.request_id, prefix="msg_"),
        owner=request_owner(request),
        fields=_FIELDS,
        headers=ignored_params_header(ignored),
    )
    with field_names(_FIELDS):
        values: dict[str, object] = {name: getattr(call, name) for name in _SAMPLING_FIELDS}
        grammar = _grammar(call, tools)
        own = {"stop": call.stop_sequences or None, "seed": to_seed(call.seed), "structured_outputs": grammar}
        prompt = await _prompt(server, body, tools, grammar=grammar)
        inputs = GenerateReqInput(
            input_ids=prompt.token_ids,
            sampling_params=SamplingParams.from_dict(values | own),
            rid=options.request_id,
            extra_key=combine_keys(call.extra_key, call.cache_salt),
            stream=call.stream is True,
        )
        requests = await server.process(
            inputs, default_max_tokens=call.max_tokens, routing=RoutingDefaults(), num_bytes=body.num_bytes
        )
    writer = MessageWriter(options.request_id, server.model_name, len(prompt.token_ids))
    handler = MessagesHandler(server, requests, prompt, writer, options)
    return await handler.respond(request, stream=call.stream is True)


async def count_tokens(request: Request, server: ServerState) -> Response:
    """Count the tokens of messages in Anthropic's form."""
    body = await read_body(request, CountTokensRequest, server.settings)
    server.check_model(body.value.model)
    with field_names(_FIELDS):
        prompt = await _prompt(server, body, _tools(body.value), is_counted=True)
    return json_response({"input_tokens": len(prompt.token_ids)}, headers=ignored_params_header(body.ignored))


def _grammar(call: MessagesRequest, tools: ToolOptions) -> GrammarSpec | None:
    form = None if call.output_config is None else call.output_config.format
    kind = None if form is None else {"type": form.get("type"), "json_schema": form}
    spec = None if kind is None else GrammarSpec.of_response_format(kind, param="output_config")
    return forced_call_grammar(tools) or spec  # a form is of answers: calls that are demanded win


async def _prompt(
    server: ServerState,
    body: ParsedBody[CountTokensRequest],
    tools: ToolOptions,
    *,
    grammar: GrammarSpec | None = None,
    is_counted: bool = False,
) -> ChatPrompt:
    """Render the messages. `is_counted`: no answer follows, so that the last message may use tools."""
    call = body.value
    kind = "disabled" if call.thinking is None else call.thinking.type
    if kind not in _THINKING:
        text = f"thinking.type={short_repr(kind)} is unknown; send enabled, adaptive or disabled"
        raise InvalidRequestError(text, param="thinking")
    scalars: dict[str, Scalar] = {"enable_thinking": _THINKING[kind], "thinking": _THINKING[kind]}
    scalars |= call.chat_template_kwargs or {}
    is_answered = not call.messages or call.messages[-1].role != "assistant"

    def build() -> ChatPrompt:
        converted = to_messages(call.messages, call.system)
        uses_tools = not is_answered and bool(converted[-1].tool_calls)
        if not (is_answered or is_counted):
            _check_continued(f"messages[{len(call.messages or ()) - 1}]", grammar, uses_tools=uses_tools)
        continues = not (is_answered or uses_tools)
        prompt = build_prompt(
            server,
            converted,
            tools,
            scalars=scalars,
            add_generation_prompt=is_answered,
            continue_final_message=continues,
            structured=grammar is not None,
        )
        return prompt.after_reasoning() if continues else prompt

    return await run_in_thread_if_large(body.num_bytes, build)


def _check_continued(path: str, grammar: GrammarSpec | None, *, uses_tools: bool) -> None:
    """Raise InvalidRequestError for a last message that no answer can continue."""
    if uses_tools:
        text = f"{path} is the last message and uses tools; send their results (tool_result) after it"
        raise InvalidRequestError(text, param=path)
    if grammar is not None:
        text = f"{path} is the last message and the assistant's, and {grammar.param} is of a whole answer"
        raise InvalidRequestError(f"{text}; leave out {path} or {grammar.param}", param=path)


def to_messages(
    messages: Sequence[AnthropicMessage] | None, system: str | Sequence[Mapping[str, Any]] | None
) -> list[ChatMessage]:
    """Return messages in OpenAI's form. Raises InvalidRequestError naming the block."""
    converted = [ChatMessage(role="system", content=_text(system, "system"))] if system else list[ChatMessage]()
    names: dict[str, str] = {}  # of the tools of earlier uses, by id
    for index, message in enumerate(messages or ()):
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            converted.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "assistant":
            converted.append(_assistant(message.content, path, names))
        else:
            converted += _user(message.role, message.content, path, names)
    return converted


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str, names: dict[str, str]) -> ChatMessage:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for index, block in enumerate(blocks):
        at, kind = f"{path}[{index}]", block.get("type")
        if kind == "text":
            texts.append(_string(block.get("text"), f"{at}.text"))
        elif kind == "thinking":
            thoughts.append(_string(block.get("thinking"), f"{at}.thinking"))
        elif kind == "tool_use":
            use_id, name = _string(block.get("id"), f"{at}.id"), _string(block.get("name"), f"{at}.name")
            names[use_id] = name
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                text = f"{at}.input is {short_repr(arguments)}; send an object"
                raise InvalidRequestError(text, param=path)
            function = FunctionCall(name=name, arguments=cast("dict[str, Any]", arguments))
            calls.append(ToolCall(id=use_id, type="function", function=function))
        else:
            raise _refuse_block(at, kind)
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _user(role: str, blocks: Sequence[Mapping[str, Any]], path: str, names: Mapping[str, str]) -> list[ChatMessage]:
    """Return the results of tools, each as a message, and then the text."""
    results, texts = list[ChatMessage](), list[str]()
    for index, block in enumerate(blocks):
        at, kind = f"{path}[{index}]", block.get("type")
        if kind == "text":
            texts.append(_string(block.get("text"), f"{at}.text"))
        elif kind == "tool_result":
            use_id = _string(block.get("tool_use_id"), f"{at}.tool_use_id")
            content = _text(block.get("content"), f"{at}.content")
            results.append(ChatMessage(role="tool", content=content, tool_call_id=use_id, name=names.get(use_id)))
        else:
            raise _refuse_block(at, kind)
    return [*results, ChatMessage(role=role, content="".join(texts))] if texts or not results else results


def _text(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = list[str]()
    parts: list[object] = cast("list[object]", content) if isinstance(content, list) else [content]
    for index, part in enumerate(parts):
        fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
        if fields.get("type") != "text":
            raise _refuse_block(f"{path}[{index}]", fields.get("type"))
        texts.append(_string(fields.get("text"), f"{path}[{index}].text"))
    return "".join(texts)


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path} is {short_repr(value)}; send text", param=path.partition(".")[0])
    return value


def _refuse_block(path: str, kind: object) -> InvalidRequestError:
    text = f"{path} is of type {short_repr(kind)}; this server takes text, thinking, tool_use and tool_result"
    return InvalidRequestError(text, param=path.partition(".")[0])


def _tools(call: CountTokensRequest) -> ToolOptions:
    """Check the tools, and which of them are used."""
    tools = [_tool(tool, index) for index, tool in enumerate(call.tools or ())]
    choice = call.tool_choice
    if choice is None or choice.type == "auto":
        selected = ToolChoice()
    elif choice.type == "none":
        selected = ToolChoice(mode="none")
    elif choice.type == "any":
        selected = ToolChoice(mode="required")
    elif choice.type == "tool":
        selected = ToolChoice(mode="named", name=choice.name or "")
    else:
        text = f"tool_choice.type={short_repr(choice.type)} is unknown; send auto, any, tool or none"
        raise InvalidRequestError(text, param="tool_choice")
    parallel = choice is None or choice.disable_parallel_tool_use is not True
    return check_tools(tools, selected, parallel=parallel, schema_field="input_schema")


def _tool(tool: MessagesTool, index: int) -> Tool:
    if tool.type not in (None, "custom"):
        text = f"tools[{index}].type={short_repr(tool.type)} is not served here; send tools with an input_schema"
        raise ApiError(text, status=400, code="unsupported_parameter", param="tools")
    return Tool(function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema))
