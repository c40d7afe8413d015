"""A choice of /v1 says that it is not the model's own where it is not, and says nothing of it elsewhere."""

import pytest

from oracles.driver import request
from routed_experts.core.io_struct import FinishReason, Logprobs, StrOut, TokenIDOut
from routed_experts.server.openai.choice_state import Choice


@pytest.mark.parametrize("exact", [True, False])
def test_an_ending_says_what_is_not_exact(exact):
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
    choice = Choice(0, source, echo=None, prompt_only=False)
    choice.take(StrOut(out=out, text="x"))
    assert choice.ending() == {"finish_reason": "length", "stop_reason": None} | ({} if exact else {"exact": False})
