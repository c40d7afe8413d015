"""Qwen3-MoE: its config.json, that a program does not grow with depth, and facts of the module that need no oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.core.errors import ConfigError
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.routed_experts import expert_id_dtype
from routed_experts.execution.aot_programs import RunnerConfig, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.attention import ATTENTION_BACKENDS, causal_attention
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import weight_sources
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.families.qwen3_moe import read_qwen3_moe
from routed_experts.replay.forward import RoutedBatch, forward
from support.model_steps import tiny_model
from support.tiny_checkpoint import tiny_config

pytestmark = pytest.mark.usefixtures("fast_compilation")


def read(**overrides):
    return read_qwen3_moe(ConfigReader(tiny_config(**overrides), "config.json"))


def abstract(config, dtype=jnp.float32):
    """The module without memory: shapes alone."""
    return nnx.split(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=dtype)))


@pytest.mark.parametrize(
    ("keys", "moe_layers", "runs"),
    [
        (dict(mlp_only_layers=[]), (0, 1, 2, 3), ((0, 4),)),
        (dict(mlp_only_layers=[0]), (1, 2, 3), ((0, 1), (1, 4))),
        (dict(mlp_only_layers=[1, 2]), (0, 3), ((0, 1), (1, 3), (3, 4))),
        (dict(mlp_only_layers=[], decoder_sparse_step=2), (1, 3), ((0, 4),)),
        (dict(mlp_only_layers=[3], decoder_sparse_step=2), (1,), ((0, 1), (1, 2), (2, 4))),
        (dict(mlp_only_layers=[], decoder_sparse_step=3), (2,), ((0, 2), (2, 3), (3, 4))),
        (dict(mlp_only_layers=[0, 1, 2, 3]), (), ((0, 4),)),
        (dict(num_experts=0), (), ((0, 4),)),
        (dict(mlp_only_layers=None), (0, 1, 2, 3), ((0, 4),)),
    ],
)
def test_layers_are_dense_or_moe_as_the_config_says(keys, moe_layers, runs):
    config = read(**keys)
    sparse = tuple(index for index, layer in enumerate(config.layers) if isinstance(layer.feed, Sparse))
    assert (sparse, tuple((run.first, run.first + run.num_layers) for run in config.blocks)) == (moe_layers, runs)
    spec = config.capture_spec
    assert (spec is None) == (not moe_layers)
    if spec is not None:
        assert (spec.layer_ids, spec.num_hidden_layers, spec.num_experts, spec.top_k) == (moe_layers, 4, 16, 4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(num_experts_per_tok=17), ["num_experts_per_tok=17", "num_experts=16"]),
        (dict(num_experts_per_tok=0), ["num_experts_per_tok=0", "at least 1"]),
        (dict(num_key_value_heads=3), ["num_key_value_heads=3", "num_attention_heads=4"]),
        (dict(hidden_act="gelu"), ["hidden_act='gelu'", "silu"]),
        (dict(attention_bias=True), ["attention_bias=True", "false"]),
        (dict(use_sliding_window=True), ["use_sliding_window=True", "false"]),
        (dict(rope_scaling={"rope_type": "ntk", "factor": 4.0}), ["rope_type='ntk'", "yarn"]),
        (dict(rope_scaling={"partial_rotary_factor": 0.5}), ["partial_rotary_factor", "1.0"]),
        (dict(num_hidden_layers=0), ["num_hidden_layers=0"]),
        (dict(hidden_size="64"), ["hidden_size='64'", "integer"]),
        (dict(vocab_size=None), ["vocab_size", "missing"]),
        (dict(head_dim=15), ["head_dim=15", "even"]),
        (dict(decoder_sparse_step=0), ["decoder_sparse_step=0"]),
        (dict(norm_topk_prob="yes"), ["norm_topk_prob='yes'", "true or false"]),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_key_and_value(keys, words):
    with pytest.raises(ConfigError) as caught:
        read(**keys)
    assert all(word in str(caught.value) for word in ["config.json", *words]), str(caught.value)


def test_head_width_comes_from_the_config_or_from_the_hidden_size():
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=None).head_dim == 16


def test_narrow_id_types_follow_the_number_of_experts():
    for experts, dtype in ((256, np.uint8), (257, np.uint16)):
        assert read(num_experts=experts).capture_spec.dtype == expert_id_dtype(experts) == dtype


def lowered_forward(config, *, train):
    graphdef, state = abstract(config)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    spec = config.capture_spec
    flags = jax.ShapeDtypeStruct(tokens.shape, jnp.bool_)
    ids = jax.ShapeDtypeStruct((*tokens.shape, spec.num_moe_layers, spec.top_k), jnp.uint8)

    def run(state, tokens, routed):
        return forward(nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True, remat=train)

    def loss(state, tokens, routed):
        return jnp.sum(run(state, tokens, routed).logits)

    return jax.jit(jax.grad(loss) if train else run).lower(state, tokens, RoutedBatch(ids, flags, flags))


def lowered_step(config, *, capture):
    graphdef, state = abstract(config)
    pool = KVPoolSpec(
        num_layers=config.num_layers,
        num_pages=9,
        page_size=8,
        num_kv_heads=2,
        head_dim=16,
        dtype=jnp.dtype(jnp.float32),
    )
    backends = dict(kernels=Kernels(moe=MOE_BACKENDS["tiled"]), attention=ATTENTION_BACKENDS["paged"])
    spec = ProgramSpec(
        graphdef=graphdef, capture=config.capture_spec if capture else None, num_pages=9, raw_logprobs=False, **backends
    )
    shape = BatchShape(mode=ForwardMode.EXTEND, num_tokens=32, num_requests=4, table_width=4)
    runner = RunnerConfig(pool=pool, num_request_slots=5, shapes=(shape,), vocab_size=config.vocab_size)
    return lowerings(state, spec, runner)["forward", shape]()


LOWERED = {
    "training forward": functools.partial(lowered_forward, train=False),
    "training gradient": functools.partial(lowered_forward, train=True),
    "serving step": functools.partial(lowered_step, capture=False),
    "serving step with capture": functools.partial(lowered_step, capture=True),
}


@pytest.mark.parametrize("program", LOWERED)
@pytest.mark.parametrize("dense_first", [False, True])
def test_a_program_does_not_grow_with_depth(program, dense_first):
    """Lines of StableHLO: one for each operation, so 4 layers and 24 layers must be nearly the same."""
    only = [0] if dense_first else []
    lines = [
        len(LOWERED[program](read(num_hidden_layers=depth, mlp_only_layers=only)).as_text().splitlines())
        for depth in (4, 24)
    ]
    assert lines[0] > 100
    assert abs(lines[1] - lines[0]) < 0.05 * lines[0], lines


@pytest.fixture(scope="module")
def model():
    return FamilyDecoder(read(num_hidden_layers=3, mlp_only_layers=[1]), rngs=nnx.Rngs(0), dtype=jnp.float32)


def test_a_model_that_was_not_loaded_has_the_shapes_of_the_checkpoint_table(model):
    """Every value of every array comes from exactly one tensor of the table."""
    config, sizes = model.config, {}
    for source in weight_sources(config):
        sizes[source.target] = sizes.get(source.target, 0) + int(np.prod(source.shape))
    arrays = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert sizes == {name: int(np.prod(leaf.shape)) for name, leaf in arrays.items()}
    names = [source.name for source in weight_sources(config)]
    assert len(set(names)) == len(names)


def test_asking_for_the_ids_does_not_change_the_logits(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 313, (2, 9)), jnp.int32)
    run = nnx.jit(forward, static_argnames=("return_routed",))
    without, captured = run(model, tokens), run(model, tokens, return_routed=True)
    assert without.ids is None
    assert captured.ids.shape == (2, 9, 2, 4)
    assert np.array_equal(without.logits, captured.logits)
    assert without.logits.dtype == jnp.float32


def test_a_dense_model_has_no_ids(model):
    dense = FamilyDecoder(read(num_hidden_layers=2, num_experts=0), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    result = forward(dense, jnp.zeros((1, 3), jnp.int32), return_routed=True)
    assert result.ids is None
    assert result.logits.shape == (1, 3, 313) and result.logits.dtype == jnp.float32


def test_a_tied_head_is_the_embedding(model):
    tied = FamilyDecoder(read(tie_word_embeddings=True, num_hidden_layers=1), rngs=nnx.Rngs(0), dtype=jnp.float32)
    assert tied.head is None
    assert np.array_equal(tied.lm_head().columns, tied.embed[...].T)
    hidden = jnp.asarray(np.random.default_rng(1).standard_normal((3, 64)), jnp.float32)
    np.testing.assert_allclose(tied.logits(hidden), np.asarray(hidden) @ np.asarray(tied.embed[...]).T, atol=1e-5)
    assert model.head is not None and model.lm_head().columns.shape == (64, 313)


def test_streams_of_layers_come_in_the_order_and_as_often_as_they_are_named():
    model = tiny_model()
    tokens, positions = jnp.arange(6, dtype=jnp.int32), jnp.arange(6, dtype=jnp.int32)

    def attend(queries, keys, values, cache, layer, features=None):
        return causal_attention(queries[None], keys[None], values[None], None)[0], cache

    def streams(*layers):
        inputs = tokens, positions, jnp.ones(6, bool), attend, None, None
        return model.run_tapped(*inputs, kernels=Kernels(moe=MOE_BACKENDS["reference"]), tapped=layers)[3]

    single = {layer: streams(layer)[0] for layer in range(3)}
    assert not np.array_equal(single[0], single[1]) and np.asarray(single[2]).any()
    for layers in ((0, 1, 2), (2, 0), (1, 1, 2), (2, 0, 2)):
        for stream, layer in zip(streams(*layers), layers, strict=True):
            np.testing.assert_array_equal(stream, single[layer])
