"""The programs of four chips, through the real TPU compiler: pages and weights are in place on each, temporaries are
bounded, and the devices meet where they must and nowhere else. Proves no value (tests/engine/test_devices.py) and no
time."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import lowerings
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.spmd import MeshSpecs
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.sharding import AXIS, DATA_AXIS, ModelSharding
from routed_experts.models.decoder.decoder import FamilyDecoder
from support.tpu_aot import assert_in_place, tpu_devices, tpu_mesh, without_compilation_cache
from support.tpu_programs import SMALL, program_name, whole_pool_operations

pytestmark = pytest.mark.tpu_aot

# Programs of families are compiled for a v6e in every run.
CHIPS, MIB = ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)], 1 << 20
KINDS = {"width": False, "experts": True}  # the sharded arrays of the experts
# One kv head a chip, or two where two chips are a data rank: pages of 150 MiB on each, more than its VMEM.
POOLS = {
    1: dataclasses.replace(SMALL.runner.pool, num_kv_heads=1, num_pages=1200),
    2: dataclasses.replace(SMALL.runner.pool, num_kv_heads=2, num_pages=600),
}
POOL = POOLS[1]
MAX_TEMP_BYTES = 6 * MIB


@functools.cache
def jobs(chip, kind, ranks=1):
    """The runner's table for a mesh of four chips, which are so many data ranks."""
    parallel, pool = ParallelConfig(4, expert_parallel=KINDS[kind], data=ranks), POOLS[ranks]
    partitions = SMALL.config.partitions(by_expert=parallel.expert_parallel)
    shards = ModelSharding.create(partitions, parallel, devices=tuple(tpu_devices(chip)))
    assert shards.mesh == mesh_of(chip, ranks)
    state = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(SMALL.config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))[1]
    part = SMALL.config.shard(parallel)
    graphdef = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(part, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))[0]
    weights = nnx.from_flat_state(
        [(path, leaf.replace(global_array(shards, path, leaf))) for path, leaf in nnx.to_flat_state(state)]
    )
    args = ServerArgs(enable_return_routed_experts=True, tp_size=4, ep_size=4 if KINDS[kind] else 1, dp_size=ranks)
    kernels, attention = DEFAULT_BACKENDS.choose(args, platform="tpu")
    assert (kernels.moe.name, kernels.linear.name, attention.name) == ("tpu",) * 3
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=SMALL.config.capture_spec,
        kernels=kernels,
        attention=attention,
        num_pages=pool.num_pages,
        raw_logprobs=False,
        mesh_specs=MeshSpecs.create(shards.mesh, jax.tree.leaves(weights), pool),
    )
    return lowerings(weights, spec, dataclasses.replace(SMALL.runner, pool=pool, num_request_slots=33))


def mesh_of(chip, ranks):
    """The mesh of four chips."""
    if ranks == 1:
        return tpu_mesh(chip, (4,), (AXIS,))
    return tpu_mesh(chip, (ranks, 4 // ranks), (DATA_AXIS, AXIS))


def global_array(shards, path, leaf):
    name = ".".join(map(str, path))
    return jax.ShapeDtypeStruct(
        shards.global_shape(name, leaf.shape), leaf.dtype, sharding=shards.sharding(name, len(leaf.shape))
    )


@functools.cache
def compiled(chip, kind, name, ranks=1):
    [job] = [job for key, job in jobs(chip, kind, ranks).items() if program_name(key) == name]
    with jax.sharding.use_abstract_mesh(mesh_of(chip, ranks).abstract_mesh), without_compilation_cache():
        return job().compile()


def meetings(program):
    """Collectives in the text, each counted once; the body of a loop over layers is one layer's."""
    return Counter(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text() or ""))


def rarely(*values):
    """A case of scripts/thorough: each of its values is also in a case that runs always."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("width", "forward decode"),
        ("experts", "forward decode"),
        ("width", "forward extend"),
        rarely("experts", "forward extend"),
    ],
)
def test_pages_are_in_place_on_every_chip_and_two_sums_are_made_in_a_layer_and_one_behind_them(chip, kind, name):
    program = compiled(chip, kind, name)
    assert_in_place(program, POOL.abstract, max_temp_bytes=MAX_TEMP_BYTES)
    assert whole_pool_operations(program, POOL.abstract) == []
    runs = len(SMALL.config.blocks)
    reason = "after attention and after the experts; embeddings are joined, and scores of the vocabulary summed once"
    assert meetings(program) == {"all-gather": 1, "all-reduce": 2 * runs + 1}, reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_chip_holds_a_quarter_of_what_layers_and_head_need(kind):
    memory = compiled("v5e", kind, "forward decode").memory_analysis()
    state = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(SMALL.config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)))[1]
    weights = sum(leaf.size * 2 for leaf in jax.tree.leaves(state))
    pages = POOL.abstract.size * 2
    assert weights / 4 <= memory.argument_size_in_bytes - pages <= 1.05 * weights / 4


def test_scores_of_a_prompt_are_summed_once():
    assert meetings(compiled("v5e", "width", "score")) == {"all-reduce": 1}


@pytest.mark.parametrize("name", ["sample greedy", "sample full", "count extend"])
def test_a_token_is_chosen_on_every_chip_by_itself(name):
    assert meetings(compiled("v5e", "width", name)) == {}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("width", "forward decode"),
        ("experts", "forward extend"),
        rarely("width", "forward extend"),
        rarely("experts", "forward decode"),
    ],
)
def test_ranks_meet_around_the_experts_and_behind_the_layers_alone(chip, kind, name):
    """Pages are in place in each rank. A layer with experts has one gather and one sum of the ranks; then the rows that
    the host reads are gathered."""
    program = compiled(chip, kind, name, 2)
    assert_in_place(program, POOLS[2].abstract, max_temp_bytes=MAX_TEMP_BYTES)
    assert whole_pool_operations(program, POOLS[2].abstract) == []
    met = meetings(program)
    parts = met.pop("all-gather")
    assert met == {"all-reduce": 2 * len(SMALL.config.blocks) + 1, "reduce-scatter": 1}, "of ranks: one in a layer"
    assert parts == 3 or (parts == 5 and name == "forward extend"), (
        "embeddings, the rows of a layer, and those that the host reads; a layer's may be gathered in three parts"
    )


@pytest.mark.parametrize("name", ["sample greedy", "sample full", "count extend", "score"])
def test_ranks_choose_tokens_by_themselves_and_gather_what_the_host_reads(name):
    expected = {"count extend": {}, "score": {"all-reduce": 1, "all-gather": 1}}.get(name, {"all-gather": 1})
    assert meetings(compiled("v5e", "width", name, 2)) == expected
