"""A model that does not fit: the values that the error gives do make it fit, and are the nearest that do. Counted by
hand here."""

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from routed_experts.core.errors import ConfigError, MemoryPlanError
from routed_experts.core.server_args import ServerArgs
from routed_experts.execution.memory_demand import MAX_FRACTION, MemoryDemand, fitting_configs
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.memory.kv_pool import KVPoolSpec

STATE = DeltaShape(key_heads=2, value_heads=2, key_dim=8, value_dim=8, width=4)
SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted)


@st.composite
def demands(draw):
    requests = tuple(draw(SIZES))
    tokens = tuple(draw(SIZES.filter(lambda sizes: sizes[-1] >= requests[-1])))
    page = draw(st.sampled_from((1, 16, 64, 256)))
    maybe = st.one_of(st.none(), st.integers(page, 40_000))
    args = ServerArgs(
        precompile_bs_paddings=requests,
        precompile_token_paddings=tokens,
        max_running_requests=draw(st.one_of(st.none(), st.integers(1, requests[-1]))),
        max_prefill_tokens=draw(st.one_of(st.none(), st.integers(1, 300))),
        page_size=page,
        max_total_tokens=draw(maybe),
        context_length=draw(st.one_of(st.none(), st.integers(2, 40_000))),
        mem_fraction_static=draw(st.floats(0.05, 1.0)),
    )
    recurrent = draw(st.sampled_from((None, STATE)))
    model = KVPoolSpec(
        num_layers=draw(st.integers(1, 8)),
        num_pages=0,
        page_size=page,
        num_kv_heads=draw(st.integers(1, 4)),
        head_dim=16,
        dtype=jnp.dtype("bfloat16"),
        num_recurrent=0 if recurrent is None else 3,
        recurrent=recurrent,
        num_requests=args.running_limit + 1,
    )
    return MemoryDemand(
        args=args,
        model=model,
        weights=draw(st.integers(0, 10**8)),
        row_bytes=draw(st.integers(0, 4000)),
        vocab_size=draw(st.integers(1, 50_000)),
        context_length=args.context_length or 512,
        device=draw(st.integers(10**6, 2 * 10**8)),
    )


NO_FITTING_CONFIG = MemoryDemand(  # one request at a time in the smallest steps fits, but 299 tokens of a prompt do not
    args=ServerArgs(
        precompile_bs_paddings=(3,),
        precompile_token_paddings=(2, 300),
        page_size=64,
        context_length=385,
        mem_fraction_static=0.5,
    ),
    model=KVPoolSpec(
        num_layers=8,
        num_pages=0,
        page_size=64,
        num_kv_heads=4,
        head_dim=16,
        dtype=jnp.dtype("bfloat16"),
        num_recurrent=3,
        recurrent=STATE,
        num_requests=4,
    ),
    weights=0,
    row_bytes=1139,
    vocab_size=1,
    context_length=385,
    device=10**6,
)


def by_hand(demand, **change):
    """Would the model fit with these arguments: every term counted from its shapes."""
    args, model = dataclasses.replace(demand.args, **change), demand.model
    running, page = args.max_running_requests or max(args.batch_paddings), args.page_size
    most = min(args.max_prefill_tokens or 10**9, args.chunked_prefill_size or 10**9, max(args.token_paddings)) + running
    widest = next((size for size in args.token_paddings if size >= most), args.token_paddings[-1])
    widest = max(widest, *args.batch_paddings)
    if args.max_total_tokens is not None:
        pages = args.max_total_tokens // page
    else:
        pages = 1 if args.context_length is None else -(-args.context_length // page)
    state = dataclasses.replace(model, num_pages=1, num_requests=running + 1).state_bytes
    a_page = page * model.num_layers * 2 * model.num_kv_heads * 16 * 2
    whole = (
        demand.weights
        + (running + 1) * demand.vocab_size * 5
        + 2 * widest * demand.row_bytes
        + state
        + (pages + 1) * a_page
    )
    return whole <= int(demand.device * args.mem_fraction_static)


def one_step_back(name, value, demand):
    """The value next to an advised one, towards the given one."""
    page = demand.args.page_size
    steps = {"mem_fraction_static": -0.001, "max_running_requests": 1, "max_total_tokens": page, "context_length": page}
    return value + steps[name]


@settings(max_examples=80, deadline=None)
@given(demand=demands())
@example(demand=NO_FITTING_CONFIG)
def test_what_the_error_advises_fits_and_is_the_nearest_that_does(demand):
    assert demand.fits == by_hand(demand)
    assume(not demand.fits)
    with pytest.raises(MemoryPlanError) as excinfo:
        demand.require_fit()
    text, ways = str(excinfo.value), excinfo.value.ways
    assert ways == fitting_configs(demand) and "\n" not in text and len(text) <= 1024
    for way in ways:
        assert by_hand(demand, **way), way
        demand.with_flags(way).require_fit()
        assert all(f"{name}={value}" in text for name, value in way.items())
        name, value = next(reversed(way.items()))
        if len(way) == 1 and name in (
            "mem_fraction_static",
            "max_running_requests",
            "max_total_tokens",
            "context_length",
        ):
            back = one_step_back(name, value, demand)
            given_value = demand.args.running_limit if name == "max_running_requests" else getattr(demand.args, name)
            assert back == pytest.approx(given_value) or not by_hand(demand, **{name: back}), way
    if not ways:
        fraction = max(MAX_FRACTION, demand.args.mem_fraction_static)
        least = {"max_running_requests": 1, "max_prefill_tokens": 1, "mem_fraction_static": fraction}
        pool = {"max_total_tokens": demand.args.page_size} if demand.args.max_total_tokens else {}
        assert not by_hand(demand, **least, **pool, context_length=None)
        assert "no value of these flags makes room" in text


def test_every_flag_that_helps_is_named_once():
    sizes = {"precompile_bs_paddings": (1, 8, 256), "precompile_token_paddings": (512, 4096)}
    args = ServerArgs(**sizes, context_length=1024, mem_fraction_static=0.5)
    model = KVPoolSpec(
        num_layers=2, num_pages=0, page_size=16, num_kv_heads=2, head_dim=16, dtype=jnp.dtype("bfloat16")
    )
    demand = MemoryDemand(
        args=args,
        model=model,
        weights=30_000_000,
        row_bytes=2048,
        vocab_size=10_000,
        context_length=1024,
        device=118_000_000,
    )
    assert [next(iter(way)) for way in fitting_configs(demand)] == [
        "mem_fraction_static",
        "max_running_requests",
        "max_prefill_tokens",
    ]
    assert all(by_hand(demand, **way) for way in fitting_configs(demand))


def test_a_change_that_is_no_argument_is_no_way():
    args = ServerArgs()
    model = KVPoolSpec(num_layers=1, num_pages=0, page_size=16, num_kv_heads=1, head_dim=16, dtype=jnp.dtype("float32"))
    demand = MemoryDemand(
        args=args, model=model, weights=1, row_bytes=0, vocab_size=1, context_length=512, device=10**9
    )
    with pytest.raises(ConfigError):
        demand.with_flags({"page_size": 0})
