"""A choice of /v1 reports that it is not the model's own where it is not, and has no such field elsewhere."""

import pytest

from oracles.driver import request
from routed_experts.core.io_struct import FinishReason, Logprobs, TokenIDOut
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.server.openai.handler import ChoiceState


@pytest.mark.parametrize("exact", [True, False])
def test_a_finish_reports_what_is_not_exact(exact):
    source = request("one", [5, 6, 7]).source
    out = TokenIDOut(
        rid="one",
        new_token_ids=(8,),
        output_logprobs=Logprobs(values=(-1.0,), top=(None,)),
        input_logprobs=None,
        prompt_tokens=3,
        completion_tokens=1,
        cached_tokens=0,
        weight_version=0,
        finish_reason=FinishReason(type="length", length=1),
        return_routed_experts=False,
        routed_experts=None,
        exact=exact,
    )
    sequence = SequenceState(source, None, logprobs_mode="raw")
    choice = ChoiceState(0, sequence, echo=None, prompt_only=False)
    delta = choice.to_delta(sequence.update(out))
    assert (delta.token_ids, choice.full().token_ids) == ((8,), (8,))
    fields = {"finish_reason": "length", "stop_reason": None}
    assert choice.finish_fields() == fields | ({} if exact else {"exact": False})
