"""An error about a field can be shown under another surface's name for that field."""

import pickle

import pytest

from routed_experts.core import errors as module
from routed_experts.core.errors import (
    PARAM,
    CaptureDisabledError,
    InvalidRequestError,
    PromptTooLongError,
    field_names,
    field_slot,
    prompt_index,
)


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


def test_every_slot_is_renamed_whatever_the_order_of_the_tables():
    error = InvalidRequestError(f"lower {PARAM} or raise {field_slot('most')}; fewest='most'", param="fewest")
    assert str(error) == "lower fewest or raise most; fewest='most'"
    renamed = error.with_names({"most": "max", "fewest": "min"}).with_names({"max": "largest", "most": "other"})
    assert (str(renamed), renamed.param) == ("lower min or raise largest; fewest='most'", "min")
    assert str(renamed.at_prompt(1, "input_ids")) == "input_ids[1]: lower min or raise largest; fewest='most'"


def test_the_field_of_the_prompt_has_an_index_and_a_name():
    error = InvalidRequestError(f"{PARAM} is empty", param="prompt").at_prompt(2, "prompt")
    assert (str(error), error.index) == ("prompt[2] is empty", 2)
    assert str(error.with_names({"prompt": "text"})) == "text[2] is empty"
    length = PromptTooLongError(f"{PARAM}=9 is too large", param="max_tokens").at_prompt(2, "prompt")
    named = length.with_names({"prompt": "text", "max_tokens": "max_new_tokens"})
    assert (str(named), named.param) == ("text[2]: max_new_tokens=9 is too large", "max_new_tokens")
    assert str(named.at_prompt(None)) == "max_new_tokens=9 is too large" and type(named) is PromptTooLongError


def test_which_errors_are_of_one_prompt():
    of_prompt = [InvalidRequestError("", param=param) for param in ("prompt", "input_ids", "text")]
    of_prompt += [PromptTooLongError("", param="max_tokens"), InvalidRequestError("", depends_on_prompt=True)]
    assert all(error.is_of_prompt and error.at_prompt(1).is_of_prompt for error in of_prompt)
    assert not InvalidRequestError("", param="rid").is_of_prompt and not CaptureDisabledError("").is_of_prompt


def test_an_error_without_another_name_or_index_stays_as_it_is():
    error = InvalidRequestError(f"{PARAM}=5", param="rid")
    for context in (field_names({"n": "choices"}), prompt_index(None, "prompt")):
        with pytest.raises(InvalidRequestError) as caught, context:
            raise error
        assert caught.value is error


def test_an_error_with_names_can_be_pickled():
    error = InvalidRequestError(f"{PARAM} or {field_slot('most')}", param="fewest").with_names({"most": "max"})
    copy = pickle.loads(pickle.dumps(error.at_prompt(1)))
    assert (str(copy), copy.param, copy.index) == ("prompt[1]: fewest or max", "fewest", 1)
    assert str(copy.with_names({"max": "largest"})) == "prompt[1]: fewest or largest"


ERRORS = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception)]
KEYWORDS = {"MemoryPlanError": {"ways": ({"max_total_tokens": 512}, {"tp_size": 2})}}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_comes_whole_from_another_process(kind):
    error = kind("what came, and what to do", **KEYWORDS.get(kind.__name__, {}))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.args, vars(copy)) == (kind, str(error), error.args, vars(error))
    assert (copy.code, copy.status) == (error.code, error.status)


def test_an_alignment_error_is_about_the_sample_of_another_index():
    error = module.RoutingAlignmentError(", token 3: no row", sample=1).at_sample(4)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.sample, str(copy.at_sample(0))) == (
        "sample 4, token 3: no row",
        4,
        "sample 0, token 3: no row",
    )
    whole = module.RoutingAlignmentError("routed holds none")
    assert whole.at_sample(2) is whole
