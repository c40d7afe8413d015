"""The ids of the requests of a call: of each choice of each prompt."""

import collections
import itertools
import secrets
from collections.abc import Sequence

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.request_id import REQUEST_ID, REQUEST_ID_RULE
from routed_experts.engine.requests.prompt_lists import PromptCalls


def request_ids(
    request: GenerateReqInput, split: PromptCalls, counts: Sequence[int]
) -> list[tuple[str, str, list[str]]]:
    """For each prompt the id of the call, or its own in a list of ids; the id of its group, which is no request id; and
    the ids of its choices. One id for the call is followed by the number of the sequence, where there are several; an
    id of a prompt by the number of the choice. Raises InvalidRequestError where two prompts would share an id."""
    for index, rid in enumerate(request.rid if isinstance(request.rid, list | tuple) else [request.rid]):
        if rid is not None and (not isinstance(rid, str) or not REQUEST_ID.fullmatch(rid)):
            text = f"{PARAM}={short_repr(rid)} must be {REQUEST_ID_RULE}; change it"
            raise split.error_at(InvalidRequestError(text, param="rid"), index)
    if isinstance(request.rid, list | tuple):
        ids = ((str(call.rid), n) for call, n in zip(split.calls, counts, strict=True))
        prompts = [(rid, f"{rid}/", [rid] if n == 1 else [f"{rid}-{choice}" for choice in range(n)]) for rid, n in ids]
        counts_of_ids = collections.Counter(itertools.chain(*({rid, *rids} for rid, _, rids in prompts)))
        if repeated := next((rid for rid, count in counts_of_ids.items() if count > 1), None):
            text = f"Duplicate request ID: {PARAM} and the number of a choice make {repeated!r} twice; choose other ids"
            raise InvalidRequestError(text, param="rid", code="duplicate_request_id")
        return prompts
    call_id = request.rid if isinstance(request.rid, str) else secrets.token_hex(8)
    firsts = itertools.accumulate(counts, initial=0)
    return [
        (
            call_id,
            f"{call_id}/{index}",
            [call_id] if sum(counts) == 1 else [f"{call_id}-{first + choice}" for choice in range(n)],
        )
        for index, (first, n) in enumerate(zip(firsts, counts, strict=False))
    ]
