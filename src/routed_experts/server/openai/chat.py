"""POST /v1/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.server.body import read_body
from routed_experts.server.chat_template import render, to_text
from routed_experts.server.errors import field_names
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.openai.handler import (
    ChoiceState,
    Delta,
    LogprobOptions,
    OpenAIHandler,
    chat_logprobs,
    parse_options,
    to_sampling_params,
)
from routed_experts.server.protocol import ChatRequest, Prediction
from routed_experts.server.routing.response import openai_defaults, to_routing_params
from routed_experts.server.state import ServerState


class ChatFormat:
    """Choices with messages."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer | None, *, logprobs: LogprobOptions, token_ids: bool) -> None:
        self._tokenizer, self._logprobs, self._token_ids = tokenizer, logprobs, token_ids

    def full(self, choice: ChoiceState) -> dict[str, object]:
        """Return the body of a finished choice."""
        delta = choice.full()
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": choice.index, "message": message, **self._token_fields(choice, delta)}

    def head(self, choice: ChoiceState, *, stream: bool) -> dict[str, object]:
        """Return the prompt's ids and logprobs beside the choices, if they are requested; else null, in a response that
        is no stream."""
        token_ids = choice.request.input_ids.tolist() if self._token_ids else None
        if stream:
            return {} if token_ids is None else {"prompt_token_ids": token_ids}
        return {"prompt_token_ids": token_ids, "prompt_logprobs": choice.prompt_logprobs()}

    def first_chunk(self, choice: ChoiceState) -> dict[str, object] | None:
        """Return the chunk with the role."""
        return {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, choice: ChoiceState, delta: Delta) -> dict[str, object]:
        """Return the chunk of a delta."""
        return {"index": choice.index, "delta": {"content": delta.text}, **self._token_fields(choice, delta)}

    def last_chunk(self, choice: ChoiceState) -> dict[str, object]:
        """Return the chunk of the finish reason."""
        return {"index": choice.index, "delta": {}, "logprobs": None}

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
    max_tokens, logprobs = _max_tokens(chat), options.logprobs
    with field_names(options.fields):
        inputs = GenerateReqInput(
            input_ids=await run_in_thread_if_large(body.num_bytes, lambda: _prompt_ids(server, chat)),
            sampling_params=to_sampling_params(chat, max_tokens),
            rid=options.request_id,
            extra_key=chat.extra_key or chat.cache_salt,
            data_parallel_rank=chat.data_parallel_rank,
            stream=chat.stream is True,
            return_logprob=logprobs.enabled or logprobs.prompt is not None,
            logprob_start_len=logprobs.start,
            top_logprobs_num=logprobs.num_requested,
            prediction=_prediction(chat.prediction),
            **to_routing_params(chat, enabled=chat.return_routed_experts),
        )
        requests = await server.process(
            inputs,
            default_max_tokens=server.engine.context_length,  # cut to what the prompt leaves
            routing=openai_defaults(server.settings),
            num_bytes=body.num_bytes,
        )
    response_format = ChatFormat(server.engine.tokenizer, logprobs=logprobs, token_ids=chat.return_token_ids is True)
    echo = _echo(chat)
    handler = OpenAIHandler(
        server,
        requests,
        response_format,
        options,
        prompt_only=max_tokens == 0,
        echo=None if echo is None else [echo],
    )
    return await handler.respond(request, stream=chat.stream is True)


def _prompt_ids(server: ServerState, chat: ChatRequest) -> list[int]:
    tokenizer = server.tokenizer("messages")
    continue_final_message = chat.continue_final_message is True
    if continue_final_message and chat.add_generation_prompt:
        message = "continue_final_message with add_generation_prompt; send one of them as true"
        raise InvalidRequestError(message, param="continue_final_message")
    text = render(
        tokenizer,
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt is not False and not continue_final_message,
        continue_final_message=continue_final_message,
        scalars=chat.chat_template_kwargs,
    )
    return tokenizer.encode(text, add_special_tokens=False, max_tokens=server.engine.context_length)


def _num_alternatives(chat: ChatRequest) -> int | None:
    """Return the number of alternatives of a token; None without logprobs."""
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
    return {**prompt, "max_new_tokens": length, "max_tokens": length, "rid": "request_id"}
