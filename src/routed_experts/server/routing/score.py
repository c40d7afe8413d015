"""POST /v1/score: logprobs and rows of given tokens, on live routes or on those of a record; SGLang's scores of labels.

Scores bypass the queue of requests, in chunks, so that other calls are not blocked."""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    CaptureDisabledError,
    InvalidRequestError,
    RoutingAlignmentError,
    RoutingFormatError,
    field_names,
)
from routed_experts.core.io_struct import GenerateReqInput, RoutingOptions
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.engine.requests.routing_options import resolve_routing_options
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.server.body import ParsedBody, ignored_params_header, json_response, read_body
from routed_experts.server.executors import run_in_thread_if_large
from routed_experts.server.limits import MAX_SCORED_SEQUENCES, MAX_SCORED_TOKENS, SCORE_CHUNK_TOKENS
from routed_experts.server.middleware import has_made_id, request_owner, resolve_request_id
from routed_experts.server.protocol import RoutingFields, ScoreRequest
from routed_experts.server.routing.response import (
    check_list_size,
    payload_bytes,
    ref_url,
    routing_fields,
    sglang_defaults,
    to_routing_params,
)
from routed_experts.server.routing_store import StoredRows
from routed_experts.server.sse import run_until_disconnect
from routed_experts.server.state import ServerState

_LOGPROB_BYTES = 24  # of one number in JSON
_OF_LABELS = ("items", "label_token_ids", "apply_softmax", "item_first")  # fields of the form with a query
_OF_ROWS = ("routed_experts", "replay_weights", "return_routed_experts", *RoutingFields.__struct_fields__)


async def score(request: Request, server: ServerState) -> Response:
    """Score sequences of token ids, or labels after a query and items."""
    body = await read_body(request, ScoreRequest, server.settings)
    fields, engine = body.value, server.accepting_engine
    server.check_model(fields.model)
    if (fields.token_ids is None) == (fields.query is None):
        text = "send token_ids; or query, items and label_token_ids"
        raise InvalidRequestError(text, param="token_ids" if fields.query is None else "query")
    if fields.query is not None:
        return await _score_labels(request, server, body)
    unexpected = next((name for name in _OF_LABELS if getattr(fields, name)), None)
    if unexpected is not None:
        text = f"{unexpected} is of query, items and label_token_ids, and token_ids is given; leave one of them out"
        raise InvalidRequestError(text, param=unexpected)
    request_id = resolve_request_id(request, fields.request_id, prefix="score-")
    server.metrics.ignored(body.ignored)
    sequences = _sequences(fields)
    options = [_routing_options(server, fields, len(ids)) for ids in sequences]
    num_rows = len(sequences[0]) - options[0].start
    counts = {"num_rows": num_rows, "num_weight_rows": num_rows}
    check_list_size(options[0], engine.capture, num_prompts=len(sequences), **counts)
    cancelled = threading.Event()

    def work() -> tuple[list[ScoreOutput], list[dict[str, object]]]:
        records, replay_weights = _records(fields, len(sequences)), fields.replay_weights is True
        outputs = _score_in_chunks(server, sequences, records, cancelled, replay_weights=replay_weights)
        if len(outputs) < len(sequences):  # cancelled
            return outputs, []
        if not options[0].weights:
            outputs = [_without_weights(output) for output in outputs]
        return outputs, [
            _render(index, output, option, ref_url(server.settings, request_id, index))
            for index, (output, option) in enumerate(zip(outputs, options, strict=True))
        ]

    async def score_and_record() -> tuple[list[ScoreOutput], list[dict[str, object]]]:
        outputs, data = await server.score_executor.run(work)
        if options[0].enabled:
            await _record_sent(server, request, request_id, outputs, options[0])
        return outputs, data

    try:
        outputs, data = await run_until_disconnect(
            request, score_and_record(), timeout_s=server.settings.request_timeout
        )
    finally:
        cancelled.set()
    num_tokens = sum(len(ids) for ids in sequences)
    response = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": server.model_name,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
    }
    records = [output.routed_experts for output in outputs]
    num_bytes = sum(record.nbytes for record in records if record is not None) + num_tokens * _LOGPROB_BYTES
    headers = ignored_params_header(body.ignored)
    return await run_in_thread_if_large(num_bytes, lambda: json_response(response, headers=headers))


async def _score_labels(request: Request, server: ServerState, body: ParsedBody[ScoreRequest]) -> Response:
    """The probability of each label after the query and each item; with apply_softmax among the labels."""
    fields = body.value
    server.metrics.ignored(body.ignored)
    labels = fields.label_token_ids or []
    _check_label_fields(fields, labels, server.engine.vocab_size)
    num_sequences = len(labels) * (1 if isinstance(fields.items, str) else len(fields.items or ()))
    if num_sequences > MAX_SCORED_SEQUENCES:  # before anything of that number is made
        text = f"items and label_token_ids make {num_sequences} sequences; a call has at most {MAX_SCORED_SEQUENCES}"
        raise InvalidRequestError(f"{text}: send fewer items at once", param="items")
    prompts = await run_in_thread_if_large(body.num_bytes, lambda: _label_prompts(server, fields))
    if not all(prompts):
        raise InvalidRequestError("the query and an item are both empty; send some text or ids", param="query")
    num_tokens = len(labels) * sum(len(prompt) + 1 for prompt in prompts)
    if num_tokens > MAX_SCORED_TOKENS:
        text = f"items and label_token_ids make sequences of {num_tokens} tokens; a call has at most"
        raise InvalidRequestError(f"{text} {MAX_SCORED_TOKENS}: send fewer items at once", param="items")
    sequences = [[*prompt, label] for prompt in prompts for label in labels]
    cancelled = threading.Event()
    try:
        with field_names({"token_ids": "items"}):
            outputs = await run_until_disconnect(
                request,
                server.score_executor.run(
                    lambda: _score_in_chunks(server, sequences, None, cancelled, num_per_prompt=len(labels))
                ),
                timeout_s=server.settings.request_timeout,
            )
    finally:
        cancelled.set()
    logprobs = np.array([output.logprobs[-1] for output in outputs], np.float64).reshape(len(prompts), len(labels))
    scores = np.exp(logprobs)
    if fields.apply_softmax:
        scores = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    num_prompt_tokens = sum(len(prompt) for prompt in prompts)
    response = {
        "scores": scores.tolist(),
        "object": "scoring",
        "model": server.model_name,
        "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0, "total_tokens": num_prompt_tokens},
    }
    return json_response(response, headers=ignored_params_header(body.ignored))


def _check_label_fields(fields: ScoreRequest, labels: Sequence[int], vocab_size: int) -> None:
    if not labels:
        raise InvalidRequestError("label_token_ids must hold an id; send those to score", param="label_token_ids")
    unknown = next((label for label in labels if not 0 <= label < vocab_size), None)
    if unknown is not None:
        text = f"label_token_ids holds {short_repr(unknown)}, which is out of vocabulary: ids are 0..{vocab_size - 1}"
        raise InvalidRequestError(f"{text}; give ids of this model's tokenizer", param="label_token_ids")
    unexpected = next((name for name in _OF_ROWS if getattr(fields, name)), None)
    if unexpected is not None:
        text = f"{unexpected} needs token_ids: query and items have no rows; leave it out"
        raise InvalidRequestError(text, param=unexpected)


def _label_prompts(server: ServerState, fields: ScoreRequest) -> list[list[int]]:
    """The token ids of the query with each item."""
    items = [fields.items] if isinstance(fields.items, str) else fields.items or []
    query = fields.query
    if isinstance(query, str) and items and all(isinstance(item, str) for item in items):
        tokenizer, texts = server.tokenizer("query"), cast("list[str]", items)
        return [tokenizer.encode(item + query if fields.item_first else query + item) for item in texts]
    if isinstance(query, list) and items and all(isinstance(item, list) for item in items):
        ids = cast("list[list[int]]", items)
        return [[*item, *query] if fields.item_first else [*query, *item] for item in ids]
    raise InvalidRequestError(
        "items must be texts where query is text, and lists of ids where it is ids", param="items"
    )


def _sequences(fields: ScoreRequest) -> list[list[int]]:
    """Return the token ids of each sequence."""
    ids = fields.token_ids or []
    if ids and all(isinstance(part, int) for part in ids):
        return [cast("list[int]", ids)]
    num_tokens = sum(len(part) for part in ids if isinstance(part, list))
    if num_tokens > MAX_SCORED_TOKENS:
        text = (
            f"token_ids has {num_tokens} tokens in {len(ids)} sequences; at most {MAX_SCORED_TOKENS} a call: "
            "send fewer sequences at once"
        )
        raise InvalidRequestError(text, param="token_ids")
    if len(ids) > 1 and [] in ids:
        text = f"token_ids[{ids.index([])}] is empty; send at least one token id of each sequence"
        raise InvalidRequestError(text, param="token_ids")
    if not ids or not all(isinstance(part, list) and part for part in ids) or len(ids) > MAX_SCORED_SEQUENCES:
        text = f"token_ids must be one sequence of ids, or 1 to {MAX_SCORED_SEQUENCES} of them, none of them empty"
        raise InvalidRequestError(text, param="token_ids")
    return cast("list[list[int]]", ids)


def _records(fields: ScoreRequest, num_sequences: int) -> list[RoutedExperts | None] | None:
    """Return the rows to replay, one record a sequence."""
    if fields.routed_experts is None:
        return None
    payloads = fields.routed_experts if isinstance(fields.routed_experts, list) else [fields.routed_experts]
    if len(payloads) != num_sequences:
        text = f"routed_experts has {len(payloads)} records for {num_sequences} sequences; send one each"
        raise InvalidRequestError(text, param="routed_experts")
    try:
        return [None if payload is None else _record(payload) for payload in payloads]
    except RoutingFormatError as error:
        raise InvalidRequestError(f"routed_experts: {error}", param="routed_experts", code=error.code) from error


def _record(payload: Mapping[str, Any]) -> RoutedExperts:
    record = record_from_meta_info(payload)
    if record is None:
        raise RoutingFormatError(
            "an object without rows; send the meta_info (or the choice) of an answer, or null for live routes"
        )
    return record


def _routing_options(server: ServerState, fields: ScoreRequest, length: int) -> RoutingOptions:
    """Return the routing options of one sequence. Every token is fed, so include_last has no effect."""
    inputs = GenerateReqInput(**to_routing_params(fields, enabled=fields.return_routed_experts))
    return resolve_routing_options(
        inputs,
        SamplingParams(),
        prompt_len=length,
        capture=server.engine.capture,
        defaults=sglang_defaults(server.settings),
    )


def _score_in_chunks(
    server: ServerState,
    sequences: list[list[int]],
    records: list[RoutedExperts | None] | None,
    cancelled: threading.Event,
    *,
    replay_weights: bool = False,
    num_per_prompt: int = 1,
) -> list[ScoreOutput]:
    """Score chunks of at most SCORE_CHUNK_TOKENS one after the other, until all are scored or the call is cancelled.
    `num_per_prompt`: sequences of one prompt, which an error names by its index among several."""
    outputs: list[ScoreOutput] = []
    try:
        while len(outputs) < len(sequences) and not cancelled.is_set():
            start, end, num_tokens = len(outputs), len(outputs), 0
            while end < len(sequences) and (end == start or num_tokens + len(sequences[end]) <= SCORE_CHUNK_TOKENS):
                num_tokens += len(sequences[end])
                end += 1
            routed = None if records is None else records[start:end]
            part = sequences[start:end]
            outputs += server.engine.engine.score(part, routed=routed, replay_weights=replay_weights)
        return outputs
    except RoutingAlignmentError as error:
        raise InvalidRequestError(str(error), param="routed_experts", code=error.code) from error
    except CaptureDisabledError as error:
        raise CaptureDisabledError(str(error), param="routed_experts") from error
    except InvalidRequestError as error:
        if error.param != "token_ids":
            raise
        index = (len(outputs) + (error.index or 0)) // num_per_prompt  # that of the error counts within its chunk
        raise error.at_prompt(index if len(sequences) > num_per_prompt else None, "token_ids") from error


def _without_weights(output: ScoreOutput) -> ScoreOutput:
    """The same without combine weights, which are returned on request."""
    if output.routed_experts is None:
        return output
    return dataclasses.replace(output, routed_experts=dataclasses.replace(output.routed_experts, weights=None))


def _render(index: int, output: ScoreOutput, options: RoutingOptions, url: str) -> dict[str, object]:
    """Return one scored sequence; its rows are in the same fields as those of a /v1 choice."""
    num_tokens, count, label = int(output.token_ids.size), output.update_count, output.weight_version
    weights: dict[str, object] = {
        "weight_version": label,
        "update_count": count,
        "prefill_weight_versions": [{"version": label, "start": 0, "end": num_tokens}],
        "version_spans": [[0, num_tokens, count]],
        "version_labels": {str(count): label},
    }
    meta: dict[str, object] = {"prompt_tokens": num_tokens, **weights}
    fields: dict[str, object] = {"index": index, "object": "score", "logprobs": output.logprobs.tolist()}
    record = output.routed_experts
    if not options.enabled or record is None:
        return {**fields, "meta_info": meta}
    routing = routing_fields(
        record[options.start :],
        options,
        aborted=False,
        url=url,
        meta=weights,
        prompt_rows_in="response",
    )
    routing_meta = cast("dict[str, object]", routing.choice["meta_info"])
    return {**fields, **routing.choice, **routing.response, "meta_info": {**meta, **routing_meta}}


async def _record_sent(
    server: ServerState,
    request: Request,
    request_id: str,
    outputs: Sequence[ScoreOutput],
    options: RoutingOptions,
) -> None:
    """Count the rows that are sent, and store those that will be fetched."""
    entry, owner = None, request_owner(request)
    if options.format == "ref":
        choices = range(len(outputs))
        entry = server.store.reserve(request_id, owner=owner, choices=choices, is_made=has_made_id(request))
        try:
            await server.reserve_rows(entry)
        except BaseException:
            server.store.release(entry)
            raise
    for index, output in enumerate(outputs):
        assert output.routed_experts is not None, "rows are recorded where routing options are accepted"
        rows = output.routed_experts[options.start :]
        server.metrics.sent_rows(options.format, payload_bytes(rows, options))
        if entry is not None:
            server.store.fill(entry, index, StoredRows(record=rows, token_ids=output.token_ids, owner=owner))
