"""POST /v1/completions."""

from collections.abc import Sequence
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.server.body import read_body
from routed_experts.server.errors import ApiError
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.openai.choice_state import ChoiceState, Delta
from routed_experts.server.openai.handler import OpenAIHandler
from routed_experts.server.openai.logprobs import LogprobOptions, completion_logprobs
from routed_experts.server.openai.options import (
    MAX_LOGPROBS,
    given_ids,
    id_field,
    parse_options,
    to_sampling_params,
    truncate_prompt,
)
from routed_experts.server.protocol import CompletionRequest
from routed_experts.server.routing.response import openai_defaults, to_routing_params
from routed_experts.server.state import ServerState

DEFAULT_MAX_TOKENS = 16
# The fields of this route by the engine's parameters, for errors.
_FIELDS = MappingProxyType(
    {
        "input_ids": "prompt",
        "text": "prompt",
        "token_ids_logprob": "logprob_token_ids",
    }
)


class CompletionRenderer:
    """Choices with text."""

    object_name = chunk_name = "text_completion"

    def __init__(self, *, logprobs: LogprobOptions, token_ids: bool) -> None:
        self._logprobs, self._token_ids = logprobs, token_ids

    def full(self, choice: ChoiceState) -> dict[str, object]:
        """Return the body of a finished choice."""
        nulls = {"token_ids": None, "prompt_token_ids": None}
        return {**nulls, **self._body(choice, choice.full()), "prompt_logprobs": choice.prompt_logprobs()}

    def finish(self, choice: ChoiceState) -> dict[str, object]:
        """Return the fields of the end of a choice."""
        return choice.finish_fields()

    def head(self, choice: ChoiceState, *, stream: bool) -> dict[str, object]:
        """Return nothing: a response has several prompts."""
        return {}

    def first_chunk(self, choice: ChoiceState) -> dict[str, object] | None:
        """Return None: the first chunk has text."""
        return None

    def chunks(self, choice: ChoiceState, delta: Delta) -> list[dict[str, object]]:
        """Return the chunk of a delta; `text_offset` continues from chunk to chunk."""
        return [self._body(choice, delta)] if delta.text or delta.token_ids else []

    def _body(self, choice: ChoiceState, delta: Delta) -> dict[str, object]:
        body: dict[str, object] = {"index": choice.index, "text": delta.text, "logprobs": None}
        if self._logprobs.enabled:
            body["logprobs"], choice.text_offset = completion_logprobs(
                delta.logprobs, offset=choice.text_offset, as_ids=self._logprobs.as_ids
            )
        return body | choice.token_fields(delta) if self._token_ids else body

    def last_chunk(self, choice: ChoiceState) -> dict[str, object]:
        """Return the chunk of the finish reason."""
        body: dict[str, object] = {"index": choice.index, "text": "", "logprobs": None}
        has_all_ids = not self._token_ids or choice.has_sent_prompt  # no other chunk where nothing was generated
        return body if has_all_ids else body | choice.token_fields(Delta(text="", token_ids=(), logprobs=()))


async def completions(request: Request, server: ServerState) -> Response:
    """Continue prompts: text, token ids, or lists of either."""
    body = await read_body(request, CompletionRequest, server.settings)
    completion = body.value
    server.check_model(completion.model)
    if completion.best_of is not None and completion.best_of != (completion.n or 1):
        text = "best_of other than n is not supported; leave it out"
        raise ApiError(text, status=400, code="unsupported_parameter", param="best_of")
    fields = {**_FIELDS, "rid": id_field(completion)}
    options = parse_options(
        request, server, body, prefix="cmpl-", fields=fields, logprobs=_num_alternatives(completion.logprobs)
    )
    logprobs = options.logprobs
    with field_names(fields):
        texts, input_ids = await run_in_thread_if_large(body.num_bytes, lambda: _prompts(server, completion))
        inputs = GenerateReqInput(
            text=texts,
            input_ids=input_ids,
            sampling_params=to_sampling_params(completion, completion.max_tokens),
            rid=options.request_id,
            extra_key=combine_keys(completion.extra_key, completion.cache_salt),
            data_parallel_rank=completion.data_parallel_rank,
            stream=completion.stream is True,
            return_logprob=logprobs.enabled or logprobs.prompt is not None,
            logprob_start_len=logprobs.start,
            top_logprobs_num=logprobs.num_requested,
            token_ids_logprob=given_ids(completion, logprobs),
            **to_routing_params(completion, enabled=completion.return_routed_experts),
        )
        requests = await server.process(
            inputs,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            routing=openai_defaults(server.settings),
            num_bytes=body.num_bytes,
        )
    echo: Sequence[str] | None = None
    if completion.echo:
        first_choices = requests[:: requests[0].sampling.n]
        echo = texts or await run_in_thread_if_large(body.num_bytes, lambda: _decode(server, first_choices))
    token_ids = completion.return_token_ids is True
    handler = OpenAIHandler(
        server,
        requests,
        CompletionRenderer(logprobs=logprobs, token_ids=token_ids),
        options,
        prompt_only=completion.max_tokens == 0,
        echo=echo,
    )
    return await handler.respond(request, stream=completion.stream is True)


def _num_alternatives(logprobs: bool | int | None) -> int | None:
    """Return the number of alternatives of a token; None without logprobs."""
    if logprobs is None or logprobs is False:
        return None
    if not 0 <= logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(f"logprobs={short_repr(logprobs)} must be 0..{MAX_LOGPROBS}", param="logprobs")
    return int(logprobs)


def _prompts(
    server: ServerState, completion: CompletionRequest
) -> tuple[list[str] | None, list[int] | list[list[int]] | None]:
    """Return the prompts as texts or as token ids. A list holds one kind of prompt."""
    prompt = completion.prompt
    if prompt is None:
        text = "prompt is missing (Either prompt or prompt_embeds must be provided and non-empty.); send text or ids"
        raise InvalidRequestError(text, param="prompt")
    parts = [prompt] if isinstance(prompt, str) else prompt
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        if "" in texts or not texts:
            name = f"prompt[{texts.index('')}]" if len(texts) > 1 else "prompt"
            raise InvalidRequestError(f"{name} holds no text; send at least one character", param="prompt")
        server.engine.check_num_prompts("prompt", len(texts))  # before they are tokenised
        tokenizer = server.tokenizer("prompt")
        add_special_tokens, most = completion.add_special_tokens is not False, server.engine.context_length
        if add_special_tokens and completion.truncate_prompt_tokens is None and completion.truncation_side is None:
            return texts, None
        encoded = [tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=most) for text in texts]
        return None, [_cut(server, completion, ids) for ids in encoded]
    ids = [part for part in parts if isinstance(part, int)]
    if len(ids) == len(parts):
        return None, _cut(server, completion, ids)
    id_lists = [part for part in parts if isinstance(part, list)]
    if len(id_lists) == len(parts):
        return None, [_cut(server, completion, ids) for ids in id_lists]
    raise InvalidRequestError("prompt mixes text, ids and lists of ids; send one kind in a call", param="prompt")


def _cut(server: ServerState, completion: CompletionRequest, ids: list[int]) -> list[int]:
    return truncate_prompt(
        completion, ids, context_length=server.engine.context_length, max_tokens=completion.max_tokens
    )


def _decode(server: ServerState, requests: Sequence[TokenizedGenerateReqInput]) -> list[str]:
    """Return the text of prompts that are token ids; without a tokenizer they have none."""
    tokenizer = server.engine.tokenizer
    if tokenizer is None:
        return [""] * len(requests)
    return [tokenizer.decode(request.input_ids.tolist(), skip_special_tokens=False) for request in requests]
