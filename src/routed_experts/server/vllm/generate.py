"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's form. No tokenizer is needed.

POST /skyrl/v1/generate is the same route with packed rows, under the name and in the dtypes of SkyRL's client. Rows are
returned without being asked for where the engine records them, as by vLLM. A stream has one chunk an output: the last
tokens, the finish reason and the rows arrive together."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, field_names
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import ALIASES, FIELDS, clamp_biases
from routed_experts.engine.requests.placement_fields import exactness_fields
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.sequence_state import SequenceState, TokenLogprob
from routed_experts.engine.requests.weight_fields import weight_fields
from routed_experts.formats import packed
from routed_experts.formats.wire import INFO_KEY, PAYLOAD_KEY
from routed_experts.server.body import (
    ParsedBody,
    check_fields,
    ignored_params_header,
    json_response,
    read_body,
    with_numbers,
)
from routed_experts.server.errors import ApiError
from routed_experts.server.generation_handler import CallOptions, GenerationHandler, to_seed, usage_in_stream
from routed_experts.server.limits import ServerSettings
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.protocol import TokensRequest
from routed_experts.server.routing.response import ResponseRouting, ref_url, routing_fields, to_routing_params
from routed_experts.server.sse import event
from routed_experts.server.state import ServerState

RANK_HEADER = "x-data-parallel-rank"
_LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot express
_PARAMS = frozenset((*FIELDS, *ALIASES))
# Sampling parameters of vLLM that would change the output: refused until SamplingParams has a field of the name.
_REFUSED = frozenset(
    "guided_decoding bad_words_token_ids logits_processors "
    "logprob_token_ids prompt_logprob_token_ids prompt_logprob_start trace_decode_token_ids thinking_token_budget "
    "truncate_prompt_tokens stop_regex".split()
)
_UNSET = (None, [], "", {}, False)  # values of theirs that change nothing; of the start of logprobs 0, too
# The fields of this route by the engine's parameters, for errors.
_FIELDS = MappingProxyType(
    {
        "input_ids": "token_ids",
        "rid": "request_id",
        "top_logprobs_num": "logprobs",
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokensOptions(CallOptions):
    """Options of a call. `logprobs`, `prompt_logprobs`: entries for each token, None without; `token_ids`: the prompt's
    ids are returned; `narrow`: packed rows have the dtype of SkyRL's reader."""

    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    include_usage: bool
    continuous_usage: bool
    narrow: bool


async def generate(request: Request, server: ServerState) -> Response:
    """Continue the token ids of one prompt."""
    body = await read_body(request, TokensRequest, server.settings)
    default = "packed" if server.settings.routed_experts_format == "packed" else "npy"
    return await _respond(request, server, body, row_format=default, narrow=False)


async def skyrl_generate(request: Request, server: ServerState) -> Response:
    """Continue the token ids of one prompt, with packed rows."""
    body = await read_body(request, TokensRequest, server.settings)
    return await _respond(request, server, body, row_format="packed", narrow=True)


async def _respond(
    request: Request, server: ServerState, body: ParsedBody[TokensRequest], *, row_format: str, narrow: bool
) -> Response:
    call = body.value
    server.check_model(call.model)
    _check_mode(call, has_tokenizer=server.engine.tokenizer is not None)
    sampling, ignored_sampling = _sampling(call, server.settings)
    ignored = [*body.ignored, *ignored_sampling]
    server.metrics.ignored(ignored)
    include_usage, continuous_usage = usage_in_stream(server.settings, call.stream_options, stream=call.stream)
    request_id = resolve_request_id(request, call.request_id, prefix="generate-")
    with field_names(_FIELDS):
        inputs = GenerateReqInput(
            input_ids=call.token_ids,
            sampling_params=sampling,
            rid=request_id,
            extra_key=combine_keys(call.extra_key, call.cache_salt),
            data_parallel_rank=_data_parallel_rank(request, call),
            stream=call.stream is True,
            **to_routing_params(call, enabled=call.return_routed_experts),
        )
        requests = await server.process(
            inputs,
            default_max_tokens=server.engine.context_length,  # cut to what fits
            routing=RoutingDefaults(
                enabled=True, format=row_format, npy_layers="all", refs=server.settings.routing_store_bytes > 0
            ),
            num_bytes=body.num_bytes,
        )
    resolved = requests[0].sampling
    handler = TokensHandler(
        server,
        requests,
        TokensOptions(
            request_id=request_id,
            owner=request_owner(request),
            fields=_FIELDS,
            headers=ignored_params_header(ignored),
            logprobs=resolved.logprobs,
            prompt_logprobs=resolved.prompt_logprobs,
            token_ids=call.return_token_ids is True,
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            narrow=narrow,
        ),
    )
    return await handler.respond(request, stream=call.stream is True)


class TokensHandler(GenerationHandler):
    """One call of the route. Event loop only."""

    def __init__(
        self, server: ServerState, requests: Sequence[TokenizedGenerateReqInput], options: TokensOptions
    ) -> None:
        super().__init__(server, requests, options, prompt_only=False)
        self._tokens_options = options
        self._created = int(time.time())
        self._num_sent = [0] * len(requests)  # logprobs of earlier chunks
        self._has_sent_head = False  # fields of the response, in the first chunk

    async def _full_response(self) -> Response:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
        choices: list[dict[str, object]] = []
        fields: dict[str, object] = {}
        for index, sequence in enumerate(self._generation.sequences):
            (routing,) = await self._routing(index)
            choices.append(
                {
                    **self._choice(index, sequence.token_ids, first_logprob=0),
                    **_finish_fields(sequence),
                    PAYLOAD_KEY: None,
                    **routing.choice,
                }
            )
            fields |= routing.response
        body = {
            **self._head(),
            "model": self._server.model_name,
            "created": self._created,
            "choices": choices,
            "usage": self._usage(),
            "prompt_logprobs": self._prompt_logprobs(),
            **self._prompt_ids(),
            **fields,
            "kv_transfer_params": None,
        }
        return json_response(body, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            for chunk in await self._output_chunks(index, output.out.new_token_ids):
                yield chunk
        if self._tokens_options.include_usage:
            yield event({**self._head(), "choices": [], "usage": self._usage()})

    async def _output_chunks(self, index: int, token_ids: tuple[int, ...]) -> list[bytes]:
        """Return the chunks of one output: one, or several where streamed rows are large; the last has the finish
        reason."""
        sequence, rows = self._generation.sequences[index], self._requests[index].routed_experts
        is_finished = sequence.finish_reason is not None
        parts = [ResponseRouting({}, {})]
        if is_finished or (rows.stream and token_ids):
            parts = await self._routing(index)
        elif not token_ids:
            return []
        chunks: list[bytes] = []
        for number, part in enumerate(parts):
            choice = self._choice(index, token_ids if number == 0 else (), first_logprob=self._num_sent[index])
            self._num_sent[index] = len(sequence.output_logprobs)
            finish = _finish_fields(sequence) if is_finished and number == len(parts) - 1 else {"finish_reason": None}
            body: dict[str, object] = {**self._head(), "choices": [{**choice, **finish, **part.choice}]}
            if not self._has_sent_head:
                body |= self._prompt_ids()
                self._has_sent_head = True
            if self._tokens_options.continuous_usage or self._tokens_options.include_usage:
                body["usage"] = self._usage() if self._tokens_options.continuous_usage else None
            chunks.append(event({**body, **part.response}))
        return chunks

    async def _routing(self, index: int) -> list[ResponseRouting]:
        """Return the routing fields of a choice: one part, or several where streamed rows are large. Every choice has
        its weight versions, and what the placement of experts changed, in `meta_info`."""
        options, sequence = self._requests[index].routed_experts, self._generation.sequences[index]
        meta = weight_fields(sequence, num_tokens=sequence.num_tokens, is_last=sequence.finish_reason is not None)
        if sequence.has_output:
            meta |= exactness_fields(sequence.last)
        if not options.enabled:
            return [ResponseRouting({"meta_info": meta}, {})]
        prompt_rows_in = self._assign_prompt_rows(index)

        def render(rows: RoutedExperts) -> ResponseRouting:
            fields = routing_fields(
                rows,
                options,
                aborted=sequence.num_tokens == 0,
                url=ref_url(self._server.settings, self._options.request_id, index),
                meta=meta,
                prompt_rows_in=prompt_rows_in,
            )
            return _narrowed(fields) if self._tokens_options.narrow else fields

        return await self._render_rows(index, render)

    def _choice(self, index: int, token_ids: tuple[int, ...], *, first_logprob: int) -> dict[str, object]:
        body: dict[str, object] = {"index": index, "token_ids": list(token_ids), "logprobs": None}
        num_top = self._tokens_options.logprobs
        if num_top is not None:
            sequence = self._generation.sequences[index]
            new, tops = sequence.output_logprobs[first_logprob:], sequence.output_top_logprobs[first_logprob:]
            pairs = zip(new, tops, strict=True)
            body["logprobs"] = {"content": [_content(token, top or (), num_top) for token, top in pairs]}
        return body

    def _prompt_logprobs(self) -> list[dict[str, object] | None] | None:
        """Return the logprobs of the prompt's tokens, each with its alternatives by id; the first token has none. None
        where they are not asked for, and where every choice ended before its first token."""
        num_top = self._tokens_options.prompt_logprobs
        sequence = self._generation.sequences[self._prompt_choice()]
        if num_top is None or sequence.input_logprobs is None:
            return None
        pairs = list(zip(sequence.input_logprobs, sequence.input_top_logprobs, strict=True))
        return [None, *(_by_id(token, (top or ())[:num_top]) for token, top in pairs[1:])]

    def _prompt_ids(self) -> dict[str, object]:
        return {"prompt_token_ids": self._requests[0].input_ids.tolist()} if self._tokens_options.token_ids else {}

    def _head(self) -> dict[str, object]:
        return {"request_id": self._options.request_id, "output_mode": "tokens"}

    def _usage(self) -> dict[str, object]:
        """Return the tokens of the call; the prompt counts once."""
        sequences = [sequence for sequence in self._generation.sequences if sequence.has_output]
        prompt, completion = int(self._requests[0].input_ids.size), sum(sequence.num_tokens for sequence in sequences)
        cached = self._generation.sequences[0].last.cached_tokens if self._generation.sequences[0].has_output else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _check_mode(call: TokensRequest, *, has_tokenizer: bool) -> None:
    """Refuse what this route has no form for."""
    if call.priority not in (None, 0):
        text = f"priority={short_repr(call.priority)} is not supported: requests run in their order; send 0"
        raise ApiError(text, status=400, code="unsupported_parameter", param="priority")
    if call.output_mode not in (None, "tokens"):
        fix = "for text use /v1/completions" if has_tokenizer else "text requires a tokenizer, and there is none"
        text = f"output_mode={short_repr(call.output_mode)} is not supported; {fix}"
        raise ApiError(text, status=400, code="unsupported_parameter", param="output_mode")


def _sampling(call: TokensRequest, settings: ServerSettings) -> tuple[dict[str, object], list[str]]:
    """Return the sampling parameters, and the names of those without effect. Nothing is detokenised but where stop
    strings are looked for."""
    received = {} if call.sampling_params is None else call.sampling_params
    for name in _REFUSED - _PARAMS:
        if not _is_unset(name, received.get(name)):
            text = f"{name}={short_repr(received[name])} is not supported by this server; leave it out"
            raise ApiError(text, status=400, code="unsupported_parameter", param=name)
    offered = {name: value for name, value in received.items() if name not in _REFUSED or name in _PARAMS}
    values, ignored = check_fields(offered, _PARAMS, strict=settings.strict_fields)
    values = with_numbers(values)
    if isinstance(biases := values.get("logit_bias"), Mapping):
        values["logit_bias"] = clamp_biases(cast("Mapping[str, float]", biases))
    seed = values.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        values["seed"] = to_seed(seed)
    if call.stream is True and values.get("prompt_logprobs") is not None:
        text = "prompt_logprobs with stream; set stream to false"
        raise ApiError(text, status=400, code="conflicting_parameters", param="prompt_logprobs")
    return {**values, "detokenize": False}, ignored


def _is_unset(name: str, value: object) -> bool:
    """Whether the value of a refused parameter changes nothing. The number 0 is no False: it is a length."""
    if name == "prompt_logprob_start" and value == 0:
        return True
    return any(type(value) is type(unset) and value == unset for unset in _UNSET)


def _data_parallel_rank(request: Request, call: TokensRequest) -> int | None:
    """Return the data rank that the body or the header of vLLM's routers names."""
    header = request.headers.get(RANK_HEADER)
    if header is None or call.data_parallel_rank is not None:
        return call.data_parallel_rank
    if not (header.isascii() and header.isdecimal() and len(header) <= 9):
        text = f"the header X-data-parallel-rank is {short_repr(header)}, but must be a number"
        raise InvalidRequestError(text, param="data_parallel_rank")
    return int(header)


def _finish_fields(sequence: SequenceState) -> dict[str, object]:
    """Return the reason, and what stopped the sequence where the request named it."""
    finish = sequence.finish_reason
    assert finish is not None, sequence.request.rid
    is_named = isinstance(finish.matched, str) or finish.matched in sequence.request.sampling.stop_token_ids
    fields: dict[str, object] = {"finish_reason": finish.type, "stop_reason": finish.matched if is_named else None}
    return fields if sequence.last.exact else {**fields, "exact": False}


def _content(token: TokenLogprob, top: Sequence[TokenLogprob], num_top: int) -> dict[str, object]:
    """Return the entry of one generated token. `top_logprobs`: the token itself, then the best others, `num_top` in
    all, at least the token."""
    others = [other for other in top if other.token_id != token.token_id]
    return {**_to_json(token), "top_logprobs": [_to_json(entry) for entry in [token, *others][: max(1, num_top)]]}


def _to_json(token: TokenLogprob) -> dict[str, object]:
    logprob = _LOWEST_LOGPROB if token.logprob is None else token.logprob
    return {"token": f"token_id:{token.token_id}", "token_id": token.token_id, "logprob": logprob, "bytes": None}


def _by_id(token: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, object]:
    """Return a token and its alternatives by their ids; the token comes first. `rank` is null where it is not known:
    for a token that is not among the alternatives."""
    ranks = {other.token_id: index + 1 for index, other in enumerate(top)}
    return {
        str(other.token_id): {
            "logprob": _LOWEST_LOGPROB if other.logprob is None else other.logprob,
            "rank": ranks.get(other.token_id),
            "decoded_token": other.text,
        }
        for other in {token.token_id: token, **{other.token_id: other for other in top}}.values()
    }


def _narrowed(routing: ResponseRouting) -> ResponseRouting:
    """Give packed rows the dtype that SkyRL's reader takes."""
    payload = routing.choice.get(PAYLOAD_KEY)
    if not isinstance(payload, Mapping):
        return routing
    fields = cast("Mapping[str, object]", payload)
    ids = packed.narrow(packed.decode(fields))
    if ids.dtype.name == fields["dtype"]:
        return routing
    info = cast("Mapping[str, object]", routing.choice[INFO_KEY])
    rows = packed.encode(ids, start=cast("int", fields["start"]))
    return ResponseRouting(
        {**routing.choice, PAYLOAD_KEY: rows, INFO_KEY: {**info, "dtype": ids.dtype.name}}, routing.response
    )
