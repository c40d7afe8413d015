"""POST /v1/responses, without state: the conversation comes with each request, and no response is stored."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.server.body import ignored_params_header, read_body
from routed_experts.server.chat_handler import ChatHandler
from routed_experts.server.chat_prompt import ChatPrompt, build_prompt
from routed_experts.server.chat_template import template_scalars
from routed_experts.server.errors import ApiError
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.forced_calls import forced_call_grammar
from routed_experts.server.generation_handler import CallOptions, to_seed
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.openai.response_items import ResponseWriter
from routed_experts.server.protocol import ChatMessage, Function, FunctionCall, ResponsesRequest, Tool, ToolCall
from routed_experts.server.sse import StreamForm
from routed_experts.server.state import ServerState
from routed_experts.server.tools import ToolChoice, ToolOptions, check_tools, parse_arguments

# The fields of this route by the engine's parameters, for errors.
_FIELDS = MappingProxyType(
    dict.fromkeys(("prompt", "text", "input_ids", "messages"), "input")
    | {"max_tokens": "max_output_tokens", "rid": "request_id", "reasoning_effort": "reasoning.effort"}
)
_SAMPLING_FIELDS = (
    "temperature top_p top_k min_p stop presence_penalty frequency_penalty repetition_penalty ignore_eos speculative"
).split()
# Values of fields with state, or of what this server does not do, that change nothing.
_HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "store": (False, True),  # nothing is stored, as the response says, and what would read it is refused
        "background": (False,),
        "previous_response_id": ("",),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "max_tool_calls": (),
    }
)
_INCLUDES = frozenset({"reasoning.encrypted_content"})  # there is none, so nothing is missing


class ResponsesHandler(ChatHandler):
    """A call of /v1/responses: an error is an event of its streams."""

    def __init__(
        self,
        server: ServerState,
        requests: Sequence[TokenizedGenerateReqInput],
        prompt: ChatPrompt,
        writer: ResponseWriter,
        options: CallOptions,
    ) -> None:
        super().__init__(server, requests, prompt, writer, options)
        self.stream_form = StreamForm(error=writer.error_event)


async def responses(request: Request, server: ServerState) -> Response:
    """Answer the items of a conversation."""
    body = await read_body(request, ResponsesRequest, server.settings)
    call = body.value
    server.check_model(call.model)
    _check_state(call)
    tools = _tools(call)
    ignored = [*body.ignored, *(["store"] if call.store else [])]
    server.metrics.ignored(ignored)
    options = CallOptions(
        request_id=resolve_request_id(request, call.request_id, prefix="resp_"),
        owner=request_owner(request),
        fields=_FIELDS,
        headers=ignored_params_header(ignored),
    )
    with field_names(_FIELDS):
        params = _sampling_params(call, tools)
        effort = None if call.reasoning is None else call.reasoning.effort
        prompt = await run_in_thread_if_large(
            body.num_bytes,
            lambda: build_prompt(
                server,
                to_messages(call.input, call.instructions),
                tools,
                scalars=template_scalars(call.chat_template_kwargs, effort),
                structured=params.structured_outputs is not None,
            ),
        )
        inputs = GenerateReqInput(
            input_ids=prompt.token_ids,
            sampling_params=params,
            rid=options.request_id,
            extra_key=combine_keys(call.extra_key, call.cache_salt),
            stream=call.stream is True,
        )
        requests = await server.process(
            inputs,
            default_max_tokens=server.engine.context_length,
            routing=RoutingDefaults(),
            num_bytes=body.num_bytes,
        )
    tokenizer = server.tokenizer("input")

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    writer = ResponseWriter(options.request_id, server.model_name, _head(call), count_tokens)
    handler = ResponsesHandler(server, requests, prompt, writer, options)
    return await handler.respond(request, stream=call.stream is True)


def to_messages(items: str | Sequence[Mapping[str, Any]] | None, instructions: str | None) -> list[ChatMessage]:
    """Return the messages of a conversation. Raises InvalidRequestError naming the item."""
    messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
    if items is None or items == "" or items == []:
        raise InvalidRequestError("input is missing; send text or a list of items", param="input")
    if isinstance(items, str):
        return [*messages, ChatMessage(role="user", content=items)]
    names = dict[str, str]()  # of functions, by call id: some templates write them beside the output of a call
    for index, item in enumerate(items):
        _add_item(messages, names, item, f"input[{index}]")
    return [message for message in messages if not _is_reasoning_alone(message)]


def _add_item(messages: list[ChatMessage], names: dict[str, str], item: Mapping[str, Any], path: str) -> None:
    """Add an item. Reasoning, a message and calls of the assistant that follow each other are one message."""
    kind = item.get("type") or "message"
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "message" and "role" in item:
        content = _text(item.get("content"), f"{path}.content")
        if item["role"] == "assistant" and last is not None and not last.content and not last.tool_calls:
            last.content = content
        else:
            messages.append(ChatMessage(role=_string(item["role"], f"{path}.role"), content=content))
    elif kind == "function_call":
        arguments = _string(item.get("arguments"), f"{path}.arguments")
        parse_arguments(arguments, f"{path}.arguments", param="input")
        call = ToolCall(
            id=_string(item.get("call_id"), f"{path}.call_id"),
            type="function",
            function=FunctionCall(
                name=_string(item.get("name"), f"{path}.name"),
                arguments=arguments,
            ),
        )
        if last is None:
            last = ChatMessage(role="assistant")
            messages.append(last)
        last.tool_calls = last.tool_calls or []
        last.tool_calls.append(call)
        names.setdefault(call.id or "", call.function.name)
    elif kind == "function_call_output":
        call_id = _string(item.get("call_id"), f"{path}.call_id")
        output = _text(item.get("output"), f"{path}.output")
        messages.append(ChatMessage(role="tool", content=output, tool_call_id=call_id, name=names.get(call_id)))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        messages.append(ChatMessage(role="assistant", reasoning_content=_text(parts, f"{path}.content")))
    else:
        text = f"{path} is of type {short_repr(kind)}; send messages, function calls, their outputs and reasoning"
        raise InvalidRequestError(text, param="input")


def _is_reasoning_alone(message: ChatMessage) -> bool:
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _text(content: object, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = list[str]()
    parts: list[object] = cast("list[object]", content) if isinstance(content, list) else [content]
    for index, part in enumerate(parts):
        fields = cast("Mapping[str, object]", part) if isinstance(part, Mapping) else {}
        text = fields.get("refusal") if fields.get("type") == "refusal" else fields.get("text")
        if not isinstance(text, str):
            kind = short_repr(fields.get("type"))
            message = f"{path}[{index}] is of type {kind}; this server takes text parts only, and fetches nothing"
            raise InvalidRequestError(message, param="input")
        texts.append(text)
    return "".join(texts)


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path} is {short_repr(value)}; send text", param="input")
    return value


def _check_state(call: ResponsesRequest) -> None:
    """Raise for fields that need stored responses, and for others that this server does not serve."""
    for name, harmless in _HARMLESS.items():
        value = getattr(call, name)
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            text = f"{name}={short_repr(value)} is not supported: this server stores no responses; leave it out"
            raise ApiError(text, status=400, code="unsupported_parameter", param=name)
    unknown = [name for name in call.include or () if name not in _INCLUDES]
    if unknown:
        text = f"include holds {short_repr(unknown[0])}, which this server does not have; leave it out"
        raise ApiError(text, status=400, code="unsupported_parameter", param="include")


def _tools(call: ResponsesRequest) -> ToolOptions:
    """Check the tools, and which of them are called."""
    tools = list[Tool]()
    for index, tool in enumerate(call.tools or ()):
        if tool.type != "function":
            text = f"tools[{index}].type={short_repr(tool.type)} is not served here; send tools of type function"
            raise ApiError(text, status=400, code="unsupported_parameter", param="tools")
        function = Function(name=tool.name, description=tool.description, parameters=tool.parameters)
        tools.append(Tool(function=function))
    choice = call.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        selected = ToolChoice(mode="named", name=str(choice.get("name")))
    elif choice is None or choice == "auto":
        selected = ToolChoice()
    elif choice == "none":
        selected = ToolChoice(mode="none")
    elif choice == "required":
        selected = ToolChoice(mode="required")
    else:
        text = f"tool_choice={short_repr(choice)} is unknown; send auto, none, required or the name of a function"
        raise InvalidRequestError(text, param="tool_choice")
    return check_tools(tools, selected, parallel=call.parallel_tool_calls is not False, schema_field="parameters")


def _sampling_params(call: ResponsesRequest, tools: ToolOptions) -> SamplingParams:
    values: dict[str, object] = {name: getattr(call, name) for name in _SAMPLING_FIELDS}
    grammar, forced = _grammar(call), forced_call_grammar(tools)  # a form is of answers: calls that are demanded win
    return SamplingParams.from_dict(
        values
        | {"seed": to_seed(call.seed), "max_tokens": call.max_output_tokens, "structured_outputs": forced or grammar}
    )


def _grammar(call: ResponsesRequest) -> GrammarSpec | None:
    form = {} if call.text is None or call.text.format is None else call.text.format
    if form.get("type") != "json_schema":
        return GrammarSpec.of_response_format(form or None, param="text.format")
    return GrammarSpec.of_response_format({"type": "json_schema", "json_schema": form}, param="text.format")


def _head(call: ResponsesRequest) -> dict[str, object]:
    """Return the fields of a response that repeat the request."""
    return {
        "background": False,
        "instructions": call.instructions,
        "max_output_tokens": call.max_output_tokens,
        "metadata": call.metadata or {},
        "parallel_tool_calls": call.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if call.reasoning is None else call.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if call.temperature is None else call.temperature,
        "text": {"format": (call.text.format if call.text else None) or {"type": "text"}},
        "tool_choice": call.tool_choice or "auto",
        "tools": [msgspec.to_builtins(tool) for tool in call.tools or ()],
        "top_p": 1.0 if call.top_p is None else call.top_p,
        "truncation": "disabled",
        "user": call.user,
    }
