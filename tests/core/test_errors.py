"""An error about a field can be shown under another surface's name for that field."""

import pytest

from routed_experts.core.errors import PARAM, InvalidRequestError, PromptTooLongError


@pytest.mark.parametrize("kind", [InvalidRequestError, PromptTooLongError])
def test_an_error_is_renamed_in_its_slot_alone(kind):
    error = kind(f"{PARAM}={'rid {param}'!r} must be a rid", param="rid", code="of_its_own")
    assert str(error) == "rid='rid {param}' must be a rid"
    renamed = error.renamed("request_id")
    assert str(renamed) == "request_id='rid {param}' must be a rid"
    assert (type(renamed), renamed.param, renamed.code) == (kind, "request_id", "of_its_own")


def test_a_message_without_a_slot_is_unchanged():
    error = InvalidRequestError("send either text or ids of text", param="text").renamed("prompt")
    assert (str(error), error.param) == ("send either text or ids of text", "prompt")
