"""Which padded shape a step takes, and that every shape it can take is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed_experts.core.buckets import Buckets
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(lambda sizes: tuple(sorted(sizes)))


@given(requests=SIZES, more_tokens=SIZES, data=st.data(), deterministic=st.booleans(), page_size=st.integers(1, 20))
def test_a_step_takes_the_smallest_compiled_shape_that_holds_it(requests, more_tokens, data, deterministic, page_size):
    tokens = tuple(requests[-1] + size for size in more_tokens)
    args = ServerArgs(
        precompile_bs_paddings=requests,
        precompile_token_paddings=tokens,
        deterministic=deterministic,
        page_size=page_size,
    )
    buckets = Buckets.from_args(args, context_length=50)
    num_requests = data.draw(st.integers(1, requests[-1]))
    num_tokens = data.draw(st.integers(num_requests, tokens[-1]))
    all_decode = num_tokens == num_requests
    shape = buckets.shape(num_tokens, num_requests, all_decode=all_decode)
    assert shape in buckets.all_shapes()
    mode, padded_tokens, padded_requests = shape
    assert padded_tokens >= num_tokens and padded_requests >= num_requests
    assert (mode is ForwardMode.DECODE) == (all_decode and not deterministic)
    same = [
        known
        for known in buckets.all_shapes()
        if known[0] is mode and known[1] >= num_tokens and known[2] >= num_requests
    ]
    assert shape == min(same, key=lambda known: known[1:])
    assert buckets.table_width * page_size >= 50 > (buckets.table_width - 1) * page_size


def test_deterministic_mode_has_one_shape():
    args = ServerArgs(deterministic=True, precompile_bs_paddings=(1, 8), precompile_token_paddings=(16, 64))
    assert Buckets.from_args(args, context_length=512).all_shapes() == ((ForwardMode.EXTEND, 64, 8),)


def test_shapes_are_few_and_each_is_named_once():
    args = ServerArgs(precompile_bs_paddings=(1, 8, 32), precompile_token_paddings=(64, 256))
    shapes = Buckets.from_args(args, context_length=512).all_shapes()
    assert len(shapes) == len(set(shapes)) == 5


def test_a_step_beyond_the_largest_shape_is_a_mistake_of_the_scheduler():
    buckets = Buckets.from_args(
        ServerArgs(precompile_bs_paddings=(4,), precompile_token_paddings=(16,)), context_length=64
    )
    with pytest.raises(StopIteration):
        buckets.shape(17, 2, all_decode=False)


@given(requests=SIZES, more_tokens=SIZES, prefill=st.integers(1, 90), data=st.data())
def test_no_shape_is_compiled_that_no_step_can_take(requests, more_tokens, prefill, data):
    """A step holds at most one token of every running request and the prefill limit of prompt tokens."""
    tokens = tuple(requests[-1] + size for size in more_tokens)
    limit = data.draw(st.sampled_from(("max_prefill_tokens", "chunked_prefill_size")))
    args = ServerArgs(precompile_bs_paddings=requests, precompile_token_paddings=tokens, **{limit: prefill})
    extend = Buckets.from_args(args, context_length=50).extend
    most = min(prefill, tokens[-1]) + requests[-1]
    assert extend == tokens[: len(extend)]
    assert extend[-1] >= most or extend == tokens
    assert len(extend) == 1 or extend[-2] < most
