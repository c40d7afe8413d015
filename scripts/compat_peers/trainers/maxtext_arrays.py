"""MaxText's choice of experts, on our ids: given ones run, and a slot of -1 runs no expert."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_peers.trainers.arrays import EXPERTS, TOP_K, functions, record
from routed_experts import formats

FILES = ("src/maxtext/layers/moe.py", "maxtext/layers/moe.py")
BLOCKS = SimpleNamespace(DEEPSEEK=0, DEEPSEEK4=1, GEMMA4=2, LLAMA4=3, MIXTRAL=4)


@pytest.fixture(scope="module")
def get_topk():
    types = SimpleNamespace(DecoderBlockType=BLOCKS)
    found = functions(*FILES, names=("valid_expert_mask", "get_topk"), jax=jax, jnp=jnp, ctypes=types)
    config = SimpleNamespace(
        decoder_block=BLOCKS.MIXTRAL, model_name="mixtral", norm_topk_prob=True, use_random_routing=False
    )
    layer = SimpleNamespace(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        dtype=jnp.float32,
        is_hash_routing=False,
        per_expert_scale=None,
        config=config,
    )
    return lambda logits, forced: found["get_topk"](layer, logits, None, forced_routed_experts=forced)


def test_given_experts_run_with_the_router_s_own_weights(get_topk):
    rows = formats.maxtext.encode(record(9))[None]  # [B, S, M, K]
    logits = jax.random.normal(jax.random.key(0), (1, 9, EXPERTS))
    weights, ids = get_topk(logits, jnp.asarray(rows[:, :, 0]))
    given = rows[0, :-1, 0]
    scores = np.take_along_axis(np.asarray(jax.nn.softmax(logits, -1))[0, :-1], given, -1)
    assert np.array_equal(ids[0, :-1], given)
    assert np.allclose(weights[0, :-1], scores / scores.sum(-1, keepdims=True), atol=1e-6)
    assert not weights[0, -1].any(), "the last token has no row: no expert"


def test_a_slot_of_minus_one_has_no_weight_and_is_not_left_to_the_router(get_topk):
    logits = jax.random.normal(jax.random.key(1), (1, 1, EXPERTS))
    weights, _ = get_topk(logits, jnp.asarray([[[7, 3, 11, -1]]]))
    assert weights[0, 0, 3] == 0 and np.isclose(weights.sum(), 1)
