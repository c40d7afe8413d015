"""POST /generate, in SGLang's form: text is cumulative in streams, and meta_info has everything else."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import (
    GenerateReqInput,
    RoutingOptions,
    TokenizedGenerateReqInput,
)
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.sglang_output import sglang_output
from routed_experts.formats.wire import encode_ref
from routed_experts.server.body import ignored_params_header, json_response, read_body
from routed_experts.server.errors import field_names
from routed_experts.server.generation_handler import CallOptions, GenerationHandler, to_seed
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.protocol import GenerateRequest
from routed_experts.server.routing.response import ref_url, sglang_defaults, to_routing_params
from routed_experts.server.sse import DONE, event
from routed_experts.server.state import ServerState

DEFAULT_MAX_TOKENS = 128
# Sampling parameters that SGLang's clients always send and that have no effect here.
_IGNORED_SAMPLING = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
_UNSUPPORTED_SAMPLING = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")  # ignored if empty
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
    prompt_only = prefill_only(call, sampling)
    rid = resolve_request_id(request, call.rid, prefix="", param="rid")
    logprob_start_len = _single_value("logprob_start_len", call.logprob_start_len)
    enabled = call.return_routed_experts
    with field_names(_FIELDS):
        inputs = GenerateReqInput(
            text=call.text,
            input_ids=cast("list[int] | list[list[int]] | None", call.input_ids),
            sampling_params=sampling,
            max_new_tokens=None if prompt_only else call.max_new_tokens,
            rid=rid,
            extra_key=call.extra_key,
            data_parallel_rank=call.data_parallel_rank,
            stream=call.stream is True,
            return_logprob=_single_value("return_logprob", call.return_logprob) is True,
            logprob_start_len=-1 if logprob_start_len is None else logprob_start_len,
            top_logprobs_num=_single_value("top_logprobs_num", call.top_logprobs_num) or 0,
            prediction=call.prediction,
            **to_routing_params(call, enabled=any(enabled) if isinstance(enabled, list) else enabled),
        )
        requests = await server.process(
            inputs,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            routing=sglang_defaults(server.settings),
            num_bytes=body.num_bytes,
        )
    requests = _enable_routing(requests, _enabled_by_prompt(call))
    options = CallOptions(
        request_id=rid, owner=request_owner(request), fields=_FIELDS, headers=ignored_params_header(ignored)
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

    async def _full_response(self) -> Response:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
        answers = [fields for index in range(len(self._requests)) for fields in await self._render(index)]
        return json_response(answers[0] if self._single else answers, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            rendered = await self._render(index)
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

    def _to_dict(self, index: int, rows: RoutedExperts | None) -> dict[str, object]:
        """Return the sequence so far, with these rows."""
        fields = sglang_output(
            self._generation.sequences[index], prompt_only=self._prompt_only, rows=rows, to_encode=True
        )
        if rows is not None and self._requests[index].routed_experts.format == "ref":
            meta_info = cast("dict[str, object]", fields["meta_info"])
            meta_info |= encode_ref(rows, url=ref_url(self._options.request_id, index))
        return fields


def _with_routing(call: GenerateRequest) -> GenerateRequest:
    """Move the routing options that are no sampling parameters out of `sampling_params`; a field that is in both
    must agree."""
    sampling = call.sampling_params or {}
    moved = {name: sampling[name] for name in _ROUTING_OF_SAMPLING if sampling.get(name) is not None}
    for name, value in moved.items():
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name}={short_repr(value)} must be true or false", param=name)
        outer = getattr(call, name)
        if outer is not None and outer != value:
            text = f"{name}={short_repr(outer)}, but sampling_params have {short_repr(value)}; send it once"
            raise InvalidRequestError(text, param=name, code="conflicting_parameters")
    rest = {name: value for name, value in sampling.items() if name not in _ROUTING_OF_SAMPLING}
    return msgspec.structs.replace(call, sampling_params=rest, **moved) if len(rest) < len(sampling) else call


def _sampling(call: GenerateRequest) -> tuple[dict[str, object], list[str]]:
    """Return the sampling parameters, and the names of those without effect, which are left out."""
    fields: Mapping[str, object] = call.sampling_params or {}
    ignored = [name for name, value in fields.items() if name in _IGNORED_SAMPLING or _is_empty_constraint(name, value)]
    sampling = {name: value for name, value in fields.items() if value is not None and name not in ignored}
    for name in ("seed", "sampling_seed"):
        if isinstance(value := sampling.get(name), int):
            sampling[name] = to_seed(value)
    return sampling, ignored


def _is_empty_constraint(name: str, value: object) -> bool:
    return name in _UNSUPPORTED_SAMPLING and value in ("", [])


def prefill_only(call: GenerateRequest, sampling: dict[str, object]) -> bool:
    """Whether 0 new tokens are requested; then `sampling` is changed to one token, which the response leaves out."""
    fields = [call.max_new_tokens, *(sampling.get(name) for name in _LENGTHS)]
    lengths = [value for value in fields if value is not None]
    if not lengths or any(value != 0 or isinstance(value, bool) for value in lengths):
        return False
    for name in (*_LENGTHS, "min_new_tokens", "min_tokens"):
        sampling.pop(name, None)
    sampling["max_new_tokens"] = 1
    return True


def _single_value(param: str, value: bool | int | list[bool] | list[int] | None) -> bool | int | None:
    """Return a value that may be a list with one value a prompt, all equal."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        text = f"{param}={short_repr(value)} holds different values; send prompts of one kind in a call"
        raise InvalidRequestError(text, param=param)
    return value[0]


def _is_single_prompt(call: GenerateRequest) -> bool:
    prompts = call.text if call.text is not None else call.input_ids
    return not isinstance(prompts, list) or isinstance(prompts[0], int)


def _enable_routing(
    requests: Sequence[TokenizedGenerateReqInput], enabled: Sequence[bool] | None
) -> Sequence[TokenizedGenerateReqInput]:
    """Return the requests, without routing options where `enabled`, one value a prompt, is false."""
    if enabled is None:
        return requests
    disabled = RoutingOptions()
    return [
        request if enabled[index // request.sampling.n] else dataclasses.replace(request, routed_experts=disabled)
        for index, request in enumerate(requests)
    ]


def _enabled_by_prompt(call: GenerateRequest) -> Sequence[bool] | None:
    """Return which prompts return rows, where the request sets it for each prompt."""
    enabled = call.return_routed_experts
    if not isinstance(enabled, list):
        return None
    prompts = call.text if call.text is not None else call.input_ids
    num_prompts = 1 if _is_single_prompt(call) or prompts is None else len(prompts)
    if len(enabled) != num_prompts:
        text = f"return_routed_experts has {len(enabled)} values for {num_prompts} prompts; send one each"
        raise InvalidRequestError(text, param="return_routed_experts")
    return enabled
