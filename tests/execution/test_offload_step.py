"""The step of an offloaded model is the step of programs.py, in every kind of family: hidden states within 1e-5, ids
equal; with the host's experts computed there, or streamed. Deferral is compared with the layers run one by one. Here on
one device; with two devices, an engine and swaps: tests/engine/test_offload_two_devices.py."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.capture.device_cache import create_device_cache
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.placement import ResidencyMap
from routed_experts.engine.build.backends import ATTENTION, KERNELS
from routed_experts.execution.forward_batch import BatchShape, unpack
from routed_experts.execution.offload import offload_step as module
from routed_experts.execution.offload.offload_step import HostExperts, OffloadArrays, OffloadSpec, offload_step
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.execution.recurrent_ops import hybrid_ops
from routed_experts.layers.expert_slots import run_slots
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.native.toolchain import unavailable_reason
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.memory.kv_pool import HybridPool, KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.interface import SequenceOps
from routed_experts.models.decoder.decoder import FamilyDecoder, embed, final_norm
from routed_experts.models.decoder.layer_parts import LayerContext
from routed_experts.models.offload.layers import (
    LayerIndexArrays,
    Residual,
    add_expert_outputs,
    attention_and_router,
    device_experts,
    layer_indices,
    lightest,
)
from routed_experts.models.offload.offloaded_model import offload_model
from routed_experts.models.registry import FAMILIES
from support.model_steps import PAGE, PAGES, WIDTH, packed

pytestmark = [
    pytest.mark.usefixtures("fast_compilation"),
    pytest.mark.skipif(unavailable_reason() is not None, reason="needs the native library"),
]

COMMON = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    hidden_act="silu",
    tie_word_embeddings=False,
    head_dim=8,
)
# a dense layer, latent attention, a bias that chooses | states, a pattern, gated shared experts | a short convolution |
# weighed inputs | scales, no head
# | biases, of the head too
CONFIGS = {
    "DeepseekV3ForCausalLM": dict(
        num_key_value_heads=4,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "Qwen3NextForCausalLM": dict(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        full_attention_interval=2,
        num_hidden_layers=4,
    ),
    "Lfm2MoeForCausalLM": dict(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "Llama4ForCausalLM": dict(
        num_local_experts=6,
        num_experts_per_tok=1,
        intermediate_size_mlp=24,
        interleave_moe_layer_step=2,
        num_hidden_layers=2,
        attention_chunk_size=4,
    ),
    "GraniteMoeForCausalLM": dict(
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        logits_scaling=2.0,
    ),
    "PhimoeForCausalLM": dict(
        num_local_experts=6, num_experts_per_tok=2, lm_head_bias=True, attention_bias=True, num_hidden_layers=2
    ),
}
EXTEND = BatchShape(mode=ForwardMode.EXTEND, num_tokens=16, num_requests=3, table_width=WIDTH)
DECODE = BatchShape(mode=ForwardMode.DECODE, num_tokens=4, num_requests=4, table_width=WIDTH)
REAL = {EXTEND: 11, DECODE: 3}  # tokens of the step; the rest is padding
EXPERTS, RESIDENT = 6, 2


@functools.cache
def build_model(name):
    values = {"architectures": [name], **COMMON, **CONFIGS[name]}
    config = FAMILIES[name].read_config(ConfigReader(values, Path("config.json")))
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    )
    noise = np.random.default_rng(0)
    wide = jax.tree.map(lambda leaf: jnp.asarray(noise.standard_normal(leaf.shape) * 0.2, leaf.dtype), state)
    return nnx.merge(graphdef, wide)


def metadata(shape, prompt_len=0):
    """Two prompts, or one token of each of three requests."""
    if shape is EXTEND:
        tokens = {
            "token_ids": [7, 8, 9, 1, 2, 30, 31, 32, 33, 34, 35],
            "positions": [*range(5), *range(6)],
            "token_rows": [0] * 5 + [1] * 6,
            "query_starts": [0, 5, 11, 11],
            "seq_lens": [5, 6],
        }
    else:
        tokens = {
            "token_ids": [11, 12, 13],
            "positions": [5, 6, 2],
            "token_rows": [0, 1, 2],
            "query_starts": [0, 1, 2, 3, 3],
            "seq_lens": [6, 7, 3],
        }
    table = {"page_table": [[3, 5, 7], [2, 9, 4], [8, 1, 6]][: shape.num_requests], "request_slots": [1, 2]}
    return packed(shape, num_tokens=REAL[shape], prompt_len=prompt_len, **tokens, **table)


def pool_spec(config):
    cache = config.cache
    return KVPoolSpec(
        num_layers=cache.num_layers,
        num_pages=PAGES,
        page_size=PAGE,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        dtype=jnp.dtype("float32"),
        latent=cache.latent,
        num_recurrent=cache.num_recurrent,
        recurrent=cache.recurrent,
        num_requests=4,
    )


def filled_pool(config):
    """Pages and states of earlier steps: small random numbers."""
    noise = np.random.default_rng(7)
    empty = pool_spec(config).allocate()
    return jax.tree.map(lambda leaf: jnp.asarray(noise.standard_normal(leaf.shape) * 0.1, leaf.dtype), empty)


def plain_step(model, program, shape):
    graphdef, state = nnx.split(model)
    step = jax.jit(functools.partial(forward, spec=dataclasses.replace(program, graphdef=graphdef), shape=shape))
    return step(state, filled_pool(model.config), jnp.zeros(4, jnp.int32), metadata(shape))


class Offloaded:
    """A model with `resident` of six experts on the device, other ones in every layer."""

    def __init__(self, name, *, num_deferred=0, resident=RESIDENT):
        self.plain = build_model(name)
        config = self.plain.config
        noise, num_moe = np.random.default_rng(5), config.capture_spec.num_moe_layers
        resident_experts = np.stack([noise.permutation(EXPERTS)[:resident] for _ in range(num_moe)])
        self.residency, device = ResidencyMap.from_experts(resident_experts, num_experts=EXPERTS), jax.devices()[0]
        host = jax.devices("cpu")[0]
        self.model = offload_model(self.plain, self.residency, device=device, host=host, host_dtype=None)
        self.stores = {group: jax.device_put(store, device) for group, store in self.model.host.items()}
        self.slot_of = jnp.asarray(self.residency.slot_of)
        self.program = ProgramSpec(
            graphdef=self.model.layerless[0],
            capture=config.capture_spec,
            kernels=KERNELS["tiled"].load(),
            attention=ATTENTION["paged"].load(),
            num_pages=PAGES,
            raw_logprobs=False,
        )
        sizes = {"num_moe_layers": num_moe, "num_experts": EXPERTS, "num_resident": resident}
        self.spec = OffloadSpec(program=self.program, config=config, num_deferred=num_deferred, **sizes)
        self.host, self.programs = HostExperts.open(self.model, num_threads=2), {}

    def step(self, shape, *, streams=False, prompt_len=0):
        if (shape, streams) not in self.programs:
            program = functools.partial(offload_step, spec=self.spec, shape=shape, host=self.host, streams=streams)
            self.programs[shape, streams] = jax.jit(program)
        return self.programs[shape, streams](*self.arguments(shape, prompt_len=prompt_len))

    def arguments(self, shape, *, prompt_len=0):
        arrays, last_tokens = OffloadArrays.create(self.model, self.model.tables), jnp.zeros(4, jnp.int32)
        return arrays, filled_pool(self.model.config), last_tokens, metadata(shape, prompt_len), self.slot_of

    def layer_by_layer(self, shape):
        """The same step by array code alone, a layer at a time: hidden states, and the inputs of each layer's
        experts."""
        return jax.jit(functools.partial(self._layer_by_layer, shape=shape))(
            filled_pool(self.model.config), metadata(shape)
        )

    def _layer_by_layer(self, pool, words, *, shape):
        model, program, batch = self.model, self.program, unpack(words, shape)
        attend = PagedAttend(backend=program.attention, batch=batch.paged, num_pages=PAGES)
        ops = hybrid_ops(attend, batch) if isinstance(pool, HybridPool) else SequenceOps(attend)
        positions, config = batch.paged.positions, model.config
        step = LayerContext.create(positions, batch.paged.valid, ops, program.kernels, config.rotary)
        x = embed(config, model.embed_head.embed, batch.resolve_tokens(jnp.zeros(4, jnp.int32)))
        capture = create_device_cache(program.capture, shape.num_tokens)
        residual = Residual(x, capture, jnp.zeros((self.spec.num_moe_layers, 3), jnp.int32))
        late, all_inputs = [], []
        for layer in layer_indices(config):
            group, arrays = layer.group, model.layers[layer.group]
            numbers = LayerIndexArrays(*map(jnp.int32, (layer.index, layer.cache_index, layer.moe_layer)))
            residual, inputs, pool = attention_and_router(
                config, group, arrays, numbers, residual, step, pool, self.slot_of, num_deferred=self.spec.num_deferred
            )
            if inputs is None:
                continue
            how = {"size": EXPERTS, "backend": MOE_BACKENDS["reference"]}

            def on_host(ids, inputs=inputs, layer=layer, how=how):
                return run_slots(inputs.x, ids, inputs.weights, self.stores[layer.group], jnp.int32(layer.index), **how)

            own = device_experts(
                config, group, model.tables[group], arrays, numbers, inputs, step, size=self.spec.num_resident
            )
            x = add_expert_outputs(config, residual.x, [own, on_host(inputs.host_ids), *late])
            residual = dataclasses.replace(residual, x=x)
            late = [] if inputs.deferred_ids is None else [on_host(inputs.deferred_ids)]
            all_inputs.append(inputs)
        norms = model.embed_head
        hidden = final_norm(config, residual.x, norms.norm, norms.norm_bias, program.kernels.rows)
        return hidden, residual.slot_counts, jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_inputs)


@functools.cache
def expected_step(name):
    """A model's step with all experts on the device, and the offloaded step a layer at a time. Both are compiled once:
    neither depends on how the host's experts are run."""
    offloaded = Offloaded(name)
    return plain_step(offloaded.plain, offloaded.program, EXTEND), offloaded.layer_by_layer(EXTEND)


STREAMED = ("DeepseekV3ForCausalLM", "Lfm2MoeForCausalLM", "GraniteMoeForCausalLM")  # in every run


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        pytest.param(name, streams, marks=pytest.mark.thorough if streams and name not in STREAMED else [])
        for name in CONFIGS
        for streams in (False, True)
    ],
)
def test_a_step_with_experts_on_the_host_is_the_step(name, streams, monkeypatch):
    """Also where the host's four experts are streamed in chunks of three, or one by one."""
    (pool, out), (hidden, _, inputs) = expected_step(name)
    chunk = 3 if name == "GraniteMoeForCausalLM" else 1
    if streams:
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk * 3 * 32 * 16 * 4)
    offloaded, shape = Offloaded(name), EXTEND
    jobs = offloaded.host.queue.stats().num_jobs
    own_pool, own, counts = offloaded.step(shape, streams=streams)
    real, num_moe = REAL[shape], offloaded.spec.num_moe_layers
    np.testing.assert_allclose(own.hidden[:real], out.hidden[:real], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(own.logits, out.logits, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(own.rows[:real], out.rows[:real])
    jax.tree.map(
        lambda actual, reference: np.testing.assert_allclose(actual, reference, atol=1e-5, rtol=1e-5), own_pool, pool
    )
    jobs_of_layer = -(-(EXPERTS - RESIDENT) // offloaded.host.max_chunk) if streams else 1
    assert offloaded.host.queue.stats().num_jobs - jobs == num_moe * jobs_of_layer
    assert not streams or jobs_of_layer > 1

    rows = np.asarray(out.rows[:real], np.int64).reshape(real, num_moe, -1)  # logical ids: the host's follow from them
    on_host = offloaded.residency.slot_of[np.arange(num_moe)[None, :, None], rows] < 0
    expected = [on_host.sum(axis=(0, 2)), np.full(num_moe, rows[:, 0].size), np.zeros(num_moe, int)]
    np.testing.assert_array_equal(counts, np.stack(expected, axis=1))
    np.testing.assert_allclose(hidden[:real], out.hidden[:real], atol=1e-5, rtol=1e-5)
    host_ids = np.moveaxis(np.asarray(inputs.host_ids), 0, 1)  # [N, M, K]
    np.testing.assert_array_equal(host_ids[:real], np.where(on_host, rows, -1))
    assert (host_ids[real:] == -1).all()  # padding is no work


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_without_an_expert_on_the_device_is_the_step(name):
    """Shared experts of Llama 4, which are on it, read other inputs than the experts on the host."""
    (pool, out), _ = expected_step(name)
    offloaded, real = Offloaded(name, resident=0), REAL[EXTEND]
    for _ in range(2):
        own_pool, own, _ = offloaded.step(EXTEND)
        np.testing.assert_allclose(own.hidden[:real], out.hidden[:real], atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(own.rows[:real], out.rows[:real])
    jax.tree.map(
        lambda actual, reference: np.testing.assert_allclose(actual, reference, atol=1e-5, rtol=1e-5), own_pool, pool
    )


def test_deferred_experts_of_a_model_without_an_expert_on_the_device():
    offloaded, real = Offloaded("Llama4ForCausalLM", num_deferred=1, resident=0), REAL[DECODE]
    hidden, expected_counts, _ = offloaded.layer_by_layer(DECODE)
    _, own, counts = offloaded.step(DECODE)
    np.testing.assert_allclose(own.hidden[:real], hidden[:real], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(counts, expected_counts)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "GraniteMoeForCausalLM"])
def test_deferred_experts_are_added_one_moe_layer_later(name):
    """In decode steps alone: of each token's lightest slot those on the host, but none of the last MoE layer's."""
    offloaded, real = Offloaded(name, num_deferred=1), REAL[DECODE]
    plain = plain_step(offloaded.plain, offloaded.program, DECODE)[1]
    hidden, expected_counts, inputs = offloaded.layer_by_layer(DECODE)
    for _ in range(2):  # a step leaves no job for the next
        _, own, counts = offloaded.step(DECODE)
        np.testing.assert_allclose(own.hidden[:real], hidden[:real], atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(counts, expected_counts)
    assert np.abs(own.hidden[:real] - plain.hidden[:real]).max() > 1e-4  # another model

    host_ids, deferred, weights = map(np.asarray, (inputs.host_ids, inputs.deferred_ids, inputs.weights))
    top_k = weights.shape[2]
    for m, n in np.ndindex(*weights.shape[:2]):
        light = min(range(top_k), key=lambda slot, row=weights[m, n]: (row[slot], -slot))
        late = [slot == light and m < len(weights) - 1 and deferred[m, n, slot] >= 0 for slot in range(top_k)]
        assert (deferred[m, n] >= 0).tolist() == late
        assert (host_ids[m, n][late] == -1).all()
        own_ids = np.maximum(host_ids[m, n], deferred[m, n])
        assert all(offloaded.residency.slot_of[m, expert] < 0 for expert in own_ids if expert >= 0)
    assert (deferred >= 0).any() and (deferred[-1] == -1).all() and (deferred[:, real:] == -1).all()
    assert np.asarray(counts)[:, 2].tolist() == (deferred >= 0).sum(axis=(1, 2)).tolist()


def test_prompts_are_not_deferred():
    offloaded, real = Offloaded("GraniteMoeForCausalLM", num_deferred=1), REAL[EXTEND]
    _, own, counts = offloaded.step(EXTEND)
    plain = plain_step(offloaded.plain, offloaded.program, EXTEND)[1]
    np.testing.assert_allclose(own.hidden[:real], plain.hidden[:real], atol=1e-5, rtol=1e-5)
    assert (np.asarray(counts)[:, 2] == 0).all()


def test_the_last_token_of_a_prompt_is_not_deferred_in_a_decode_step():
    """The rows of a decode step are of generated tokens, but for a prompt whose last chunk is one token."""
    offloaded = Offloaded("GraniteMoeForCausalLM", num_deferred=1)
    plain = plain_step(offloaded.plain, offloaded.program, DECODE)[1]
    generated = offloaded.step(DECODE)[1]
    _, own, counts = offloaded.step(DECODE, prompt_len=[0, 0, 3])  # the positions are 5, 6 and 2
    for row, expected in enumerate([generated, generated, plain]):
        np.testing.assert_allclose(own.hidden[row], expected.hidden[row], atol=1e-5, rtol=1e-5)
    assert np.abs(plain.hidden[2] - generated.hidden[2]).max() > 1e-4
    assert 0 < np.asarray(counts)[:, 2].sum() < np.asarray(offloaded.step(DECODE)[2])[:, 2].sum()


def test_the_lightest_slots_are_those_that_a_sort_finds():
    weights = np.random.default_rng(2).integers(0, 4, size=(200, 5)).astype(np.float32)  # many ties: then the last
    for count in range(6):
        expected = np.zeros(weights.shape, bool)
        for row, light in zip(weights, expected, strict=True):
            light[sorted(range(5), key=lambda slot, row=row: (row[slot], -slot))[:count]] = True
        np.testing.assert_array_equal(lightest(jnp.asarray(weights), count), expected)


def test_device_experts_stand_between_submit_and_wait():
    """In each layer the jobs are submitted, then the device computes, and only then it waits."""
    offloaded = Offloaded("GraniteMoeForCausalLM", num_deferred=1)
    moe = offloaded.program.kernels.moe

    def residents(call):
        return moe.run(call)

    marked = dataclasses.replace(offloaded.program.kernels, moe=dataclasses.replace(moe, run=jax.jit(residents)))
    spec = dataclasses.replace(offloaded.spec, program=dataclasses.replace(offloaded.program, kernels=marked))
    program = functools.partial(offload_step, spec=spec, shape=DECODE, host=offloaded.host)
    order = [*calls(jax.make_jaxpr(program)(*offloaded.arguments(DECODE)).jaxpr)]
    submit, wait = "RexSubmitHostJob", "RexWaitHostSums"
    assert order == [submit, submit, submit, "residents", wait, wait, wait]  # the outer two are of no layer


def calls(jaxpr):
    """The host jobs of a program and what is named `residents`, in order."""
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("target_name") or eqn.params.get("name"))
        if name in ("RexSubmitHostJob", "RexWaitHostSums", "residents"):
            yield name
        for value in eqn.params.values():
            if hasattr(value, "jaxpr"):
                yield from calls(value.jaxpr)
