"""Engine.stream: one prompt as RequestOutputs that come as it is generated. Knows no wire form: rows are arrays."""

import dataclasses
from collections.abc import AsyncIterator, Callable

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.requests.async_generation import AsyncGeneration
from routed_experts.engine.requests.outputs import CompletionOutput, RequestOutput, request_output

OUTPUT_KINDS = ("delta", "cumulative", "final")


def check_kind(kind: str) -> None:
    """Raise InvalidRequestError unless `kind` is one of OUTPUT_KINDS."""
    if kind not in OUTPUT_KINDS:
        raise InvalidRequestError(
            f"output_kind={short_repr(kind)} is unknown; choose one of {', '.join(OUTPUT_KINDS)}", param="output_kind"
        )


async def stream_outputs(
    open_call: Callable[[], AsyncGeneration], prompt: str | None, *, kind: str
) -> AsyncIterator[RequestOutput]:
    """Run the call of one prompt. Leaving early aborts it, as an error of one choice does."""
    call = open_call()
    told: dict[int, RequestOutput] = {}
    try:
        await call.accepted()
        async for index, _ in call.news():
            if kind == "final":
                continue
            before, now = told.get(index), request_output([call.answers[index]], prompt)
            told[index] = now
            yield now if kind == "cumulative" or before is None else _since(before, now)
        if kind == "final":
            yield request_output(call.answers, prompt)
    finally:
        call.close()


def _since(before: RequestOutput, now: RequestOutput) -> RequestOutput:
    """What one choice has added."""
    then, choice = before.outputs[0], now.outputs[0]
    added: CompletionOutput = dataclasses.replace(
        choice,
        text=choice.text[len(then.text) :],
        token_ids=choice.token_ids[len(then.token_ids) :],
        logprobs=None if choice.logprobs is None else choice.logprobs[len(then.logprobs or ()) :],
    )
    prompt_logprobs = now.prompt_logprobs if before.prompt_logprobs is None else None
    return dataclasses.replace(now, outputs=(added,), prompt_logprobs=prompt_logprobs)
