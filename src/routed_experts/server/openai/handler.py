"""What both routes of OpenAI share: sampling parameters, the handler of a call, the state of a choice, logprobs, usage.

Chat and text completions differ in their ResponseRenderer. A stream has a first chunk, chunks of text, of which the
last of each choice has the finish reason, and a chunk with the usage if the request asks for it."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import FinishReason, StrOut, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams, clamp_biases
from routed_experts.core.speculative_stats import SpeculativeCounts
from routed_experts.engine.requests.placement_fields import exactness_fields
from routed_experts.engine.requests.sequence_state import SequenceState, TokenLogprob, TopLogprobs
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.engine.requests.weight_fields import weight_fields
from routed_experts.formats.wire import PAYLOAD_KEY
from routed_experts.server.body import ParsedBody, ignored_params_header, json_response
from routed_experts.server.errors import ApiError
from routed_experts.server.generation_handler import CallOptions, GenerationHandler, to_seed, usage_in_stream
from routed_experts.server.limits import MAX_OPENAI_STOPS
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.openai.structured import grammar_of
from routed_experts.server.protocol import OpenAIRequest
from routed_experts.server.routing.response import ResponseRouting, ref_url, routing_fields
from routed_experts.server.sse import event
from routed_experts.server.state import ServerState

MAX_LOGPROBS = 20
_LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot express
_SAMPLING_FIELDS = (
    "temperature top_p top_k min_p n stop stop_token_ids min_tokens ignore_eos presence_penalty frequency_penalty "
    "repetition_penalty logit_bias allowed_token_ids bad_words skip_special_tokens include_stop_str_in_output "
    "speculative"
).split()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Which logprobs a call returns: of generated tokens, with `top` alternatives; of the prompt, with `prompt`
    alternatives (None: not returned). `as_ids`: tokens are written as token_id:N, from which the id can be read."""

    enabled: bool
    top: int
    prompt: int | None
    as_ids: bool
    echo: bool  # those of the prompt precede those of the generated tokens

    @property
    def num_requested(self) -> int:
        """The number of alternatives that the engine returns."""
        return max(self.top, self.prompt or 0)

    @property
    def start(self) -> int:
        """The first token of the prompt with a logprob; -1 without."""
        return 0 if self.echo or self.prompt is not None else -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions(CallOptions):
    """Options of a call of /v1: whether its stream ends with the usage, and whether every chunk has it; logprobs."""

    include_usage: bool
    continuous_usage: bool
    logprobs: LogprobOptions


def parse_options(
    request: Request,
    server: ServerState,
    body: ParsedBody[OpenAIRequest],
    *,
    prefix: str,
    fields: Mapping[str, str],
    logprobs: int | None,
) -> OpenAIOptions:
    """Read the options of a call. `logprobs`: alternatives of generated tokens; None without logprobs. Raises for
    options that need a stream, or forbid one."""
    call = body.value
    include_usage, continuous_usage = usage_in_stream(server.settings, call.stream_options, stream=call.stream)
    if call.rid is not None and call.request_id is not None and call.rid != call.request_id:
        text = "rid and request_id differ; send one"
        raise ApiError(text, status=400, code="conflicting_parameters", param="request_id")
    server.metrics.ignored(body.ignored)
    return OpenAIOptions(
        request_id=resolve_request_id(request, call.request_id or call.rid, prefix=prefix, param=id_field(call)),
        owner=request_owner(request),
        fields=fields,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=_logprob_options(server, call, logprobs),
        headers=ignored_params_header(body.ignored),
    )


def id_field(call: OpenAIRequest) -> str:
    """Return the field with the id of a call, of the two that may have it."""
    return "rid" if not call.request_id and call.rid is not None else "request_id"


def _logprob_options(server: ServerState, call: OpenAIRequest, logprobs: int | None) -> LogprobOptions:
    prompt = call.prompt_logprobs
    if prompt is not None and not 0 <= prompt <= MAX_LOGPROBS:
        text = f"prompt_logprobs={short_repr(prompt)} must be 0..{MAX_LOGPROBS}"
        raise InvalidRequestError(text, param="prompt_logprobs")
    if prompt is not None and call.stream is True:
        text = "prompt_logprobs with stream; set stream to false"
        raise ApiError(text, status=400, code="conflicting_parameters", param="prompt_logprobs")
    as_ids = call.return_tokens_as_token_ids
    return LogprobOptions(
        enabled=logprobs is not None,
        top=logprobs or 0,
        prompt=prompt,
        as_ids=server.settings.return_tokens_as_token_ids if as_ids is None else as_ids,
        echo=logprobs is not None and call.echo is True,
    )


def given_ids(body: OpenAIRequest, logprobs: LogprobOptions) -> list[int] | None:
    """Return the ids whose logprobs a body asks for. Raises ApiError without logprobs."""
    if body.logprob_token_ids and not logprobs.enabled:
        text = "logprob_token_ids without logprobs; set logprobs"
        raise ApiError(text, status=400, code="invalid_request", param="logprob_token_ids")
    return body.logprob_token_ids


def truncate_prompt(body: OpenAIRequest, ids: list[int], *, context_length: int, max_tokens: int | None) -> list[int]:
    """Return the part of a prompt that the body asks for; all of it where it asks for none. `max_tokens`: of the
    answer, for which -1 leaves room. Raises InvalidRequestError."""
    length, side = body.truncate_prompt_tokens, body.truncation_side
    if side not in (None, "left", "right"):
        text = f"truncation_side={short_repr(side)} must be left or right"
        raise InvalidRequestError(text, param="truncation_side")
    if length is None:
        return ids
    if length == -1:
        length = context_length - max(1, max_tokens or 1)
    if not 1 <= length < context_length:
        text = f"truncate_prompt_tokens={length} must be -1 or 1 to {context_length - 1}, this model's context but one"
        raise InvalidRequestError(text, param="truncate_prompt_tokens")
    return ids[:length] if side == "right" else ids[-length:]


def to_sampling_params(body: OpenAIRequest, max_tokens: int | None) -> SamplingParams:
    """Build the sampling parameters of a body. `max_tokens` 0 computes the prompt only: the engine generates one token,
    which is left out. Raises InvalidRequestError."""
    if isinstance(body.stop, list) and len(body.stop) > MAX_OPENAI_STOPS:
        text = f"stop has {len(body.stop)} strings, above the limit of {MAX_OPENAI_STOPS}; send fewer"
        raise InvalidRequestError(text, param="stop")
    values: dict[str, object] = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    values |= {"seed": to_seed(body.seed), "max_tokens": max_tokens, "structured_outputs": grammar_of(body)}
    if body.logit_bias is not None:
        values["logit_bias"] = clamp_biases(body.logit_bias)
    if max_tokens == 0:
        values |= {"max_tokens": 1, "min_tokens": None}
    return SamplingParams.from_dict(values)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One token with its logprob and the best alternatives, which may leave out the token itself. `is_known` False: the
    first token of a prompt, which has no logprob."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]
    is_known: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a choice gains: by one output, or by all of them."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobEntry, ...]


class ChoiceState:
    """View of one SequenceState as a choice: it holds offsets, and no text, tokens or logprobs of its own.

    `echo`: the text of the prompt, which the first delta begins with; `prompt_only`: the one token that the engine
    generated is left out."""

    def __init__(
        self,
        index: int,
        sequence: SequenceState,
        *,
        echo: str | None,
        prompt_only: bool,
        logprobs: LogprobOptions,
    ) -> None:
        self.index, self.sequence, self.request, self.prompt_only = index, sequence, sequence.request, prompt_only
        self._logprobs = logprobs
        self._echo, self._has_sent_echo, self._has_sent_prompt = echo, False, False
        self._num_logprobs = 0  # sent in earlier deltas
        self.text_offset = 0  # characters of the token texts sent in earlier deltas

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has finished."""
        return self.sequence.finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether a limit has ended the sequence, such as max_tokens."""
        return self.sequence.finish_reason is not None and self.sequence.finish_reason.is_cut

    def to_delta(self, output: StrOut) -> Delta:
        """Return what one output of the sequence adds."""
        delta = self._delta(
            output.text,
            output.out.new_token_ids,
            first_logprob=self._num_logprobs,
            with_echo=self._echo is not None and not self._has_sent_echo,
        )
        self._has_sent_echo, self._num_logprobs = True, len(self.sequence.output_logprobs)
        return delta

    def full(self) -> Delta:
        """Return the whole choice."""
        text, token_ids = self.sequence.text, self.sequence.token_ids
        return self._delta(text, token_ids, first_logprob=0, with_echo=self._echo is not None)

    def _delta(self, text: str, token_ids: tuple[int, ...], *, first_logprob: int, with_echo: bool) -> Delta:
        sequence, logprobs, num_top = self.sequence, list[LogprobEntry](), self._logprobs.top
        if with_echo and self._logprobs.echo:
            logprobs += _prompt_entries(num_top, sequence.echoed_logprobs(self._echo or ""))
        if self.prompt_only:
            text, token_ids = "", ()
        else:
            has_given = bool(self.request.token_ids_logprob)
            tops = sequence.output_given_logprobs if has_given else sequence.output_top_logprobs
            for token, top in zip(sequence.output_logprobs[first_logprob:], tops[first_logprob:], strict=True):
                best = (top or ())[:num_top]
                given = (token, *(other for other in top or () if other.token_id != token.token_id))
                logprobs.append(LogprobEntry(token=token, top=given if has_given else best))
        echo = self._echo if with_echo else None
        return Delta(text=(echo or "") + text, token_ids=token_ids, logprobs=tuple(logprobs))

    def prompt_logprobs(self) -> list[dict[str, object] | None] | None:
        """Return the logprobs of the prompt by token id, in vLLM's form; None where they are not requested. `rank` is
        null for a token that is not among the alternatives."""
        if self._logprobs.prompt is None:
            return None
        pairs = zip(self.sequence.input_logprobs or (), self.sequence.input_top_logprobs, strict=True)
        entries = _prompt_entries(self._logprobs.prompt, pairs)
        return [_by_id(entry) if entry.is_known else None for entry in entries]

    def num_tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt that came from the prefix cache, and the generated tokens so far."""
        if not self.sequence.has_output:
            return 0, 0
        last = self.sequence.last
        return last.cached_tokens, 0 if self.prompt_only else last.completion_tokens

    @property
    def has_sent_prompt(self) -> bool:
        """Whether `token_fields` has given the ids of the prompt."""
        return self._has_sent_prompt

    def token_fields(self, delta: Delta) -> dict[str, object]:
        """Return the ids of a delta, and the first time those of the prompt."""
        fields: dict[str, object] = {"token_ids": list(delta.token_ids)}
        if not self._has_sent_prompt:
            fields["prompt_token_ids"] = self.request.input_ids.tolist()
        self._has_sent_prompt = True
        return fields

    def weight_fields(self) -> dict[str, object]:
        """Return the fields that tell which weights made the choice."""
        return weight_fields(self.sequence, num_tokens=self.num_tokens()[1], is_last=self.is_finished)

    def meta_info(self) -> dict[str, object]:
        """Return the fields of `meta_info` but rows: the weights, and what the placement of experts changed."""
        changes = exactness_fields(self.sequence.last) if self.sequence.has_output else {}
        return self.weight_fields() | changes

    def metadata(self) -> dict[str, object]:
        """Return SGLang's field of a response. Its values are texts, for OpenAI's clients have no others."""
        fields = self.weight_fields()
        return {"metadata": {name: str(fields[name]) for name in ("weight_version", "update_count")}}

    def draft_counts(self) -> SpeculativeCounts:
        """Return what became of the drafts of this choice so far."""
        counts = self.sequence.last.speculative if self.sequence.has_output else None
        return counts or SpeculativeCounts()

    def finish_fields(self) -> dict[str, object]:
        """Return `finish_reason`, `stop_reason` (the stop string, or the stop id that the request named; vLLM's field),
        `matched_stop` (also an end token that the model has; SGLang's), and `exact` where it is false."""
        finish = self.sequence.finish_reason
        assert finish is not None, self.request.rid
        if self.prompt_only and finish.type == "stop":
            finish = FinishReason(type="length", length=0)
        is_named = isinstance(finish.matched, str) or finish.matched in self.request.sampling.stop_token_ids
        fields: dict[str, object] = {
            "finish_reason": finish.type,
            "stop_reason": finish.matched if is_named else None,
            "matched_stop": finish.matched,
        }
        return fields if self.sequence.last.exact else {**fields, "exact": False}


def _prompt_entries(num_top: int, pairs: Iterable[tuple[TokenLogprob, TopLogprobs]]) -> list[LogprobEntry]:
    """Return the logprobs of the prompt with their alternatives; none of a request that ended before its first
    token."""
    return [
        LogprobEntry(token=token, top=(top or ())[:num_top], is_known=index > 0)
        for index, (token, top) in enumerate(pairs)
    ]


class ResponseRenderer(Protocol):
    """How chat or text completions write a choice."""

    object_name: str
    chunk_name: str

    def full(self, choice: ChoiceState) -> dict[str, object]:
        """Return the body of a finished choice."""
        ...

    def head(self, choice: ChoiceState, *, stream: bool) -> dict[str, object]:
        """Return fields of the whole response, from its first choice with a token; a stream has them in its first
        chunk."""
        ...

    def first_chunk(self, choice: ChoiceState) -> dict[str, object] | None:
        """Return the body of the chunk before all text, if there is one."""
        ...

    def chunks(self, choice: ChoiceState, delta: Delta) -> list[dict[str, object]]:
        """Return the bodies of the chunks of a delta."""
        ...

    def finish(self, choice: ChoiceState) -> dict[str, object]:
        """Return the fields of the end of a choice."""
        ...

    def last_chunk(self, choice: ChoiceState) -> dict[str, object]:
        """Return the body of a choice's last chunk, without its finish reason."""
        ...


class OpenAIHandler(GenerationHandler):
    """One call of /v1. `echo`: the texts of the prompts, for calls that return them."""

    def __init__(
        self,
        server: ServerState,
        requests: Sequence[TokenizedGenerateReqInput],
        response_format: ResponseRenderer,
        options: OpenAIOptions,
        *,
        prompt_only: bool,
        echo: Sequence[str] | None = None,
    ) -> None:
        self._has_request_metrics = server.settings.enable_per_request_metrics
        if self._has_request_metrics:  # the first token is an output of its own
            requests = [
                request if request.stream else dataclasses.replace(request, stream=True, stream_interval_s=3600.0)
                for request in requests
            ]
        super().__init__(server, requests, options, prompt_only=prompt_only)
        self._format = response_format
        self._include_usage, self._continuous_usage = options.include_usage, options.continuous_usage
        n = requests[0].sampling.n
        self._choices = [
            ChoiceState(
                index,
                sequence,
                echo=None if echo is None else echo[index // n],
                prompt_only=prompt_only,
                logprobs=options.logprobs,
            )
            for index, sequence in enumerate(self._generation.sequences)
        ]
        self._created = int(time.time())
        self._encoded_rows: dict[int, str] = {}  # by choice
        self._has_sent_prompt_rows = False  # format list: they are fields of the response, in its first chunk with rows

    async def _full_response(self) -> Response:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
        bodies: list[dict[str, object]] = []
        prompt_choice = self._prompt_choice()
        response_fields = self._format.head(self._choices[prompt_choice], stream=False)
        for choice in self._choices:
            (routing,) = await self._routing(choice, include_prompt_rows=choice.index == prompt_choice)
            self._note_rows(choice, routing)
            meta = {"meta_info": choice.meta_info()}  # in rows of form int32, too
            bodies.append({**self._format.full(choice), **self._format.finish(choice), **meta, **routing.choice})
            response_fields |= routing.response
        head = self._head(self._format.object_name)
        body = {**head, "choices": bodies, "usage": _usage(self._choices), **response_fields, **self._sglext()}
        body |= self._times()
        body |= self._choices[0].metadata()
        return json_response(body, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        head = self._format.head(self._choices[0], stream=True)
        for choice in self._choices:
            if (first := self._format.first_chunk(choice)) is not None:
                yield self._chunk(choice, first, ResponseRouting({}, head) if choice.index == 0 else None)
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            choice = self._choices[index]
            for chunk in await self._delta_chunks(choice, choice.to_delta(output)):
                yield chunk
        if extension := self._sglext():
            yield event({**self._head(self._format.chunk_name), "choices": [], **extension})
        if self._include_usage:
            head = self._head(self._format.chunk_name)
            yield event({**head, "choices": [], "usage": _usage(self._choices), **self._times()})

    async def _delta_chunks(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Return the chunks of one output: its text, rows that are streamed, the finish reason with the last rows."""
        routing: list[ResponseRouting] = []
        if choice.is_finished or (choice.request.routed_experts.stream and delta.token_ids):
            has_prompt_rows = not self._has_sent_prompt_rows and choice.sequence.num_tokens > 0
            routing = await self._routing(choice, include_prompt_rows=has_prompt_rows)
            self._has_sent_prompt_rows |= has_prompt_rows
        last = routing.pop() if choice.is_finished else None
        if last is not None and not choice.request.routed_experts.stream:
            self._note_rows(choice, last)
        chunks: list[bytes] = []
        bodies = self._format.chunks(choice, delta)
        ending = None if last is None else bodies.pop() if bodies else self._format.last_chunk(choice)
        for body in bodies:
            chunks.append(self._chunk(choice, body, routing.pop(0) if routing and not chunks else None))
        chunks += [self._chunk(choice, self._format.last_chunk(choice), part) for part in routing]
        if ending is not None and last is not None:
            meta = {"meta_info": choice.meta_info()}
            fields = ResponseRouting({**meta, **last.choice}, {**last.response, **choice.metadata()})
            chunks.append(self._chunk(choice, {**ending, **self._format.finish(choice)}, fields))
        return chunks

    async def _routing(self, choice: ChoiceState, *, include_prompt_rows: bool) -> list[ResponseRouting]:
        """Return the routing fields of a choice: one part, or several where streamed rows are large."""
        options, sequence = choice.request.routed_experts, choice.sequence
        if not options.enabled:
            return [ResponseRouting({}, {})]

        def render(rows: RoutedExperts) -> ResponseRouting:
            return routing_fields(
                rows,
                options,
                aborted=sequence.num_tokens == 0,
                url=ref_url(self._server.settings, self._options.request_id, choice.index),
                meta=choice.meta_info(),
                include_prompt_rows=include_prompt_rows,
            )

        return await self._render_rows(choice.index, render)

    def _note_rows(self, choice: ChoiceState, routing: ResponseRouting) -> None:
        """Keep the encoded rows of a choice in SGLang's form, for the place where its clients look."""
        rows = cast("dict[str, object]", routing.choice.get("meta_info", {})).get(PAYLOAD_KEY)
        if isinstance(rows, str) and choice.request.routed_experts.format == "int32":
            self._encoded_rows[choice.index] = rows

    def _sglext(self) -> dict[str, object]:
        """Return SGLang's field of a response: the rows of its choice; of several, a list with one entry a choice."""
        if not self._encoded_rows:
            return {}
        rows = [self._encoded_rows.get(choice.index) for choice in self._choices]
        return {"sglext": {"routed_experts": rows[0] if len(rows) == 1 else rows}}

    def _times(self) -> dict[str, object]:
        """Return vLLM's field of a response: times of the whole call, in milliseconds."""
        if not self._has_request_metrics or not self._first_token_s:
            return {}
        first_s, total_s = min(self._first_token_s.values()), time.monotonic() - self._start_time
        queue_s = max(choice.sequence.last.queue_s or 0.0 for choice in self._choices if choice.sequence.has_output)
        counts = [choice.num_tokens()[1] for choice in self._choices]
        times: dict[str, object] = {
            "time_to_first_token_ms": 1000 * first_s,
            "generation_time_ms": 1000 * (total_s - first_s),
            "queue_time_ms": 1000 * queue_s,
            "tokens_per_second": sum(counts) / total_s,
        }
        if max(counts) > 1:
            times["mean_itl_ms"] = 1000 * (total_s - first_s) / (max(counts) - 1)
        return {"metrics": times}

    def _head(self, name: str) -> dict[str, object]:
        model = self._server.model_name
        return {"id": self._options.request_id, "object": name, "created": self._created, "model": model}

    def _chunk(self, choice: ChoiceState, body: dict[str, object], routing: ResponseRouting | None = None) -> bytes:
        choice_fields, response_fields = ({}, {}) if routing is None else (routing.choice, routing.response)
        chunk: dict[str, object] = {
            **self._head(self._format.chunk_name),
            "choices": [{"finish_reason": None, **body, **choice_fields}],
            **response_fields,
        }
        if self._continuous_usage:
            chunk["usage"] = _usage(self._choices)
        elif self._include_usage:
            chunk["usage"] = None
        return event(chunk)


def completion_logprobs(entries: Sequence[LogprobEntry], *, offset: int, as_ids: bool) -> tuple[dict[str, object], int]:
    """Return logprobs in the form of /v1/completions. `offset`: characters before these tokens; the second value is the
    number of characters after them. `as_ids`: tokens are written by their ids.

    Texts are those of single tokens; a token that is part of a character has a replacement character."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(_text(entry.token))
    fields: dict[str, object] = {
        "tokens": [_text(entry.token, as_ids=as_ids) for entry in entries],
        "token_logprobs": [_logprob(entry.token) if entry.is_known else None for entry in entries],
        "top_logprobs": [_top_by_text(entry, as_ids=as_ids) for entry in entries],
        "text_offset": offsets,
    }
    return fields, offset


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[LogprobEntry], *, as_ids: bool) -> dict[str, object]:
    """Return logprobs in the form of /v1/chat/completions; the `bytes` of all tokens join to the text in UTF-8.
    `as_ids`: tokens are written by their ids."""

    def to_json(token: TokenLogprob) -> dict[str, object]:
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token.token_id)
        return {"token": _text(token, as_ids=as_ids), "logprob": _logprob(token), "bytes": list(raw)}

    content = [{**to_json(entry.token), "top_logprobs": [to_json(token) for token in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def _usage(choices: Sequence[ChoiceState]) -> dict[str, object]:
    """Return the tokens of a call; a prompt counts once, however many choices it has."""
    first = [choice for choice in choices if choice.request.choice == 0]
    prompt = sum(int(choice.request.input_ids.size) for choice in first)
    cached = sum(choice.num_tokens()[0] for choice in first)
    completion = sum(choice.num_tokens()[1] for choice in choices)
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(choice.request.prediction is not None for choice in choices):
        counts = [choice.draft_counts() for choice in choices]
        accepted = sum(count.predicted_accepted for count in counts)
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(count.predicted for count in counts) - accepted,
        }
    return usage


def _text(token: TokenLogprob, *, as_ids: bool = False) -> str:
    return f"token_id:{token.token_id}" if as_ids or token.text is None else token.text


def _logprob(token: TokenLogprob) -> float:
    return _LOWEST_LOGPROB if token.logprob is None else token.logprob


def _by_id(entry: LogprobEntry) -> dict[str, object]:
    """Return the token and the alternatives by their ids, with logprob, rank and text; the token comes first."""
    ranks = {token.token_id: index + 1 for index, token in enumerate(entry.top)}
    by_id: dict[str, object] = {}
    for token in (entry.token, *entry.top):
        fields = {"logprob": _logprob(token), "rank": ranks.get(token.token_id), "decoded_token": token.text}
        by_id.setdefault(str(token.token_id), fields)
    return by_id


def _top_by_text(entry: LogprobEntry, *, as_ids: bool) -> dict[str, float] | None:
    """Return the token itself, which comes first as with vLLM, and the alternatives by their text; of equal texts the
    best. None without a logprob."""
    if not entry.is_known:
        return None
    by_text: dict[str, float] = {}
    for token in (entry.token, *entry.top):
        text, logprob = _text(token, as_ids=as_ids), _logprob(token)
        by_text[text] = max(logprob, by_text.get(text, logprob))
    return by_text
