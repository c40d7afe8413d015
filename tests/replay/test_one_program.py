"""Live is a replay in which no row is valid: the same operations in training, the same program in serving. So what they
round they round alike, whatever a compiler fuses."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts import Engine
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import RoutedBatch, Sample, align, forward
from support.engines import SMALL
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

SHAPE = (2, 12)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    opened = ModelFolder.open(
        write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, tokenizer=False)
    )
    return opened.config.capture_spec, *nnx.split(opened.load(jnp.dtype("bfloat16")))


def operations(parts, routed, **options):
    """How often each operation stands in the program of a step forward and back."""
    _, graphdef, state = parts

    def loss(state, tokens, routed):
        out = forward(nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True, **options)
        return jnp.mean(jax.nn.log_softmax(out.logits)), (out.ids, out.slot_miss)

    text = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(state, jnp.zeros(SHAPE, jnp.int32), routed).as_text()
    return collections.Counter(re.findall(r"(?:stablehlo|chlo)\.\w+", text))


@pytest.mark.parametrize(
    "options",
    [  # test_forward.py replays rows of segments in every run
        {},
        {"remat": True},
        pytest.param({"segment_ids": np.zeros(SHAPE, np.int32)}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_live_and_replayed_training_have_the_same_operations(parts, options):
    nothing = align([Sample(None, SHAPE[1], 1)] * SHAPE[0], layout="pad_right", seq_len=SHAPE[1], spec=parts[0])
    live, replayed = operations(parts, None, **options), operations(parts, nothing, **options)
    more, fewer = live - replayed, replayed - live
    assert not fewer and set(more) <= {
        "stablehlo.optimization_barrier",
        "stablehlo.constant",
        "stablehlo.broadcast_in_dim",
    }
    assert more["stablehlo.optimization_barrier"] == 1, "the rows that nobody gave are hidden from the compiler"


def test_live_rows_miss_nothing(parts):
    spec, graphdef, state = parts
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB_SIZE, SHAPE), jnp.int32)
    run = jax.jit(lambda state, routed: forward(nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True))
    live = run(state, None)
    assert live.slot_miss.shape == (*SHAPE, spec.num_moe_layers) and not np.any(live.slot_miss)
    flags = functools.partial(jnp.full, SHAPE)
    for ids, valid in ((live.ids, True), (255 - live.ids * 0, False)):
        again = run(state, RoutedBatch(ids, flags(valid), flags(False)))
        np.testing.assert_array_equal(again.logits, live.logits)
        np.testing.assert_array_equal(again.ids, live.ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_one_program_and_the_same_by_the_bit(tmp_path, dtype):
    """By the kernels that serve: live, on the rows that the live score gave, and on rows of which none is valid."""
    sequences = [np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist() for length in (40, 33, 9)]
    folder = write_tiny_checkpoint(tmp_path, tokenizer=False)
    with Engine(
        str(folder), dtype=dtype, skip_tokenizer_init=True, enable_return_routed_experts=True, **SMALL
    ) as engine:
        live = engine.score(sequences)
        programs = engine.scorer._programs._forward._cache_size()
        rows = [out.routed_experts for out in live]
        for records in (rows, [None] * 3, [rows[0], None, rows[2]]):
            for left, right in zip(live, engine.score(sequences, routed=records), strict=True):
                np.testing.assert_array_equal(left.logprobs, right.logprobs)
                assert left.routed_experts == right.routed_experts
        assert engine.scorer._programs._forward._cache_size() == programs
