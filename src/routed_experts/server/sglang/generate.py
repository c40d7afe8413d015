"""POST /generate, in SGLang's form: text is cumulative in streams, unless --incremental-streaming-output is set, and
meta_info has everything else."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, field_names, prompt_index
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.sglang_output import OUTPUT_LOGPROBS, sglang_output
from routed_experts.formats.wire import encode_ref
from routed_experts.server.body import ignored_params_header, json_response, read_body
from routed_experts.server.generation_handler import CallOptions, GenerationHandler, to_seed
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.protocol import GenerateRequest
from routed_experts.server.routing.response import ref_url, sglang_defaults, to_routing_params
from routed_experts.server.sse import DONE, event
from routed_experts.server.state import ServerState

DEFAULT_MAX_TOKENS = 128
# Sampling parameters that SGLang's clients always send and that have no effect here.
_IGNORED_SAMPLING = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")  # ignored if empty
_ROUTING_OF_SAMPLING = ("routed_experts_stream",)
_LENGTHS = ("max_new_tokens", "max_tokens")
# The fields of this route by the engine's parameters, for errors.
_FIELDS = MappingProxyType({"prompt": "text"})


async def generate(request: Request, server: ServerState) -> Response:
    """Continue one prompt or many."""
    body = await read_body(request, GenerateRequest, server.settings)
    call = _with_routing(body.value)
    sampling, ignored_sampling = _sampling(call)
    ignored = [*body.ignored, *ignored_sampling]
    server.metrics.ignored(ignored)
    prompt_only = _prefill_only(call, sampling)
    named = None if isinstance(call.rid, list) else call.rid
    request_id = resolve_request_id(request, named, prefix="", param="rid")
    with field_names(_FIELDS):
        inputs = GenerateReqInput(
            text=call.text,
            input_ids=cast("list[int] | list[list[int]] | None", call.input_ids),
            sampling_params=sampling if isinstance(call.sampling_params, list) else sampling[0],
            max_new_tokens=None if prompt_only else call.max_new_tokens,
            rid=call.rid if isinstance(call.rid, list) else request_id,
            extra_key=_extra_key(call),
            data_parallel_rank=call.data_parallel_rank,
            stream=call.stream is True,
            return_logprob=call.return_logprob,
            logprob_start_len=call.logprob_start_len,
            top_logprobs_num=call.top_logprobs_num,
            token_ids_logprob=cast("list[int] | list[list[int]] | None", call.token_ids_logprob),
            prediction=call.prediction,
            **to_routing_params(call, enabled=call.return_routed_experts),
        )
        requests = await server.process(
            inputs,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            routing=sglang_defaults(server.settings),
            num_bytes=body.num_bytes,
        )
    options = CallOptions(
        request_id=request_id, owner=request_owner(request), fields=_FIELDS, headers=ignored_params_header(ignored)
    )
    single = len(requests) == 1 and _is_single_prompt(call)
    handler = SGLangHandler(server, requests, options, prompt_only=prompt_only, single=single)
    return await handler.respond(request, stream=call.stream is True)


class SGLangHandler(GenerationHandler):
    """One call of /generate. `single`: the response is no list. Event loop only."""

    def __init__(
        self,
        server: ServerState,
        requests: Sequence[TokenizedGenerateReqInput],
        options: CallOptions,
        *,
        prompt_only: bool,
        single: bool,
    ) -> None:
        super().__init__(server, requests, options, prompt_only=prompt_only)
        self._single = single
        self._sent: dict[int, tuple[int, int]] = {}  # by request: characters and tokens of earlier chunks

    async def _full_response(self) -> Response:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
        answers = [fields for index in range(len(self._requests)) for fields in await self._render(index)]
        return json_response(answers[0] if self._single else answers, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            rendered = await self._render(index)
            if self._server.settings.incremental_streaming_output:
                rendered = [self._to_increment(index, fields) for fields in rendered]
            *early, last = [event(fields if self._single else {**fields, "index": index}) for fields in rendered]
            for chunk in early:
                yield chunk
            yield last if self._generation.is_open else last + DONE

    async def _render(self, index: int) -> list[dict[str, object]]:
        """Return the sequence so far: one part, or several where streamed rows are large; the last has the finish
        reason."""
        sequence, options = self._generation.sequences[index], self._requests[index].routed_experts
        if not options.enabled or (sequence.finish_reason is None and sequence.record is None):
            return [self._to_dict(index, None)]
        parts = await self._render_rows(index, lambda rows: self._to_dict(index, rows))
        for part in parts[:-1]:
            cast("dict[str, object]", part["meta_info"])["finish_reason"] = None
        return parts

    def _to_increment(self, index: int, fields: dict[str, object]) -> dict[str, object]:
        """Leave out what earlier chunks of a sequence had."""
        text, ids = cast("str", fields["text"]), cast("list[int]", fields["output_ids"])
        num_chars, num_tokens = self._sent.get(index, (0, 0))
        self._sent[index] = len(text), len(ids)
        meta = dict(cast("Mapping[str, object]", fields["meta_info"]))
        for name in OUTPUT_LOGPROBS:
            if name in meta:
                meta[name] = cast("list[object]", meta[name])[num_tokens:]
        return {**fields, "text": text[num_chars:], "output_ids": ids[num_tokens:], "meta_info": meta}

    def _to_dict(self, index: int, rows: RoutedExperts | None) -> dict[str, object]:
        """Return the sequence so far, with these rows."""
        fields = sglang_output(
            self._generation.sequences[index], prompt_only=self._prompt_only, rows=rows, to_encode=True
        )
        if rows is not None and self._requests[index].routed_experts.format == "ref":
            meta_info = cast("dict[str, object]", fields["meta_info"])
            meta_info |= encode_ref(rows, url=ref_url(self._server.settings, self._options.request_id, index))
        return fields


def _with_routing(call: GenerateRequest) -> GenerateRequest:
    """Move the routing options that are no sampling parameters out of `sampling_params`; a field that is in both
    must agree."""
    moved: dict[str, object] = {}
    rest = list[dict[str, object]]()
    for index, sampling in enumerate(_as_list(call.sampling_params)):
        for name in _ROUTING_OF_SAMPLING:
            if (value := sampling.get(name)) is None:
                continue
            with _own_params(call, index):
                _check_agrees(name, value, moved.get(name, getattr(call, name)))
            moved[name] = value
        rest.append({name: value for name, value in sampling.items() if name not in _ROUTING_OF_SAMPLING})
    if not moved:
        return call
    return msgspec.structs.replace(
        call, sampling_params=rest if isinstance(call.sampling_params, list) else rest[0], **moved
    )


def _check_agrees(name: str, value: object, outer: object) -> None:
    """Raise InvalidRequestError for a switch of the sampling parameters that is none, or that differs from `outer`."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={short_repr(value)} must be true or false", param=name)
    if outer is not None and outer != value:
        text = f"{name}={short_repr(outer)}, but sampling_params have {short_repr(value)}; send it once"
        raise InvalidRequestError(text, param=name, code="conflicting_parameters")


def _own_params(call: GenerateRequest, index: int) -> contextlib.AbstractContextManager[None]:
    """Name a prompt in an InvalidRequestError about its sampling parameters, where each prompt has its own."""
    params = call.sampling_params
    is_own = isinstance(params, list) and len(params) > 1
    return prompt_index(index if is_own else None, _prompt_field(call))


def _prompt_field(call: GenerateRequest) -> str:
    return "input_ids" if call.text is None else "text"


def _extra_key(call: GenerateRequest) -> str | list[str | None] | None:
    """The key of all prompts, or of each: vLLM's cache_salt is of all of them."""
    if not isinstance(call.extra_key, list):
        return combine_keys(call.extra_key, call.cache_salt)
    keys = list[str | None]()
    for index, key in enumerate(call.extra_key):
        with prompt_index(index if len(call.extra_key) > 1 else None, _prompt_field(call)):
            keys.append(combine_keys(key, call.cache_salt))
    return keys


def _as_list(params: Mapping[str, object] | Sequence[Mapping[str, object]] | None) -> list[Mapping[str, object]]:
    """The sampling parameters of each prompt, or those of all."""
    if isinstance(params, list):
        return params
    return [{} if params is None else cast("Mapping[str, object]", params)]


def _sampling(call: GenerateRequest) -> tuple[list[dict[str, object]], list[str]]:
    """Return the sampling parameters, one dict or one a prompt, and the names of those without effect, which are left
    out."""
    ignored, params = list[str](), list[dict[str, object]]()
    for index, fields in enumerate(_as_list(call.sampling_params)):
        own = [name for name, value in fields.items() if name in _IGNORED_SAMPLING or _is_empty_constraint(name, value)]
        sampling = {name: value for name, value in fields.items() if value is not None and name not in own}
        for name in ("seed", "sampling_seed"):
            if isinstance(value := sampling.get(name), int):
                with _own_params(call, index):
                    sampling[name] = to_seed(value, name)
        ignored += [name for name in own if name not in ignored]
        params.append(sampling)
    return params, ignored


def _is_empty_constraint(name: str, value: object) -> bool:
    return name in _CONSTRAINTS and value in ("", [])


def _prefill_only(call: GenerateRequest, sampling: Sequence[dict[str, object]]) -> bool:
    """Whether 0 new tokens are requested, of all prompts; then `sampling` is changed to one token, which the response
    leaves out. Raises InvalidRequestError where some ask for 0 tokens and others for more."""
    asked = [prefill_only(call, own) for own in sampling]
    if any(asked) and not all(asked):
        text = "sampling_params ask for 0 new tokens of some prompts, and for more of others; send them in two calls"
        raise InvalidRequestError(text, param="sampling_params")
    return all(asked)


def prefill_only(call: GenerateRequest, sampling: dict[str, object]) -> bool:
    """Whether 0 new tokens are requested; then `sampling` is changed to one token, which the response leaves out."""
    fields = [call.max_new_tokens, *(sampling.get(name) for name in _LENGTHS)]
    lengths = [value for value in fields if value is not None]
    if not lengths or any(value != 0 or type(value) is not int for value in lengths):
        return False
    for name in (*_LENGTHS, "min_new_tokens", "min_tokens"):
        sampling.pop(name, None)
    sampling["max_new_tokens"] = 1
    return True


def _is_single_prompt(call: GenerateRequest) -> bool:
    prompts = call.text if call.text is not None else call.input_ids
    return not isinstance(prompts, list) or isinstance(prompts[0], int)
