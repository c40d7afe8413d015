"""POST /generate, in SGLang's dialect: text cumulative in streams, everything else in meta_info. Knows no other
dialect."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput, StrOut, RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.sglang_output import sglang_output
from routed_experts.formats.wire import encode_ref
from routed_experts.server.body import read_struct
from routed_experts.server.fields import ignored_params_header
from routed_experts.server.generation_handler import CallName, GenerationHandler
from routed_experts.server.limits import INLINE_BYTES
from routed_experts.server.openai.params import resolve_request_id, seed_of
from routed_experts.server.protocol import GenerateRequest
from routed_experts.server.reply import json_reply
from routed_experts.server.routing.response import increments, native_defaults, ref_url, routing_keywords, rows_of
from routed_experts.server.sse import DONE, event
from routed_experts.server.state import ServerState

DEFAULT_MAX_TOKENS = 128
# Of SGLang's sampling parameters those that its clients send as a matter of course and that change nothing here.
_SAMPLING_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
_ROUTING_OF_SAMPLING = ("routed_experts_stream",)
_PROMPT_ONLY = ("max_new_tokens", "max_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """What a call is beside its requests. `single`: the answer is no list."""

    request_id: str
    owner: str
    single: bool
    prompt_only: bool
    headers: dict[str, str]


async def generate(request: Request, service: ServerState) -> Response:
    """Continue one prompt or many."""
    settings = service.settings
    body = await read_struct(request, GenerateRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields)
    said = _with_routing(body.value)
    sampling, ignored = _sampling_of(said)
    service.metrics.ignored([*body.ignored, *ignored])
    prompt_only = prefill_only(said, sampling)
    rid = resolve_request_id(request, said.rid, prefix="", param="rid")
    wanted = said.return_routed_experts
    asked = GenerateReqInput(
        text=said.text,
        input_ids=cast("Any", said.input_ids),
        sampling_params=sampling,
        max_new_tokens=None if prompt_only else said.max_new_tokens,
        rid=rid,
        extra_key=said.extra_key,
        stream=said.stream is True,
        return_logprob=_one("return_logprob", said.return_logprob) is True,
        logprob_start_len=-1 if (start := _one("logprob_start_len", said.logprob_start_len)) is None else start,
        top_logprobs_num=_one("top_logprobs_num", said.top_logprobs_num) or 0,
        **routing_keywords(said, asked=any(wanted) if isinstance(wanted, list) else wanted),
    )
    routing = native_defaults(settings)
    requests = await service.admit(
        asked, default_max_tokens=DEFAULT_MAX_TOKENS, routing=routing, num_bytes=body.num_bytes
    )
    requests = _as_asked(requests, _asked_list(said))
    single = isinstance(said.text, str) or (
        isinstance(said.input_ids, list) and not isinstance(said.input_ids[0], list)
    )
    options = NativeOptions(
        request_id=rid,
        owner=str(request.scope["state"]["owner"]),
        single=single and len(requests) == 1,
        prompt_only=prompt_only,
        headers=ignored_params_header([*body.ignored, *ignored]),
    )
    call = SGLangHandler(service, requests, options)
    return await (call.stream(request) if said.stream else call.plain(request))


class SGLangHandler(GenerationHandler):
    """One call of /generate. Event loop only."""

    def __init__(
        self, service: ServerState, requests: Sequence[TokenizedGenerateReqInput], options: NativeOptions
    ) -> None:
        super().__init__(service, requests, CallName(options.request_id, options.owner, options.headers))
        self._options = options

    async def _whole(self) -> Response:
        await self.accepted()
        async for index, news in self._call.outputs():
            self._noted(index, news)
        answers = [said for index in range(len(self._requests)) for said in await self._said(index)]
        return json_reply(answers[0] if self._options.single else answers, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        async for index, news in self._call.outputs():
            self._noted(index, news)
            *early, last = [
                event(said if self._options.single else {**said, "index": index}) for said in await self._said(index)
            ]
            for chunk in early:
                yield chunk
            yield last if self._call.is_open else last + DONE

    async def _said(self, index: int) -> list[dict[str, object]]:
        """What the answer says now; with large streamed rows in several pieces, of which the last has the finish
        reason. Large rows are encoded off the event loop."""
        answer, wanted = self._call.sequences[index], self._requests[index].routed_experts
        if not wanted.enabled or (answer.finish_reason is None and answer.record is None):
            return [self._dict_of(index, None)]
        record = rows_of(answer, prompt_only=self._options.prompt_only)
        size = self.sending(index, record)

        def said() -> list[dict[str, object]]:
            pieces = increments(record, wanted)
            told = [self._dict_of(index, piece) for piece in pieces]
            for early in told[:-1]:
                cast("dict[str, object]", early["meta_info"])["finish_reason"] = None
            return told

        return await asyncio.to_thread(said) if size > 4 * INLINE_BYTES else said()

    def _noted(self, index: int, news: StrOut) -> None:
        counts = self._call.sequences[index].last
        completion_tokens = 0 if self._options.prompt_only else counts.completion_tokens
        self.note(index, news, cached_tokens=counts.cached_tokens, completion_tokens=completion_tokens)

    def _dict_of(self, index: int, rows: RoutedExperts | None) -> dict[str, object]:
        """The answer so far, with these rows."""
        answer, options = self._call.sequences[index], self._options
        said = sglang_output(answer, prompt_only=options.prompt_only, rows=rows)
        meta = cast("dict[str, object]", said["meta_info"])
        request = self._requests[index]
        if rows is not None and request.routed_experts.format == "ref":
            meta |= encode_ref(rows, url=ref_url(options.request_id, index))
        return said


def _with_routing(said: GenerateRequest) -> GenerateRequest:
    """The body, with the routing fields that only the door knows taken out of its sampling parameters. Said twice they
    must agree."""
    given = said.sampling_params or {}
    found = {name: given[name] for name in _ROUTING_OF_SAMPLING if given.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name}={short_repr(value)} must be true or false", param=name)
    beside = {
        name: value for name, value in msgspec.structs.asdict(said).items() if name in found and value is not None
    }
    for name, value in beside.items():
        if value != found[name]:
            text = f"{name}={short_repr(value)}, but sampling_params say {short_repr(found[name])}; say it once"
            raise InvalidRequestError(text, param=name, code="conflicting_parameters")
    rest = {name: value for name, value in given.items() if name not in _ROUTING_OF_SAMPLING}
    return msgspec.structs.replace(said, sampling_params=rest, **found) if len(rest) < len(given) else said


def _sampling_of(said: GenerateRequest) -> tuple[dict[str, object], list[str]]:
    """Sampling parameters without those that change nothing here, whose names come second."""
    given: Mapping[str, object] = said.sampling_params or {}
    kept = {name: value for name, value in given.items() if value is not None and name not in _SAMPLING_WITHOUT_EFFECT}
    for name in ("seed", "sampling_seed"):
        if isinstance(kept.get(name), int):
            kept[name] = seed_of(cast("int", kept[name]))
    unused = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
    harmless = {name for name in unused if name in kept and kept[name] in ("", [])}
    ignored = [name for name in given if name in _SAMPLING_WITHOUT_EFFECT or name in harmless]
    return {name: value for name, value in kept.items() if name not in harmless}, ignored


def prefill_only(said: GenerateRequest, sampling: dict[str, object]) -> bool:
    """Is nothing to be generated (0 new tokens)? Then the engine is asked for one, which is left out."""
    named = [said.max_new_tokens, *(sampling.get(name) for name in _PROMPT_ONLY)]
    told = [value for value in named if value is not None]
    if not told or any(value != 0 or isinstance(value, bool) for value in told):
        return False
    for name in (*_PROMPT_ONLY, "min_new_tokens", "min_tokens"):
        sampling.pop(name, None)
    sampling["max_new_tokens"] = 1
    return True


def _one(param: str, value: bool | int | list[bool] | list[int] | None) -> bool | int | None:
    """A value that may come as a list, one a prompt; they must be equal."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise InvalidRequestError(
            f"{param}={short_repr(value)} holds different values; send prompts of one kind in a call", param=param
        )
    return value[0]


def _as_asked(
    requests: Sequence[TokenizedGenerateReqInput], asked: Sequence[bool] | None
) -> Sequence[TokenizedGenerateReqInput]:
    """The requests, of which those whose rows were not asked for ask for none. `asked`: one a prompt."""
    if asked is None:
        return requests
    none = RoutingOptions()
    wishes = [
        request.routed_experts if asked[index // request.sampling.n] else none for index, request in enumerate(requests)
    ]
    return [dataclasses.replace(request, routed_experts=wish) for request, wish in zip(requests, wishes, strict=True)]


def _asked_list(said: GenerateRequest) -> Sequence[bool] | None:
    """Whose rows are returned, where that differs by prompt."""
    asked = said.return_routed_experts
    if not isinstance(asked, list):
        return None
    given = said.text if said.text is not None else said.input_ids
    prompts = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    if len(asked) != prompts:
        text = f"return_routed_experts has {len(asked)} values for {prompts} prompts; send one each"
        raise InvalidRequestError(text, param="return_routed_experts")
    return asked
