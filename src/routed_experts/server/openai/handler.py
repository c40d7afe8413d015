"""OpenAIHandler: one call of chat or text completions, which differ in their ResponseRenderer.

A stream has a first chunk, chunks of text, of which the last of each choice has the finish reason, and a chunk with the
usage if the request asks for it."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, cast

from starlette.responses import Response

from routed_experts.core.io_struct import TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.wire import PAYLOAD_KEY
from routed_experts.server.body import json_response
from routed_experts.server.generation_handler import GenerationHandler
from routed_experts.server.openai.choice_state import ChoiceState, Delta, usage_of
from routed_experts.server.openai.options import OpenAIOptions
from routed_experts.server.routing.response import ResponseRouting, ref_url, routing_fields
from routed_experts.server.sse import event
from routed_experts.server.state import ServerState


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
        renderer: ResponseRenderer,
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
        self._renderer = renderer
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

    async def _full_response(self) -> Response:
        async for index, output in self._generation.outputs():
            self._observe(index, output)
        bodies: list[dict[str, object]] = []
        response_fields = self._renderer.head(self._choices[self._prompt_choice()], stream=False)
        for choice in self._choices:
            (routing,) = await self._routing(choice)
            self._note_rows(choice, routing)
            meta = {"meta_info": choice.meta_info()}  # in rows of form int32, too
            bodies.append({**self._renderer.full(choice), **self._renderer.finish(choice), **meta, **routing.choice})
            response_fields |= routing.response
        head = self._head(self._renderer.object_name)
        body = {**head, "choices": bodies, "usage": usage_of(self._choices), **response_fields, **self._sglext()}
        body |= self._times()
        body |= self._choices[0].metadata()
        return json_response(body, headers=self._options.headers)

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        head = self._renderer.head(self._choices[0], stream=True)
        for choice in self._choices:
            if (first := self._renderer.first_chunk(choice)) is not None:
                yield self._chunk(choice, first, ResponseRouting({}, head) if choice.index == 0 else None)
        async for index, output in self._generation.outputs():
            self._observe(index, output)
            choice = self._choices[index]
            for chunk in await self._delta_chunks(choice, choice.to_delta(output)):
                yield chunk
        if extension := self._sglext():
            yield event({**self._head(self._renderer.chunk_name), "choices": [], **extension})
        if self._include_usage:
            head = self._head(self._renderer.chunk_name)
            yield event({**head, "choices": [], "usage": usage_of(self._choices), **self._times()})

    async def _delta_chunks(self, choice: ChoiceState, delta: Delta) -> list[bytes]:
        """Return the chunks of one output: its text, rows that are streamed, the finish reason with the last rows."""
        routing: list[ResponseRouting] = []
        if choice.is_finished or (choice.request.routed_experts.stream and delta.token_ids):
            routing = await self._routing(choice)
        last = routing.pop() if choice.is_finished else None
        if last is not None and not choice.request.routed_experts.stream:
            self._note_rows(choice, last)
        chunks: list[bytes] = []
        bodies = self._renderer.chunks(choice, delta)
        ending = None if last is None else bodies.pop() if bodies else self._renderer.last_chunk(choice)
        for body in bodies:
            chunks.append(self._chunk(choice, body, routing.pop(0) if routing and not chunks else None))
        chunks += [self._chunk(choice, self._renderer.last_chunk(choice), part) for part in routing]
        if ending is not None and last is not None:
            meta = {"meta_info": choice.meta_info()}
            fields = ResponseRouting({**meta, **last.choice}, {**last.response, **choice.metadata()})
            chunks.append(self._chunk(choice, {**ending, **self._renderer.finish(choice)}, fields))
        return chunks

    async def _routing(self, choice: ChoiceState) -> list[ResponseRouting]:
        """Return the routing fields of a choice: one part, or several where streamed rows are large."""
        options, sequence = choice.request.routed_experts, choice.sequence
        if not options.enabled:
            return [ResponseRouting({}, {})]
        prompt_rows_in = self._assign_prompt_rows(choice.index)

        def render(rows: RoutedExperts) -> ResponseRouting:
            return routing_fields(
                rows,
                options,
                aborted=sequence.num_tokens == 0,
                url=ref_url(self._server.settings, self._options.request_id, choice.index),
                meta=choice.meta_info(),
                prompt_rows_in=prompt_rows_in,
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
            **self._head(self._renderer.chunk_name),
            "choices": [{"finish_reason": None, **body, **choice_fields}],
            **response_fields,
        }
        if self._continuous_usage:
            chunk["usage"] = usage_of(self._choices)
        elif self._include_usage:
            chunk["usage"] = None
        return event(chunk)
