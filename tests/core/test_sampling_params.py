"""Every field's limits, both spellings, and errors that name the field and stay short."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.sampling_params import ALIASES, FIELDS, SamplingParams

HUGE = 10**6000

GOOD = [
    ("n", [1, 128]),
    ("temperature", [0, 0.0, 1, 1e-30, 2.5, np.float32(0.5)]),
    ("top_p", [1, 1.0, 1e-9]),
    ("top_k", [-1, 0, 1, 2**31 - 1, np.int64(4)]),
    ("min_p", [0, 1, 0.5]),
    ("seed", [0, 2**63 - 1]),
    ("stop", ["x", ["x"], ("a", "b"), ["y" * 256] * 16, []]),
    ("stop_token_ids", [[], [0, 5], (7,)]),
    ("max_tokens", [1, 10**6]),
    ("min_tokens", [0, 5]),
    ("logprobs", [0, 20]),
    ("prompt_logprobs", [0, 20]),
    ("presence_penalty", [-2, 2.0, 0]),
    ("frequency_penalty", [-2.0, 2]),
    ("repetition_penalty", [1, 0.5, 2.0]),
    ("logit_bias", [{}, {0: 100, 7: -100.0}, {i: 1.0 for i in range(1024)}]),
    ("routed_experts_start_len", [0, 9]),
    ("routed_experts_format", ["int32", "npy", "list", "ref"]),
    ("routed_experts_layers", ["all", "moe"]),
]
NOT_A_NUMBER = ["1", [1], {}, True, False, math.nan, math.inf, -math.inf, 1j, b"1", HUGE, -HUGE]
NOT_AN_INT = [*NOT_A_NUMBER, 1.0, 1.5]
BAD = [
    ("n", [*NOT_AN_INT, 0, -1, 129]),
    ("temperature", [*NOT_A_NUMBER, -0.1, 1e300]),
    ("top_p", [*NOT_A_NUMBER, 0, -0.5, 1.0001]),
    ("top_k", [*NOT_AN_INT, -2, 2**31]),
    ("min_p", [*NOT_A_NUMBER, -0.01, 1.01]),
    ("seed", [*NOT_AN_INT, -1, 2**63]),
    ("stop", ["", [""], ["ok", ""], "x" * 257, ["x"] * 17, [1], 5, {"a": 1}, [None], b"x", True]),
    ("stop_token_ids", [5, [-1], [1.0], [True], ["1"], [None], [2**31], list(range(1025)), "12"]),
    ("max_tokens", [*NOT_AN_INT, 0, -1, 2**31]),
    ("min_tokens", [*NOT_AN_INT, -1]),
    ("logprobs", [*NOT_AN_INT, -1, 21]),
    ("prompt_logprobs", [*NOT_AN_INT, -1, 21]),
    ("presence_penalty", [*NOT_A_NUMBER, -2.01, 2.01]),
    ("frequency_penalty", [*NOT_A_NUMBER, -2.01, 2.01]),
    ("repetition_penalty", [*NOT_A_NUMBER, 0, -1, 1e-300, 1e300]),
    (
        "logit_bias",
        [[], 5, {-1: 1.0}, {1: 101}, {1: math.nan}, {1: True}, {1: None}, {True: 1.0}, {1.0: 1.0}, {"x": 1}],
    ),
    ("logit_bias", [dict.fromkeys(range(1025), 0)]),
    *((name, [0, 1, "true", [True]]) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")),
    *((name, [0, 1, "true", [True]]) for name in ("detokenize", "return_routed_experts")),
    ("routed_experts_start_len", [*NOT_AN_INT, -1]),
    ("routed_experts_format", ["int16", "", 1, True, ["npy"], "NPY"]),
    ("routed_experts_layers", ["some", 0, type]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in GOOD for value in values], ids=short_repr
)
def test_good_values_are_unchanged_and_resolve(field: str, value: object) -> None:
    params = SamplingParams.from_dict({field: value})
    assert dataclasses.replace(SamplingParams(), **{field: value}) == params
    params.resolve()


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD for value in values], ids=short_repr
)
def test_bad_values_are_refused_by_name_in_one_short_line(field: str, value: object) -> None:
    for build in (lambda: SamplingParams(**{field: value}), lambda: SamplingParams.from_dict({field: value})):
        with pytest.raises(InvalidRequestError) as caught:
            build()
        assert caught.value.param == field
        assert str(caught.value).startswith(f"{field} is ")
        assert len(str(caught.value)) <= 400 and "\n" not in str(caught.value)


def test_an_error_names_the_value_the_expected_value_and_the_fix() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^max_tokens is 0, but must be an integer in 1\.\.2147483647; .*engine\.score"
    ):
        SamplingParams(max_tokens=0)
    with pytest.raises(
        InvalidRequestError, match=r"^top_p is 0\.0, but must be a finite number in \(0, 1\]; .*temperature to 0"
    ):
        SamplingParams(top_p=0.0)
    with pytest.raises(InvalidRequestError, match=r"^seed is -1, .*leave it out"):
        SamplingParams(seed=-1)


def test_min_tokens_does_not_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(InvalidRequestError, match="at most max_tokens, 4") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


_VALUES = {"no_stop_trim": True, "guided_json": "{}", "guided_regex": "a", "guided_grammar": 'root ::= "a"'}
_OTHERS = {"no_stop_trim": False, "guided_json": "true", "guided_regex": "b", "guided_grammar": 'root ::= "b"'}


@pytest.mark.parametrize(("alias", "field"), ALIASES.items())
def test_sglang_names_mean_the_same(alias: str, field: str) -> None:
    value = _VALUES.get(alias, 3)
    assert SamplingParams.from_dict({alias: value}) == SamplingParams.from_dict({field: value, alias: None})
    assert SamplingParams.from_dict({alias: value, field: value}) == SamplingParams.from_dict({field: value})
    other = _OTHERS.get(alias, 4)
    with pytest.raises(InvalidRequestError, match=f"{alias}.*{field}|{field}.*{alias}"):
        SamplingParams.from_dict({field: value, alias: other})


def test_two_spellings_that_differ_in_type_disagree() -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams.from_dict({"max_tokens": 1, "max_new_tokens": True})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topk", "top_k"),
        ("return_routed_expert", "return_routed_experts"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"did you mean {nearest}\\?") as caught:
        SamplingParams.from_dict({key: None})
    assert caught.value.param == key


@pytest.mark.parametrize("key", ["qqqq", "", "x" * 10**6, "a\nb", 5, None, HUGE, "\ud800"], ids=short_repr)
def test_a_strange_name_is_refused_in_one_short_line(key: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.from_dict({key: 1})
    message = str(caught.value)
    assert len(message.encode()) <= 1000 and "\n" not in message


@pytest.mark.parametrize("values", [None, [], "n=1", 5])
def test_what_is_not_a_dict_is_refused(values: object) -> None:
    with pytest.raises(InvalidRequestError, match="a dict of sampling parameters"):
        SamplingParams.from_dict(values)


def test_null_means_unset() -> None:
    assert SamplingParams.from_dict(dict.fromkeys([*FIELDS, *ALIASES])) == SamplingParams()
    assert all(value is None for value in dataclasses.asdict(SamplingParams()).values())


def test_json_keys_of_a_logit_bias_are_token_ids() -> None:
    assert SamplingParams.from_dict({"logit_bias": {"50256": -100, "7": 1}}).logit_bias == {50256: -100, 7: 1}
    for biases in ({"-1": 1}, {"1.0": 1}, {" 1": 1}, {"٣": 1}, {"9" * 5000: 1}, {"7": 1, "07": 2}, {"7": 1, 7: 1}):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams.from_dict({"logit_bias": biases})
        assert caught.value.param == "logit_bias"


def test_resolve_fills_every_unset_value_with_a_neutral_one() -> None:
    resolved = SamplingParams().resolve(default_max_tokens=16, default_seed=42)
    assert (resolved.n, resolved.max_tokens, resolved.min_tokens, resolved.seed) == (1, 16, 0, 42)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (1.0, 0, 1.0, 0.0)
    assert not (resolved.is_greedy or resolved.is_filtered or resolved.is_penalized)
    assert (resolved.stop, resolved.stop_token_ids, resolved.logit_bias) == ((), (), ())
    assert (
        resolved.skip_special_tokens
        and resolved.detokenize
        and not resolved.include_stop_str_in_output
        and not resolved.ignore_eos
    )
    assert resolved.logprobs is None and resolved.prompt_logprobs is None


def test_resolve_keeps_values_as_plain_types() -> None:
    kwargs = {"temperature": 1, "top_k": -1, "seed": np.int64(2**40 + 3), "stop": "end", "max_tokens": 9, "logprobs": 0}
    params = SamplingParams(**kwargs, stop_token_ids=[np.int32(4)], logit_bias={5: 1})
    resolved = params.resolve(default_max_tokens=16, default_seed=42)
    assert (resolved.top_k, resolved.stop, resolved.stop_token_ids, resolved.max_tokens, resolved.logprobs) == (
        0,
        ("end",),
        (4,),
        9,
        0,
    )
    assert (
        type(resolved.temperature) is float and type(resolved.seed) is int and type(resolved.stop_token_ids[0]) is int
    )
    assert resolved.seed_words == (2**8, 3)
    assert resolved.logit_bias == ((5, 1.0),) and type(resolved.logit_bias[0][1]) is float


def test_a_false_value_is_not_unset() -> None:
    resolved = SamplingParams(temperature=0, skip_special_tokens=False, detokenize=False, seed=0).resolve(
        default_seed=9
    )
    assert resolved.is_greedy and not resolved.skip_special_tokens and not resolved.detokenize and resolved.seed == 0
    assert not SamplingParams(temperature=0, top_k=5).resolve().is_filtered
    assert (
        SamplingParams(min_p=0.1).resolve().is_filtered
        and SamplingParams(repetition_penalty=1.1).resolve().is_penalized
    )


def test_params_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2


def test_the_module_loads_without_jax_or_numpy() -> None:
    code = "import sys, routed_experts.core.sampling_params; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
