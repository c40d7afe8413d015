"""A model that does not fit: the values that the error gives do make it fit, and are the nearest that do. Counted by
hand here."""

import dataclasses

import jax.numpy as jnp
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from routed_experts.core.errors import ConfigError, MemoryPlanError
from routed_experts.core.server_args import ServerArgs
from routed_experts.execution.memory_demand import MAX_FRACTION, DraftDemand, MemoryDemand, fitting_configs
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
        num_drafts=draw(st.sampled_from((0, 0, 1, 3, 7))),
        draft=draw(st.sampled_from((DraftDemand(), DraftDemand(weights=300_000, bytes_per_token=96)))),
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
    num_drafts = change.pop("speculative_num_draft_tokens", demand.num_drafts + 1) - 1
    args, model = dataclasses.replace(demand.args, **change), demand.model
    running, page = args.max_running_requests or max(args.batch_paddings), args.page_size
    most = min(args.max_prefill_tokens or 10**9, args.chunked_prefill_size or 10**9, max(args.token_paddings)) + running
    widest = next((size for size in args.token_paddings if size >= most), args.token_paddings[-1])
    verified = max(args.batch_paddings) * (num_drafts + 1) if num_drafts else 0  # rows of the largest verify step
    widest = max(widest, verified, *args.batch_paddings)
    if args.max_total_tokens is not None:
        pages = args.max_total_tokens // page
    else:
        pages = 1 if args.context_length is None else -(-args.context_length // page)
    state = dataclasses.replace(model, num_pages=1, num_requests=running + 1).state_bytes
    inputs = model.input_bytes(verified) if verified else 0
    a_page = page * (model.num_layers * 2 * model.num_kv_heads * 16 * 2 + demand.draft.bytes_per_token)
    whole = (
        demand.weights
        + (running + 1) * demand.vocab_size * 5
        + 2 * widest * demand.row_bytes
        + verified * demand.vocab_size * (4 + 4 + 1)  # scores, noise, new counts
        + inputs
        + state
        + demand.draft.weights
        + (pages + 1) * a_page
    )
    return whole <= int(demand.device * args.mem_fraction_static)


def one_step_back(name, value, demand):
    """The value next to an advised one, towards the given one."""
    page = demand.args.page_size
    steps = {"mem_fraction_static": -0.001, "max_running_requests": 1, "max_total_tokens": page, "context_length": page}
    steps["speculative_num_draft_tokens"] = 1
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
            "speculative_num_draft_tokens",
        ):
            back = one_step_back(name, value, demand)
            limits = {
                "max_running_requests": demand.args.running_limit,
                "speculative_num_draft_tokens": demand.num_drafts + 1,
            }
            given_value = limits[name] if name in limits else getattr(demand.args, name)
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_drafts_that_do_not_fit_are_named_and_fewer_are_advised(deterministic):
    """Every term of drafts, in bytes; two drafts fit, and three do not. In deterministic mode a verify step has as many
    tokens as all steps, so that fewer drafts are fewer scores there, too."""
    sizes = {"precompile_bs_paddings": (64,), "precompile_token_paddings": (512,), "context_length": 256}
    args = ServerArgs(**sizes, mem_fraction_static=MAX_FRACTION, deterministic=deterministic)
    model = KVPoolSpec(
        num_layers=2, num_pages=0, page_size=16, num_kv_heads=2, head_dim=16, dtype=jnp.dtype("bfloat16")
    )
    vocab_size, weights, draft = 50_000, 3 << 30, DraftDemand(weights=5 << 20, bytes_per_token=4096)
    kv, kv_of_draft = (17 * 16 * bytes_per_token for bytes_per_token in (2 * 2 * 2 * 16 * 2, 4096))
    rest = weights + 65 * vocab_size * 5 + draft.weights + kv + kv_of_draft
    scores = {k: 64 * (k + 1) * vocab_size * 9 for k in (2, 3)}
    demand = MemoryDemand(
        args=args,
        model=model,
        weights=weights,
        row_bytes=0,
        vocab_size=vocab_size,
        context_length=256,
        device=int((rest + (scores[2] + scores[3]) // 2) / MAX_FRACTION),
        num_drafts=3,
        draft=draft,
    )
    with pytest.raises(MemoryPlanError) as caught:
        demand.require_fit()
    text = str(caught.value)
    assert {"speculative_num_draft_tokens": 3} in caught.value.ways
    assert "it fits with " in text and "speculative_num_draft_tokens=3" in text
    demand.with_flags({"speculative_num_draft_tokens": 3}).require_fit()
    for name, count in (
        ("weights of the draft model", draft.weights),
        ("scores of verify steps", scores[3]),
        ("KV of the draft model", kv_of_draft),
    ):
        unit = 1 << 20
        assert f"{name} {count / unit:.1f} MiB" in text, (name, text)


def test_a_change_that_is_no_argument_is_no_way():
    args = ServerArgs()
    model = KVPoolSpec(num_layers=1, num_pages=0, page_size=16, num_kv_heads=1, head_dim=16, dtype=jnp.dtype("float32"))
    demand = MemoryDemand(
        args=args, model=model, weights=1, row_bytes=0, vocab_size=1, context_length=512, device=10**9
    )
    with pytest.raises(ConfigError):
        demand.with_flags({"page_size": 0})
