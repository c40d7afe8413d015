"""POST /v1/score: logprobs and rows of tokens that are given, on live routes or on those of a record. Knows no queue:
scores run beside it."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import (
    CaptureDisabledError,
    InvalidRequestError,
    RoutingAlignmentError,
    RoutingFormatError,
)
from routed_experts.core.io_struct import GenerateReqInput, RoutingOptions
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.engine.requests.input_processor import MAX_PROMPTS
from routed_experts.engine.requests.routing_options import resolve_routing_options
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.server.body import read_struct
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.fields import ignored_params_header
from routed_experts.server.limits import MAX_SCORED_TOKENS, SCORED_TOGETHER
from routed_experts.server.openai.params import resolve_request_id
from routed_experts.server.protocol import ScoreRequest
from routed_experts.server.reply import json_reply
from routed_experts.server.routing.response import (
    check_listed,
    native_defaults,
    ref_url,
    routing_fields,
    routing_keywords,
)
from routed_experts.server.routing.store import KeptRows
from routed_experts.server.sse import watched
from routed_experts.server.state import ServerState

_LOGPROB_BYTES = 24  # of one number in JSON


async def score(request: Request, service: ServerState) -> Response:
    """Score sequences of token ids."""
    settings = service.settings
    body = await read_struct(request, ScoreRequest, max_bytes=settings.max_body_bytes, strict=settings.strict_fields)
    said, door = body.value, service.accepting_engine
    service.check_model(said.model)
    name = resolve_request_id(request, said.request_id, prefix="score-")
    service.metrics.ignored(body.ignored)
    sequences = _sequences(said)
    wishes = [_wish(service, said, len(ids)) for ids in sequences]
    check_listed(wishes[0], door.capture, prompts=len(sequences), rows=len(sequences[0]) - wishes[0].start)

    nobody_waits = threading.Event()

    def work() -> tuple[list[ScoreOutput], list[dict[str, object]]]:
        outputs = _scored(service, sequences, _records(said, len(sequences)), nobody_waits)
        url = [ref_url(name, index) for index in range(len(outputs))]
        return outputs, [
            _told(index, one, wish, url[index]) for index, (one, wish) in enumerate(zip(outputs, wishes, strict=True))
        ]

    try:
        outputs, told = await watched(request, service.scoring_room.wait(work), timeout_s=settings.request_timeout)
    finally:
        nobody_waits.set()
    if wishes[0].enabled:
        _keep(service, name, str(request.scope["state"]["owner"]), outputs, wishes[0])
    count = sum(len(ids) for ids in sequences)
    usage = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
    answer = {
        "id": name,
        "object": "list",
        "created": service.created,
        "model": service.model_name,
        "data": told,
        "usage": usage,
    }
    num_bytes = (
        sum(0 if one.routed_experts is None else one.routed_experts.ids.nbytes for one in outputs)
        + count * _LOGPROB_BYTES
    )
    return await run_in_thread_if_large(
        num_bytes, lambda: json_reply(answer, headers=ignored_params_header(body.ignored))
    )


def _sequences(said: ScoreRequest) -> list[list[int]]:
    """Token ids of each sequence."""
    ids = said.token_ids
    if ids and all(isinstance(part, int) for part in ids):
        return [cast("list[int]", ids)]
    count = sum(len(part) for part in ids if isinstance(part, list))
    if count > MAX_SCORED_TOKENS:
        text = f"token_ids has {count} tokens in {len(ids)} sequences; at most {MAX_SCORED_TOKENS} a call: send fewer sequences at once"
        raise InvalidRequestError(text, param="token_ids")
    if not ids or not all(isinstance(part, list) and part for part in ids) or len(ids) > MAX_PROMPTS:
        text = f"token_ids must be one sequence of ids, or 1 to {MAX_PROMPTS} of them, none of them empty"
        raise InvalidRequestError(text, param="token_ids")
    return cast("list[list[int]]", ids)


def _records(said: ScoreRequest, count: int) -> list[RoutedExperts | None] | None:
    """The rows to execute, one record a sequence."""
    if said.routed_experts is None:
        return None
    given = said.routed_experts if isinstance(said.routed_experts, list) else [said.routed_experts]
    if len(given) != count:
        raise InvalidRequestError(
            f"routed_experts has {len(given)} records for {count} sequences; send one each", param="routed_experts"
        )
    try:
        return [None if one is None else _record(one) for one in given]
    except RoutingFormatError as error:
        raise InvalidRequestError(f"routed_experts: {error}", param="routed_experts", code=error.code) from error


def _record(given: Mapping[str, Any]) -> RoutedExperts:
    record = record_from_meta_info(given)
    if record is None:
        raise RoutingFormatError(
            "an object without rows; send the meta_info (or the choice) of an answer, or null for live routes"
        )
    return record


def _wish(service: ServerState, said: ScoreRequest, length: int) -> RoutingOptions:
    """What is wanted of a sequence's rows. Every token is fed, so include_last changes nothing."""
    fields = routing_keywords(said, asked=said.return_routed_experts)
    capture, defaults = service.door.capture is not None, native_defaults(service.settings)
    return resolve_routing_options(
        GenerateReqInput(**fields), SamplingParams(), prompt_len=length, capture=capture, defaults=defaults
    )


def _scored(
    service: ServerState,
    sequences: list[list[int]],
    records: list[RoutedExperts | None] | None,
    nobody_waits: threading.Event,
) -> list[ScoreOutput]:
    """Score some sequences after the others, so that other calls have their turn, and until nobody waits."""
    outputs: list[ScoreOutput] = []
    try:
        while len(outputs) < len(sequences) and not nobody_waits.is_set():
            start, end, tokens = len(outputs), len(outputs), 0
            while end < len(sequences) and (end == start or tokens + len(sequences[end]) <= SCORED_TOGETHER):
                tokens += len(sequences[end])
                end += 1
            outputs += service.door.engine.score(
                sequences[start:end], routed=None if records is None else records[start:end]
            )
        return outputs
    except RoutingAlignmentError as error:
        raise InvalidRequestError(str(error), param="routed_experts", code=error.code) from error
    except CaptureDisabledError as error:
        raise CaptureDisabledError(str(error), param="routed_experts") from error


def _told(index: int, output: ScoreOutput, wish: RoutingOptions, url: str) -> dict[str, object]:
    """One scored sequence; its rows stand where `/v1` has those of an answer."""
    meta: dict[str, object] = {
        "prompt_tokens": int(output.token_ids.size),
        "weight_version": str(output.weight_version),
    }
    said: dict[str, object] = {"index": index, "object": "score", "logprobs": output.logprobs.tolist()}
    record = output.routed_experts
    if not wish.enabled or record is None:
        return {**said, "meta_info": meta}
    rows = record[wish.start :]
    placed = routing_fields(rows, wish, aborted=False, url=url, weight_version=output.weight_version, beside=True)
    placed_meta = cast("dict[str, object]", placed.choice["meta_info"])
    return {**said, **placed.choice, **placed.response, "meta_info": {**meta, **placed_meta}}


def _keep(service: ServerState, name: str, owner: str, outputs: Sequence[ScoreOutput], wish: RoutingOptions) -> None:
    """Count rows that leave, and keep those that will be fetched."""
    entry = None
    if wish.format == "ref":
        entry = service.store.expect(name, owner=owner, choices=range(len(outputs)))
    for index, output in enumerate(outputs):
        assert output.routed_experts is not None, "rows are recorded where a wish for them is met"
        rows = output.routed_experts[wish.start :]
        service.metrics.sent_rows(wish.format, rows.ids.nbytes)
        if entry is not None:
            service.store.put(entry, index, KeptRows(record=rows, token_ids=output.token_ids, owner=owner))
