"""The programs of a step that is cut at its experts, through the real TPU compiler: the pool is updated in place, and a
layer's programs copy neither the pool nor the residents' table. Proves no value and no time."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.offload.offload_programs import OffloadSpec, home_step, layer_step, open_step
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.families.qwen3_moe_config import read_qwen3_moe_parts
from routed_experts.models.offload.layers import LayerGroup, LayerIndexArrays
from support.tpu_aot import assert_in_place, compile_tpu, pool_copies, tpu_mesh
from support.tpu_programs import SMALL

pytestmark = pytest.mark.tpu_aot

EXPERTS, RESIDENT, LAYERS = 64, 32, 4
CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=512,
    moe_intermediate_size=1024,
    num_experts=EXPERTS,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    max_position_embeddings=2048,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
KIND = LayerGroup(run=0, index=0)
MIB = 1 << 20


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@functools.cache
def programs(mode):
    """Each program of a layer in the decode step (0) or the extend step (1): as a function, the shapes that it takes,
    what it is given for good."""
    config = read_qwen3_moe_parts(ConfigReader(CONFIG, Path("config.json")))
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), config.needs, platform="tpu")
    spec = OffloadSpec(
        config=config,
        capture=config.capture_spec,
        kernels=kernels,
        attention=attention,
        host_experts=MOE_BACKENDS["tiled"],
        num_pages=SMALL.runner.pool.num_pages,
        num_moe_layers=LAYERS,
        num_experts=EXPERTS,
        num_resident=RESIDENT,
    )
    step = {"spec": spec, "shape": SMALL.runner.shapes[mode]}
    state = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(jnp.bfloat16))))[1]
    flat = {path[-1]: shape(*leaf.shape) for path, leaf in nnx.to_flat_state(state) if path[0] == "blocks"}
    arrays = {name: leaf for name, leaf in flat.items() if name not in ("gate_up", "down")}
    table = ExpertTable(*(shape(LAYERS * RESIDENT, *flat[name].shape[1:]) for name in ("gate_up", "down")))
    numbers = LayerIndexArrays(*[shape(dtype=jnp.int32)] * 3)
    last, words = shape(SMALL.runner.num_request_slots, dtype=jnp.int32), step["shape"].packed
    stream, _, _ = jax.eval_shape(functools.partial(open_step, **step), shape(8192, 256), last, words)
    given = (shape(*stream.x.shape, dtype=jnp.float32),) * 2
    layer = functools.partial(layer_step, **step, kind=KIND)
    args = (stream, SMALL.runner.pool.abstract, arrays, numbers, words, given, shape(LAYERS, EXPERTS, dtype=jnp.int32))
    errand = jax.eval_shape(layer, *args)[1]
    return {
        "layer": (layer, args, (0, 1)),
        "home": (functools.partial(home_step, **step, kind=KIND), (table, arrays, numbers, words, errand), ()),
    }


@pytest.mark.parametrize("name", ["layer", "home"])
@pytest.mark.parametrize(("mode", "chip"), [(0, "v5e"), (1, "v6e")], ids=["decode on v5e", "extend on v6e"])
def test_a_layer_copies_neither_pool_nor_table(name, mode, chip):
    program, args, donated = programs(mode)[name]
    compiled = compile_tpu(program, *args, mesh=tpu_mesh(chip), donate_argnums=donated)
    if name == "layer":
        assert_in_place(compiled, SMALL.runner.pool.abstract, 4 * MIB)
    else:
        assert not pool_copies(compiled, args[0].gate_up) and not pool_copies(compiled, args[0].down)
        assert compiled.memory_analysis().temp_size_in_bytes <= MIB  # a layer's residents are 48
