"""POST /v1/chat/completions."""

import dataclasses

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.parsing import CallDelta, ContentDelta, ReasoningDelta, ResponseParser
from routed_experts.parsing import Delta as ParsedDelta
from routed_experts.server.body import read_body
from routed_experts.server.chat_prompt import ChatPrompt, ParsedResponse, build_prompt, new_call_id
from routed_experts.server.chat_template import template_scalars, to_text
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.forced_calls import forced_call_grammar
from routed_experts.server.limits import ServerSettings
from routed_experts.server.openai.choice_state import ChoiceState, Delta
from routed_experts.server.openai.handler import OpenAIHandler
from routed_experts.server.openai.logprobs import LogprobOptions, chat_logprobs
from routed_experts.server.openai.options import (
    MAX_LOGPROBS,
    given_ids,
    id_field,
    parse_options,
    to_sampling_params,
    truncate_prompt,
)
from routed_experts.server.protocol import ChatRequest, NamedToolChoice, Prediction
from routed_experts.server.routing.response import openai_defaults, to_routing_params
from routed_experts.server.state import ServerState
from routed_experts.server.tools import ToolChoice, ToolOptions, check_tools


class ChatRenderer:
    """Choices with messages. `reasoning_field`: the name of reasoning in a message; None leaves reasoning out. `echo`:
    the beginning of the content of every choice."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: ChatPrompt,
        *,
        logprobs: LogprobOptions,
        token_ids: bool,
        reasoning_field: str | None,
        echo: str | None,
    ) -> None:
        self._tokenizer, self._logprobs, self._token_ids = tokenizer, logprobs, token_ids
        self._prompt, self._reasoning_field, self._echo = prompt, reasoning_field, echo or ""
        # SGLang's clients read the field of every delta.
        self._deltas_have: dict[str, object] = (
            {"reasoning_content": None} if reasoning_field == "reasoning_content" else {}
        )
        self._echoed = set[int]()  # choices whose first chunk is out
        self._parsers: dict[int, ResponseParser | None] = {}  # by choice

    def full(self, choice: ChoiceState) -> dict[str, object]:
        """Return the body of a finished choice."""
        delta = choice.full()
        text = delta.text.removeprefix(self._echo)
        response = ParsedResponse.from_text(self._parser(choice), text, is_cut=choice.is_cut)
        content = self._echo + response.content or (None if response.calls else "")
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if self._prompt.has_reasoning and self._reasoning_field is not None:
            message[self._reasoning_field] = response.reasoning or None
        if response.calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in response.calls
            ]
        return {"index": choice.index, "message": message, **self._token_fields(choice, delta)}

    def finish(self, choice: ChoiceState) -> dict[str, object]:
        """Return the fields of the end of a choice. One that ends by itself after calls has the reason tool_calls."""
        fields, parser = choice.finish_fields(), self._parser(choice)
        has_calls = parser is not None and parser.num_calls > 0
        return {**fields, "finish_reason": "tool_calls"} if has_calls and fields["finish_reason"] == "stop" else fields

    def head(self, choice: ChoiceState, *, stream: bool) -> dict[str, object]:
        """Return the prompt's ids and logprobs beside the choices, if they are requested; else null, in a response that
        is no stream."""
        token_ids = choice.request.input_ids.tolist() if self._token_ids else None
        if stream:
            return {} if token_ids is None else {"prompt_token_ids": token_ids}
        return {"prompt_token_ids": token_ids, "prompt_logprobs": choice.prompt_logprobs()}

    def first_chunk(self, choice: ChoiceState) -> dict[str, object] | None:
        """Return the chunk with the role."""
        delta = {"role": "assistant", "content": "", **self._deltas_have}
        return {"index": choice.index, "delta": delta, "logprobs": None}

    def chunks(self, choice: ChoiceState, delta: Delta) -> list[dict[str, object]]:
        """Return the chunks of a delta: one a piece of reasoning, of content or of a call. The first has the tokens of
        all, also where they add no text."""
        parser = self._parser(choice)
        echo = "" if choice.index in self._echoed else self._echo  # it is no text of the model, so it is not parsed
        self._echoed.add(choice.index)
        parts: list[ParsedDelta]
        if parser is None:
            parts = [ContentDelta(delta.text)] if delta.text or delta.token_ids else []
        else:
            parts = [ContentDelta(echo)] if echo else []
            parts += parser.feed(delta.text.removeprefix(echo))
            parts += parser.finish(is_cut=choice.is_cut) if choice.is_finished else []
        deltas = [fields for part in parts if (fields := self._to_fields(part)) is not None]
        if not deltas and delta.token_ids:
            deltas.append({})
        chunks: list[dict[str, object]] = [
            {"index": choice.index, "delta": self._deltas_have | fields, "logprobs": None} for fields in deltas
        ]
        if chunks:
            chunks[0] |= self._token_fields(choice, delta)
        return chunks

    def _parser(self, choice: ChoiceState) -> ResponseParser | None:
        if choice.index not in self._parsers:
            self._parsers[choice.index] = self._prompt.create_parser()
        return self._parsers[choice.index]

    def _to_fields(self, part: ParsedDelta) -> dict[str, object] | None:
        """Return the delta of a message; None for what is left out."""
        match part:
            case ContentDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return None if self._reasoning_field is None else {self._reasoning_field: text}
            case CallDelta(index, None, arguments):
                return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
            case CallDelta(index, name, arguments):
                function = {"name": name, "arguments": arguments}
                return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}

    def last_chunk(self, choice: ChoiceState) -> dict[str, object]:
        """Return the chunk of the finish reason."""
        return {"index": choice.index, "delta": {**self._deltas_have}, "logprobs": None}

    def _token_fields(self, choice: ChoiceState, delta: Delta) -> dict[str, object]:
        fields: dict[str, object] = {
            "logprobs": chat_logprobs(self._tokenizer, delta.logprobs, as_ids=self._logprobs.as_ids)
            if self._logprobs.enabled
            else None
        }
        return fields | choice.token_fields(delta) if self._token_ids else fields


async def chat_completions(request: Request, server: ServerState) -> Response:
    """Answer messages."""
    body = await read_body(request, ChatRequest, server.settings)
    chat = body.value
    server.check_model(chat.model)
    options = parse_options(
        request, server, body, prefix="chatcmpl-", fields=_fields(chat), logprobs=_num_alternatives(chat)
    )
    max_tokens, logprobs, tools = _max_tokens(chat), options.logprobs, _tools(chat)
    with field_names(options.fields):
        params = _with_forced_calls(to_sampling_params(chat, max_tokens), tools)
        prompt = await run_in_thread_if_large(body.num_bytes, lambda: _prompt(server, chat, tools, params))
        inputs = GenerateReqInput(
            input_ids=prompt.token_ids,
            sampling_params=params,
            rid=options.request_id,
            extra_key=combine_keys(chat.extra_key, chat.cache_salt),
            data_parallel_rank=chat.data_parallel_rank,
            stream=chat.stream is True,
            return_logprob=logprobs.enabled or logprobs.prompt is not None,
            logprob_start_len=logprobs.start,
            top_logprobs_num=logprobs.num_requested,
            token_ids_logprob=given_ids(chat, logprobs),
            prediction=_prediction(chat.prediction),
            **to_routing_params(chat, enabled=chat.return_routed_experts),
        )
        requests = await server.process(
            inputs,
            default_max_tokens=server.engine.context_length,  # cut to what the prompt leaves
            routing=openai_defaults(server.settings),
            num_bytes=body.num_bytes,
        )
    echo = _echo(chat)
    renderer = ChatRenderer(
        server.engine.tokenizer,
        prompt,
        logprobs=logprobs,
        token_ids=chat.return_token_ids is True,
        reasoning_field=None if chat.include_reasoning is False else reasoning_field(server.settings),
        echo=echo,
    )
    requests = prompt.with_markers(server, requests)
    handler = OpenAIHandler(
        server,
        requests,
        renderer,
        options,
        prompt_only=max_tokens == 0,
        echo=None if echo is None else [echo],
    )
    return await handler.respond(request, stream=chat.stream is True)


def reasoning_field(settings: ServerSettings) -> str:
    """Return the name of reasoning in a message: SGLang's clients read another than vLLM's."""
    return "reasoning_content" if settings.routed_experts_dialect == "sglang" else "reasoning"


def _with_forced_calls(params: SamplingParams, tools: ToolOptions) -> SamplingParams:
    """Return sampling parameters with the grammar of the calls that tool_choice demands."""
    grammar, other = forced_call_grammar(tools), params.grammar_spec()
    if grammar is None:
        return params
    if other is not None and other.param != "response_format":  # which is of answers, and this one is calls
        text = f"tool_choice demands a call, and {other.param} another form of the output; send one of them"
        raise InvalidRequestError(text, param="tool_choice", code="conflicting_parameters")
    return dataclasses.replace(params, structured_outputs=grammar)


def _prompt(server: ServerState, chat: ChatRequest, tools: ToolOptions, params: SamplingParams) -> ChatPrompt:
    continue_final_message = chat.continue_final_message is True
    if continue_final_message and chat.add_generation_prompt:
        message = "continue_final_message with add_generation_prompt; send one of them as true"
        raise InvalidRequestError(message, param="continue_final_message")
    prompt = build_prompt(
        server,
        chat.messages,
        tools,
        scalars=template_scalars(chat.chat_template_kwargs, chat.reasoning_effort),
        add_generation_prompt=chat.add_generation_prompt is not False and not continue_final_message,
        continue_final_message=continue_final_message,
        separate_reasoning=chat.separate_reasoning is not False,
        structured=params.has_form,
    )
    context_length = server.engine.context_length
    ids = truncate_prompt(chat, prompt.token_ids, context_length=context_length, max_tokens=_max_tokens(chat))
    return dataclasses.replace(prompt, token_ids=ids)


def _tools(chat: ChatRequest) -> ToolOptions:
    """Check the tools, and which of them are called."""
    choice = chat.tool_choice
    if isinstance(choice, NamedToolChoice):
        if choice.type != "function":
            text = f"tool_choice.type={short_repr(choice.type)} must be function"
            raise InvalidRequestError(text, param="tool_choice")
        selected = ToolChoice(mode="named", name=choice.function.name)
    elif choice is None or choice in ("auto", "none", "required"):
        selected = ToolChoice(mode=choice or "auto")
    else:
        text = f"tool_choice={short_repr(choice)} is unknown; send auto, none, required or an object with a function"
        raise InvalidRequestError(text, param="tool_choice")
    return check_tools(chat.tools, selected, parallel=chat.parallel_tool_calls is not False)


def _num_alternatives(chat: ChatRequest) -> int | None:
    """Return the number of alternatives of a token; None without logprobs."""
    if chat.top_logprobs is not None and not 0 <= chat.top_logprobs <= MAX_LOGPROBS:
        text = f"top_logprobs={short_repr(chat.top_logprobs)} must be 0..{MAX_LOGPROBS}"
        raise InvalidRequestError(text, param="top_logprobs")
    if chat.logprobs is True:
        return chat.top_logprobs or 0
    if chat.top_logprobs:
        raise InvalidRequestError("top_logprobs without logprobs; set logprobs to true", param="top_logprobs")
    return None


def _echo(chat: ChatRequest) -> str | None:
    """Return the text that the answer begins with: that of the last message, if it is the assistant's and requested."""
    if chat.echo is not True or not chat.messages or chat.messages[-1].role != "assistant":
        return None
    return to_text(chat.messages[-1].content, index=len(chat.messages) - 1)


def _prediction(prediction: Prediction | None) -> str | None:
    """Return the text of a prediction."""
    if prediction is None:
        return None
    if prediction.type != "content":
        text = f"prediction.type={short_repr(prediction.type)} must be content"
        raise InvalidRequestError(text, param="prediction")
    if isinstance(prediction.content, str):
        return prediction.content
    texts: list[str] = []
    for part in prediction.content:
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            message = f"prediction.content holds {short_repr(part)}; expected parts of type text"
            raise InvalidRequestError(message, param="prediction")
        texts.append(text)
    return "".join(texts)


def _max_tokens(chat: ChatRequest) -> int | None:
    """Return the limit of tokens; of its two names the newer one counts."""
    return chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens


def _fields(chat: ChatRequest) -> dict[str, str]:
    """Return the fields of this body by the engine's parameters, for errors."""
    length = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    prompt = dict.fromkeys(("prompt", "text", "input_ids"), "messages")
    return {
        **prompt,
        "max_tokens": length,
        "rid": id_field(chat),
        "token_ids_logprob": "logprob_token_ids",
        "top_logprobs_num": "top_logprobs",
    }
