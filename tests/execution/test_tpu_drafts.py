"""Programs of a draft model through the real TPU compiler: the pool of the draft layers is updated in place, and no
array of its size is made."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import lowerings
from routed_experts.execution.draft_chain import CHAIN_MODES, DraftSpec
from routed_experts.execution.drafting_runner import OF_TARGET, DraftPrograms
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.slot_state import SlotState
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.weight_format import weight_format
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.drafts.predictor import Predictor
from routed_experts.models.families.glm4_moe import read_glm4_moe
from support.tpu_aot import REPLICATED, assert_in_place, tpu_mesh, without_compilation_cache
from support.tpu_programs import PAGE_SIZE, build_world, whole_pool_operations

pytestmark = pytest.mark.tpu_aot

DRAFTS, MIB = 2, 1 << 20
CONFIG = read_glm4_moe(
    ConfigReader(
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "vocab_size": 8192,
            "hidden_size": 256,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 512,
            "moe_intermediate_size": 512,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "num_nextn_predict_layers": 1,
        },
        "CONFIG",
    )
)
BASE = build_world(CONFIG, num_pages=3072, decode=16, extend=64, num_request_slots=17)
VERIFY = dataclasses.replace(BASE.runner.shapes[0], mode=ForwardMode.TARGET_VERIFY, num_tokens=16 * (DRAFTS + 1))
RUNNER = dataclasses.replace(BASE.runner, shapes=(*BASE.runner.shapes, VERIFY))


@functools.cache
def draft_jobs(chip, *, static_modes=False):
    """The programs of the prediction layer by mode, number of drafts and, with `static_modes`, sampling mode; those of
    a SlotState by name; and the layer's pool."""
    sharding = NamedSharding(tpu_mesh(chip), REPLICATED)

    def placed(make):
        graphdef, state = nnx.split(nnx.eval_shape(make))
        return graphdef, jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=weight_format(sharding, leaf.shape)),
            state,
        )

    dtype = jnp.dtype(jnp.bfloat16)
    target, weights = placed(lambda: FamilyDecoder(CONFIG, rngs=nnx.Rngs(0), dtype=dtype))
    module = nnx.eval_shape(lambda: Predictor(CONFIG, rngs=nnx.Rngs(0), dtype=dtype, num_modules=1))
    graphdef, state = placed(lambda: Predictor(CONFIG, rngs=nnx.Rngs(0), dtype=dtype, num_modules=1))
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), CONFIG.needs, platform="tpu")
    sizes = dict(num_pages=RUNNER.pool.num_pages, page_size=PAGE_SIZE)
    pool = KVPoolSpec.create(module.cache, **sizes, dtype=dtype, num_requests=17, platform="tpu")
    spec = ProgramSpec(
        graphdef=target,
        capture=None,
        kernels=kernels,
        attention=attention,
        num_pages=sizes["num_pages"],
        raw_logprobs=False,
        num_drafts=DRAFTS,
        draft_model=True,
    )
    draft_spec = DraftSpec(
        graphdef=graphdef,
        target=target,
        target_tree=jax.tree.structure(weights),
        kernels=kernels,
        attention=attention,
        **sizes,
        vocab_size=CONFIG.vocab_size,
        static_modes=static_modes,
    )
    programs, actual = DraftPrograms(kind=OF_TARGET, spec=draft_spec, state=state, pool=pool), {}

    def more(shape, out):
        actual.update(programs.jobs(weights, spec, RUNNER, shape, out))
        return {}

    lowerings(weights, spec, RUNNER, more=more)
    drafting = {
        (key[1].mode, key[2], key[3]) if static_modes else (key[1].mode, key[2]): job
        for key, job in actual.items()
        if key[0] == "draft"
    }
    return drafting, {key[0]: job for key, job in actual.items() if key[0] != "draft"}, pool


def test_each_step_but_verify_steps_has_a_program_without_drafts():
    jobs, *_ = draft_jobs("v5e")
    plain = {(mode, count) for mode in (ForwardMode.DECODE, ForwardMode.EXTEND) for count in (0, DRAFTS)}
    assert jobs.keys() == plain | {(ForwardMode.TARGET_VERIFY, DRAFTS)}


@pytest.mark.parametrize("mode", CHAIN_MODES)
def test_a_program_of_one_sampling_mode_has_no_branch(mode):
    own, _, _ = draft_jobs("v5e", static_modes=True)
    of_all, _, _ = draft_jobs("v5e")
    with jax.sharding.use_abstract_mesh(tpu_mesh("v5e").abstract_mesh):
        branches = [
            jobs().as_text().count("stablehlo.case")
            for jobs in (own[ForwardMode.DECODE, DRAFTS, mode], of_all[ForwardMode.DECODE, DRAFTS])
        ]
    assert branches == [0, DRAFTS]


@pytest.mark.parametrize(
    "mode",
    [
        mode if mode is ForwardMode.TARGET_VERIFY else pytest.param(mode, marks=pytest.mark.thorough)
        for mode in ForwardMode
    ],
)
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
def test_the_pool_of_the_draft_layers_is_updated_in_place(chip, mode):
    jobs, _, pool = draft_jobs(chip)
    with jax.sharding.use_abstract_mesh(tpu_mesh(chip).abstract_mesh), without_compilation_cache():
        program = jobs[mode, DRAFTS]().compile()
    assert_in_place(program, pool.abstract, max_temp_bytes=16 * MIB)
    assert whole_pool_operations(program, pool.abstract) == []


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
def test_the_slots_of_a_verify_step_are_located_and_advanced_in_place(chip):
    _, jobs, _ = draft_jobs(chip)
    assert jobs.keys() == {"locate", "advance"}
    with jax.sharding.use_abstract_mesh(tpu_mesh(chip).abstract_mesh), without_compilation_cache():
        programs = {name: job().compile() for name, job in jobs.items()}
    state = SlotState.abstract(RUNNER.num_request_slots, DRAFTS)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert programs["advance"].memory_analysis().alias_size_in_bytes >= stored
    assert programs["locate"].memory_analysis().temp_size_in_bytes < MIB
