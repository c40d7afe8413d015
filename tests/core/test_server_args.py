"""Configuration is checked once, field by field, before anything is allocated."""

import dataclasses
import math

import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs

PADDINGS = ("precompile_bs_paddings", "precompile_token_paddings")
COUNTS = (
    "page_size",
    "max_queued_requests",
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
)
SWITCHES = [field.name for field in dataclasses.fields(ServerArgs) if field.type is bool]


def test_defaults_are_a_configuration():
    args = ServerArgs()
    assert (args.running_limit, args.prefill_limit) == (32, 1024)
    assert not args.enable_return_routed_experts


def test_no_field_can_be_patched():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerArgs().page_size = 4


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", math.inf, [8]])
def test_counts_are_integers_of_at_least_one(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerArgs(**{field: value})


@pytest.mark.parametrize("field", PADDINGS)
@pytest.mark.parametrize("value", [(), (0, 8), (-1, 64), (64, 64), (64, 32), (64.0,), (True,), ("64",), 64, [32, 64]])
def test_paddings_are_strictly_increasing(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerArgs(**{field: value})


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_switches_are_true_or_false(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerArgs(**{field: value})


@pytest.mark.parametrize("field", ["model_path", "revision", "tokenizer_path", "attention_backend", "moe_backend"])
@pytest.mark.parametrize("value", [5, ["x"], b"x", True])
def test_names_are_text(field, value):
    with pytest.raises(ConfigError, match=field):
        ServerArgs(**{field: value})


@pytest.mark.parametrize("value", [0.0, -0.1, 1.0001, math.nan, math.inf, True, "0.5", None])
def test_the_memory_fraction_is_above_0_and_at_most_1(value):
    with pytest.raises(ConfigError, match="mem_fraction_static"):
        ServerArgs(mem_fraction_static=value)


@pytest.mark.parametrize("value", [-1, 2**31, 2**63, True, "0", 0.0, None])
def test_the_random_seed_leaves_room_to_count_requests_within_an_int64(value):
    with pytest.raises(ConfigError, match="random_seed"):
        ServerArgs(random_seed=value)
    assert (ServerArgs(random_seed=2**31 - 1).random_seed << 32) < 2**63


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float64"), ("dtype", "int8"), ("dtype", None), ("logprobs_mode", "both"), ("logprobs_mode", 1)],
)
def test_an_unknown_word_is_refused_with_those_that_are_known(field, value):
    with pytest.raises(ConfigError, match=f"{field}=.* is unknown; choose one of"):
        ServerArgs(**{field: value})


@pytest.mark.parametrize("field", ["tp_size", "ep_size"])
@pytest.mark.parametrize("value", [0, -1, True, "1", 2.0, None])
def test_devices_are_counted_from_one(field, value):
    with pytest.raises(ConfigError, match=rf"{field}={value!r}( \(float\))? must be an integer of at least 1"):
        ServerArgs(**{field: value})


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (4, 2), (2, 4)])
def test_experts_are_dealt_out_to_all_devices_or_their_width_is(tp, ep):
    assert ServerArgs(tp_size=tp, ep_size=tp).ep_size == tp
    with pytest.raises(ConfigError, match=rf"ep_size={ep} must be 1 \(.*\) or tp_size={tp}"):
        ServerArgs(tp_size=tp, ep_size=ep)


def test_every_field_is_checked():
    """A field without a check would take any value."""
    for field in dataclasses.fields(ServerArgs):
        with pytest.raises(ConfigError, match=f"{field.name}=(<object|a object)"):
            ServerArgs(**{field.name: object()})


def test_paddings_follow_the_number_of_running_requests():
    assert ServerArgs(max_running_requests=9, precompile_bs_paddings=(1, 8)).batch_paddings == (1, 8, 9)
    assert ServerArgs(max_running_requests=8, precompile_bs_paddings=(1, 8)).batch_paddings == (1, 8)
    assert ServerArgs(max_running_requests=4, precompile_bs_paddings=(1, 8)).batch_paddings == (1, 8)
    for many in (64, 128, 256, 1024, 4096):
        args = ServerArgs(max_running_requests=many)
        assert args.running_limit == args.batch_paddings[-1] == many and args.token_paddings[-1] >= many


def test_tokens_of_a_step_hold_one_of_each_running_request():
    with pytest.raises(
        ConfigError, match=r"precompile_token_paddings=\(4,\) hold fewer tokens than 8 running requests"
    ):
        ServerArgs(precompile_bs_paddings=(1, 8), precompile_token_paddings=(4,))
    assert (
        ServerArgs(precompile_bs_paddings=(1, 8), precompile_token_paddings=(4,), max_running_requests=4).running_limit
        == 4
    )


@pytest.mark.parametrize(
    ("limits", "batch", "tokens"),
    [
        ({}, (1, 8, 32), (64, 256, 1024)),
        ({"max_running_requests": 64}, (1, 8, 32, 64), (64, 256, 1024)),
        ({"max_running_requests": 256}, (1, 8, 32, 128, 256), (64, 256, 1024)),
        ({"max_running_requests": 4}, (1, 4), (64, 256, 1024)),
        ({"max_running_requests": 2000}, (1, 8, 32, 128, 512, 2000), (64, 256, 1024, 2000)),
        ({"max_prefill_tokens": 8192}, (1, 8, 32), (64, 256, 1024, 4096, 8192)),
        ({"max_prefill_tokens": 8192, "chunked_prefill_size": 2048}, (1, 8, 32), (64, 256, 1024, 2048)),
        ({"max_prefill_tokens": 50}, (1, 8, 32), (64, 256, 1024)),
    ],
)
def test_paddings_that_are_not_given_follow_the_limits(limits, batch, tokens):
    args = ServerArgs(**limits)
    assert (args.batch_paddings, args.token_paddings) == (batch, tokens)
    assert args.running_limit == limits.get("max_running_requests", 32)
    explicit = dataclasses.replace(args, precompile_bs_paddings=batch, precompile_token_paddings=tokens)
    assert (explicit.batch_paddings, explicit.token_paddings) == (batch, tokens)


def test_a_pool_holds_one_page_at_least_and_a_context_two_tokens():
    with pytest.raises(ConfigError, match="max_total_tokens=15 must be an integer of at least 16"):
        ServerArgs(max_total_tokens=15, page_size=16)
    with pytest.raises(ConfigError, match="context_length=1 must be an integer of at least 2"):
        ServerArgs(context_length=1)


@pytest.mark.parametrize(
    ("kwargs", "limit"),
    [
        ({}, 1024),
        ({"chunked_prefill_size": 100}, 100),
        ({"chunked_prefill_size": 10_000}, 1024),
        ({"max_prefill_tokens": 50}, 50),
        ({"chunked_prefill_size": 40, "max_prefill_tokens": 50}, 40),
    ],
)
def test_a_step_takes_in_no_more_prompt_than_its_largest_padding(kwargs, limit):
    assert ServerArgs(**kwargs).prefill_limit == limit
