"""A choice of /v1 reports that it is not the model's own where it is not; each of its deltas takes the same work."""

import dataclasses
import tracemalloc

import pytest

from oracles.driver import request
from routed_experts.core.io_struct import FinishReason, Logprobs, TokenIDOut
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.server.anthropic.message_blocks import MessageWriter
from routed_experts.server.openai.choice_state import ChoiceState
from routed_experts.server.openai.completions import CompletionRenderer
from routed_experts.server.openai.logprobs import LogprobOptions
from routed_experts.server.openai.response_items import ResponseWriter


def output(num_tokens=1, *, finish_reason=None, exact=True, defers_experts=False):
    """The output of token `num_tokens` of the request "one"."""
    return TokenIDOut(
        rid="one",
        new_token_ids=(8,),
        output_logprobs=Logprobs(values=(-1.0,), top=(((-1.0, 8), (-2.0, 9)),)),
        input_logprobs=None,
        prompt_tokens=3,
        completion_tokens=num_tokens,
        cached_tokens=0,
        weight_version=WeightVersion(),
        finish_reason=finish_reason,
        return_routed_experts=False,
        routed_experts=None,
        exact=exact,
        defers_experts=defers_experts,
    )


LOGPROBS = LogprobOptions(enabled=True, top=2, prompt=None, as_ids=False, echo=False)


@pytest.mark.parametrize(("exact", "defers_experts"), [(True, False), (True, True), (False, True)])
def test_a_finish_reports_what_may_not_be_exact(exact, defers_experts):
    sequence = SequenceState(request("one", [5, 6, 7]).source, None, logprobs_mode="raw")
    choice = ChoiceState(0, sequence, echo=None, prompt_only=False, logprobs=LOGPROBS)
    reason = FinishReason(type="length", length=1)
    finished = output(finish_reason=reason, exact=exact, defers_experts=defers_experts)
    delta = choice.to_delta(sequence.update(finished))
    assert (delta.token_ids, choice.full().token_ids) == ((8,), (8,))
    fields = {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    assert choice.finish_fields() == fields | ({} if exact else {"exact": False})
    counts = {"rerouted_slots": 0, "dropped_slots": 0, "deferred_slots": None, "placement_epoch": None}
    changes = {"exact": exact, "mode": "defer", **counts} if defers_experts else {}
    assert choice.meta_info() == choice.weight_fields() | changes
    response, message = ResponseWriter("r", "tiny", {}, len), MessageWriter("m", "tiny", 3)
    for writer, in_last_event in ((response, "response.incomplete"), (message, "message_delta")):
        events = b"".join(writer.finish(sequence)).decode()
        assert writer.body().get("meta_info", {}) == changes
        (event,) = (text for text in events.split("\n\n") if text.startswith(f"event: {in_last_event}"))
        assert (f'"exact":{str(exact).lower()}' in event) is defers_experts


def test_a_delta_takes_the_same_memory_at_any_position():
    source = dataclasses.replace(request("one", [5, 6, 7]).source, return_logprob=True, top_logprobs_num=2)
    sequence = SequenceState(source, None, logprobs_mode="raw")
    choice = ChoiceState(0, sequence, echo=None, prompt_only=False, logprobs=LOGPROBS)
    response_format = CompletionRenderer(logprobs=LOGPROBS, token_ids=True)

    def peak_bytes(render):
        tracemalloc.start()
        try:
            render()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peaks = []
    for num_tokens in range(1, 2001):
        new = sequence.update(output(num_tokens))
        if num_tokens in (100, 2000):
            peaks.append(peak_bytes(lambda new=new: response_format.chunks(choice, choice.to_delta(new))))
        else:
            response_format.chunks(choice, choice.to_delta(new))
    early, late = peaks
    assert late < early + 500, (early, late)  # a copy of the token ids alone would be 15,200 bytes larger
    assert peak_bytes(choice.full) > 15_200
