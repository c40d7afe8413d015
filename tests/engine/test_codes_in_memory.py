"""Engines whose matrices are codes and scales, by array code in float32: they answer as engines with the dequantised
numbers, up to the order of sums, and alike to the bit wherever the codes come from."""

import contextlib
import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from oracles.families import CASES, Oracle
from oracles.full_sequence import Judged as JudgedSequence
from oracles.margins import assert_margin_rule
from oracles.predictors import PredictorOracle
from routed_experts import (
    ConfigError,
    Engine,
    ExpertPlacement,
    SpeculativeConfig,
    WeightsMismatchError,
    extract_routed_experts_from_meta_info,
    replay,
)
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.execution.compile_count import CompileCount
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.decoder.code_selection import CodeSupport
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.models.model_folder import ModelFolder
from routed_experts.placement import rebalance
from support.engines import assert_idle
from support.quantized_checkpoints import forms, quantize_folder, read_tensors, rewrite_folder, write_folder
from support.quantized_families import (
    ASK,
    ENGINE,
    GPT_OSS,
    ORDER_OF_SUMS,
    PROMPTS,
    Written,
    answers,
    assert_near,
    sized_case,
    write,
)

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

NEAR_TIE_OF_BF16 = 2e-2  # of scores: RELIABILITY section 2
ARRAY_CODE = dict(dtype="float32", moe_backend="tiled", attention_backend="paged", **ENGINE)


def rarely(*values, id=None):
    """A case of scripts/thorough: another one of its kind runs always."""
    return pytest.param(*values, id=id, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write(tmp_path_factory.mktemp("qwen"), "Qwen3-MoE", "fp8 blocks")


@pytest.fixture(scope="module")
def engine_of_codes(qwen):
    with Engine(str(qwen.quantized), **ARRAY_CODE) as engine:
        yield engine


@pytest.fixture
def served(engine_of_codes):
    """An engine with the codes of the checkpoint, and no cached prefix. A test that changes its weights brings the
    codes back."""
    engine_of_codes.flush_cache()
    return engine_of_codes


@pytest.fixture(scope="module")
def codes(engine_of_codes):
    """What it answers."""
    engine_of_codes.flush_cache()
    return answers(engine_of_codes)


@pytest.fixture(scope="module")
def engine_that_quantises(qwen):
    with Engine(str(qwen.oracle.folder), quantization="fp8_block", **ARRAY_CODE) as engine:
        yield engine


@pytest.fixture
def quantised(engine_that_quantises):
    """An engine that quantises the plain checkpoint as it loads it, without a cached prefix. A test that pushes weights
    brings these back."""
    engine_that_quantises.flush_cache()
    return engine_that_quantises


def of_codes(engine):
    """Names of the arrays that are codes, each of one byte an entry."""
    leaves = nnx.to_flat_state(engine.components.served.arrays)
    return {".".join(map(str, path)) for path, leaf in leaves if leaf.dtype.itemsize == 1}


HALF_A_BYTE = {"Kimi-K2": "int8", GPT_OSS: "uint8"}  # and the dtype of codes


@pytest.mark.parametrize(
    "family", ["DeepSeek-V3", GPT_OSS, *map(rarely, ("Qwen3-MoE", "MiniMax-M2", "GLM-4", "Kimi-K2"))]
)
def test_codes_answer_as_their_numbers(tmp_path, family):
    written = write(tmp_path, family)
    with Engine(str(written.quantized), quantization="none", **ARRAY_CODE) as engine:
        expected = answers(engine)
        assert not of_codes(engine)
    with Engine(str(written.quantized), **ARRAY_CODE) as engine:
        assert len(of_codes(engine)) >= (2 if family == "Kimi-K2" else 4)
        assert_near(answers(engine), expected)
        live = engine.score(PROMPTS[0])
        again = engine.score(PROMPTS[0], routed=live.routed_experts)
        assert np.array_equal(again.logprobs, live.logprobs)
        assert_idle(engine)


@pytest.mark.parametrize("form", forms())
def test_every_form_of_e4m3_and_symmetric_int4_stay_codes_and_no_other(qwen, tmp_path, form):
    quantize_folder(qwen.oracle.folder, tmp_path / "small", tmp_path / "copy", forms()[form])
    model = inspect_model(ServerArgs(model_path=str(tmp_path / "small"), dtype="float32", moe_backend="tiled"))
    is_coded = form.startswith(("fp8", "float")) or form == "int4"
    assert ("served as codes" in model.memory_plan[0]) == is_coded, model.memory_plan[0]


def test_weights_take_the_bytes_of_codes(qwen):
    args = dict(model_path=str(qwen.quantized), moe_backend="tiled", dtype="bfloat16")
    codes, numbers = (inspect_model(ServerArgs(quantization=how, **args)) for how in ("auto", "none"))
    assert codes.num_parameters == numbers.num_parameters
    assert "59 tensors served as codes, products in bfloat16" in codes.memory_plan[0]
    with Engine(str(qwen.quantized), moe_backend="tiled", **ENGINE | {"enable_return_routed_experts": False}) as engine:
        for name in of_codes(engine):
            at = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(engine.components.served.arrays)}
            assert at[name].dtype.itemsize == 1 and at[f"{name}_scale"].dtype == jnp.float32


def test_a_layer_of_plain_matrices_stays_plain(qwen, tmp_path):
    """As by `modules_to_not_convert`: the layers differ, and each is served as it is stored."""
    tensors, copy = read_tensors(qwen.quantized), read_tensors(qwen.copy)
    config = json.loads((qwen.quantized / "config.json").read_text())
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.0.")}
    tensors |= {name: tensor for name, tensor in copy.items() if name.startswith("model.layers.0.")}
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0"]
    folder = write_folder(tmp_path / "mixed", config, tensors)
    with Engine(str(qwen.copy), **ARRAY_CODE) as engine:
        expected = answers(engine)
    with Engine(str(folder), **ARRAY_CODE) as engine:
        assert of_codes(engine) == {f"blocks.1.0.{name}" for name in ("qkv", "out", "gate_up", "down")}
        assert_near(answers(engine), expected)


def test_updates_from_disk_of_codes_and_of_numbers_serve_their_own(qwen, served, codes, tmp_path):
    """New codes as they are; plain numbers are quantised as an engine with quantization="fp8_block" does it."""
    other = write(tmp_path, "Qwen3-MoE", "fp8 blocks", seed=3)
    with Engine(str(other.quantized), **ARRAY_CODE) as engine:
        expected = answers(engine)
    assert expected != codes
    for folder, wanted in (
        (other.quantized, expected),
        (qwen.oracle.folder, codes),  # of which qwen.quantized was made
        (other.oracle.folder, expected),
        (qwen.quantized, codes),
    ):
        served.update_weights_from_disk(folder)
        assert answers(served) == wanted, folder


def test_plain_weights_are_quantised_as_the_script_does(quantised, codes):
    assert len(of_codes(quantised)) == 8
    assert answers(quantised) == codes


def test_pushes_are_quantised_compile_nothing_and_free_what_is_donated(qwen, quantised, codes):
    plain = nnx.state(ModelFolder.open(qwen.oracle.folder).load(jnp.dtype("float32")))
    other = jax.tree.map(lambda leaf: leaf * 1.25, plain)
    quantised.update_weights(other)
    assert answers(quantised) != codes
    quantised.update_weights(plain, copy=True)
    assert answers(quantised) == codes
    with contextlib.closing(CompileCount()) as count:
        for push in range(10):
            quantised.update_weights(other if push % 2 == 0 else plain)
        assert count.startup == 0 and count.is_complete
    assert answers(quantised) == codes
    given = jax.tree.map(jnp.copy, plain)
    quantised.update_weights(given, donate=True)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(given)}
    assert all(leaves[name].get_raw_value().is_deleted() for name in of_codes(quantised))
    assert answers(quantised) == codes


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(moe_backend="native", attention_backend="native"), id="native"),
        rarely(dict(moe_backend="native", attention_backend="native", dtype="bfloat16"), id="native bfloat16"),
        pytest.param(dict(tp_size=2), id="two devices", marks=pytest.mark.devices(2)),
        pytest.param(dict(tp_size=2, ep_size=2), id="by expert", marks=[pytest.mark.devices(2), pytest.mark.thorough]),
    ],
)
def test_ten_pushes_compile_nothing_on_kernels_and_devices(qwen, options):
    """After one push: the weights of each go to the kernels' layout, or to the shards, by programs that exist."""
    options = ARRAY_CODE | options
    dtype = jnp.dtype(options["dtype"])
    plain = nnx.state(ModelFolder.open(qwen.oracle.folder).load(dtype))
    other = jax.tree.map(lambda leaf: leaf * leaf.dtype.type(1.25), plain)
    with Engine(str(qwen.oracle.folder), quantization="fp8_block", **options) as engine:
        assert len(of_codes(engine)) == 8
        engine.update_weights(plain)
        expected = answers(engine)
        engine.update_weights(other)
        changed = answers(engine)
        assert changed != expected
        with contextlib.closing(CompileCount()) as count:
            for push in range(10):
                engine.update_weights(plain if push % 2 == 0 else other)
                assert count.startup == 0 and count.is_complete, push
        assert answers(engine) == changed
        engine.update_weights(plain)
        assert answers(engine) == expected
        assert codes_in_memory(engine) == of_codes(engine)


def test_a_push_of_nan_changes_nothing(qwen, served, codes):
    plain = nnx.state(ModelFolder.open(qwen.oracle.folder).load(jnp.dtype("float32")))
    broken = dict(nnx.to_pure_dict(plain))
    broken = jax.tree.map(lambda leaf: leaf, broken)
    experts = broken["blocks"][1][0]
    experts["gate_up"] = experts["gate_up"].at[3, 5, 7].set(jnp.nan)
    with pytest.raises(WeightsMismatchError, match=r"hold NaN or infinity: blocks\.1\.0\.gate_up"):
        served.update_weights(broken)
    wrong = dict(broken, embed=broken["embed"][:-1])
    with pytest.raises(WeightsMismatchError, match="embed"):
        served.update_weights(wrong)
    assert answers(served) == codes


def test_a_given_module_is_quantised(qwen, codes):
    model = ModelFolder.open(qwen.oracle.folder).load(jnp.dtype("float32"))
    with Engine(model=model, quantization="fp8_block", **ARRAY_CODE) as engine:
        assert len(of_codes(engine)) == 8 and answers(engine) == codes


def test_a_trainer_through_the_grid_has_the_numbers_that_are_served(qwen):
    folder = ModelFolder.open(qwen.oracle.folder)
    model = folder.load(jnp.dtype("float32"))
    graphdef, state = nnx.split(model)
    retained = {".".join(map(str, p)): leaf for p, leaf in nnx.to_flat_state(replay.quantised(state, model.config))}
    copy = nnx.state(ModelFolder.open(qwen.copy).load(jnp.dtype("float32")))
    assert all(np.array_equal(retained[".".join(map(str, p))][...], leaf[...]) for p, leaf in nnx.to_flat_state(copy))

    def loss(state):
        module: FamilyDecoder = nnx.merge(graphdef, replay.quantised(state, model.config))
        return sum(jnp.sum(leaf[...].astype(jnp.float32)) for leaf in jax.tree.leaves(nnx.state(module), is_leaf=None))

    slopes = jax.grad(loss)(state)
    assert all(np.array_equal(leaf, np.ones_like(leaf)) for leaf in jax.tree.leaves(slopes))


@pytest.mark.devices(4)
@pytest.mark.parametrize(("tp_size", "ep_size"), [rarely(2, 1), (4, 1), rarely(4, 4)])
def test_shards_of_codes_answer_as_shards_of_numbers(tmp_path, tp_size, ep_size):
    """Width 320 over 4 devices is 80 each, in groups of 16; 192 is 48."""
    case = sized_case(
        "Qwen3Moe", dict(moe_intermediate_size=320, intermediate_size=320, mlp_only_layers=[0], num_key_value_heads=4)
    )
    oracle = Oracle(case, tmp_path / "plain")
    quantize_folder(oracle.folder, tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    sizes = dict(tp_size=tp_size, ep_size=ep_size, **ARRAY_CODE)
    with Engine(str(tmp_path / "copy"), **sizes) as engine:
        expected = answers(engine)
    with Engine(str(tmp_path / "small"), **sizes) as engine:
        assert len(of_codes(engine)) == 8
        of_checkpoint = answers(engine)
        assert_near(of_checkpoint, expected)
        engine.update_weights(nnx.state(ModelFolder.open(oracle.folder).load(jnp.dtype("float32"))))
        assert answers(engine) == of_checkpoint


@pytest.mark.devices(4)
@pytest.mark.parametrize("ep_size", [rarely(1), 2])
def test_scores_of_shards_of_codes_are_those_of_a_sharded_trainer(qwen, ep_size):
    """On rows of their own and on others, which a forward pass plays back with the float32 numbers, cut as the engine's
    experts are: whole ones, or by width."""
    with Engine(str(qwen.quantized), tp_size=2, ep_size=ep_size, **ARRAY_CODE) as engine:
        assert of_codes(engine)
        live = engine.score(PROMPTS)
        again = engine.score(PROMPTS, routed=[result.routed_experts for result in live])
        assert [result.logprobs.tolist() for result in again] == [result.logprobs.tolist() for result in live]
        records = [result.routed_experts for result in live]
        rolled = [dataclasses.replace(record, ids=np.roll(record.ids, 1, axis=0)) for record in records]
        forced = engine.score(PROMPTS, routed=rolled)
    model = ModelFolder.open(qwen.quantized).load(jnp.dtype("float32"))
    graphdef, state = nnx.split(model)
    mesh, axis = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",)), 0 if ep_size > 1 else 2

    def cut(leaf):
        is_cut = leaf.ndim == 3 and leaf.shape[axis] % 2 == 0
        spec = jax.P(*["devices" if is_cut and index == axis else None for index in range(leaf.ndim)])
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    state = jax.tree.map(cut, state)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    forward = jax.jit(lambda state, tokens, batch: replay.forward(nnx.merge(graphdef, state), tokens, routed=batch))
    for prompt, *results in zip(PROMPTS, live, forced, strict=True):
        for result in results:
            samples = [replay.Sample(result.routed_experts, len(prompt))]
            batch = replay.align(samples, layout="pad_right", seq_len=20, spec=model.config.capture_spec)
            tokens = np.pad(prompt, (0, 20 - len(prompt)))[None].astype(np.int32)
            logprobs = np.asarray(jax.nn.log_softmax(forward(state, tokens, batch).logits[0]))
            judged = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
            assert np.abs(result.logprobs - judged).max() < ORDER_OF_SUMS
        assert np.abs(results[0].logprobs - results[1].logprobs).max() > 1e-3, "other rows are other experts"


@pytest.mark.devices(4)
def test_placed_experts_of_codes_move_and_change_no_value(qwen):
    identity = ExpertPlacement.identity(1, 16, 2)
    moved = rebalance(np.random.default_rng(5).gamma(0.5, size=(1, 16)), num_instances=16, num_devices=2)
    assert not np.array_equal(moved.physical_to_logical_map, identity.physical_to_logical_map)
    with Engine(str(qwen.quantized), tp_size=2, ep_size=2, placement=identity, **ARRAY_CODE) as engine:
        expected = answers(engine)
        engine.apply_placement(moved)
        assert_near(answers(engine), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(quantization="fp4"), "quantization='fp4' is unknown; choose one of auto, none, fp8_block"),
        (
            dict(quantization="fp8_block", experts=ExpertOffloadConfig(kt_num_gpu_experts=4)),
            "experts on the host, whose kernels take no codes",
        ),
    ],
)
def test_what_codes_cannot_do_is_refused(qwen, options, message):
    with pytest.raises(ConfigError, match=message):
        Engine(str(qwen.quantized), **options, **ARRAY_CODE)


def test_experts_on_the_host_dequantise_all_weights_and_the_log_says_so(qwen, codes, caplog):
    """Answers are those of the same engine with quantization="none", to the bit, and near those of one without a host,
    which adds in another order."""
    answered, message = {}, "all 59 quantised tensors (fp8 (blocks 128 x 128)) are dequantised: experts on the host are"
    for quantization in ("auto", "none"):
        caplog.clear()
        options = dict(quantization=quantization, experts=ExpertOffloadConfig(kt_num_gpu_experts=4))
        with caplog.at_level(logging.INFO), Engine(str(qwen.quantized), **options, **ARRAY_CODE) as engine:
            assert not of_codes(engine)
            answered[quantization] = answers(engine)
        lines = [record.name for record in caplog.records if record.getMessage().startswith(message)]
        assert lines == ["routed_experts.engine.build.runner_builder"] * (quantization == "auto"), caplog.text
    assert answered["auto"] == answered["none"]
    assert_near(answered["auto"], codes)


def test_codes_come_back_to_released_memory(qwen, served, codes):
    """From the folder, and from plain numbers that were quantised as it was: the same codes, so the same bits."""
    arrays = of_codes(served)
    served.release_memory_occupation()
    assert served.released == ("kv_cache", "weights")
    served.update_weights_from_disk(qwen.quantized)
    assert served.released == ("kv_cache",)
    served.resume_memory_occupation()
    assert served.released == () and answers(served) == codes
    assert of_codes(served) == arrays == codes_in_memory(served) and len(arrays) == 8
    served.release_memory_occupation(["weights"])
    assert not codes_in_memory(served), "the engine holds none"
    plain = nnx.state(ModelFolder.open(qwen.oracle.folder).load(jnp.dtype("float32")))
    served.resume_memory_occupation(plain, version=served.get_weight_version().update_count + 1)
    assert answers(served) == codes
    assert codes_in_memory(served) == arrays


def codes_in_memory(engine):
    """Names of the arrays on the device that are codes."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(engine.components.core.runner.state)}
    arrays = {name: array for name, leaf in leaves.items() if isinstance(array := value_of(leaf), jax.Array)}
    return {name for name, array in arrays.items() if array.dtype.itemsize == 1}


def value_of(leaf):
    """An array, or the shape of one that was released."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


@pytest.fixture(scope="module", params=HALF_A_BYTE)
def halves(request, tmp_path_factory):
    """A checkpoint whose experts are codes of 4 bits, their dtype, and what array code answers with it."""
    written = write(tmp_path_factory.mktemp(request.param.lower()), request.param)
    with Engine(str(written.quantized), **ARRAY_CODE) as engine:
        return written, HALF_A_BYTE[request.param], answers(engine)


def test_codes_of_4_bits_are_no_codes_of_8(halves):
    written, _, _ = halves
    with pytest.raises(ConfigError, match=r"no matrix of this model \((int4|mxfp4) .*\) can be codes of 8 bits"):
        Engine(str(written.quantized), quantization="fp8_block", **ARRAY_CODE)


def scores(folder, prompts, rows=None, **options):
    """Logprobs of fixed tokens, on given rows or live, and the rows, of an engine with native kernels."""
    with Engine(str(folder), **ENGINE | options) as engine:
        results = [engine.score(prompt, routed=None if rows is None else rows[i]) for i, prompt in enumerate(prompts)]
        return np.concatenate([result.logprobs for result in results]), [r.routed_experts for r in results]


@pytest.mark.parametrize("family", ["Qwen3-MoE", rarely("DeepSeek-V3")])
def test_native_codes_err_no_more_than_numbers_that_are_rounded_to_bfloat16(tmp_path, family):
    """Against the float32 numbers: codes of a bfloat16 model round no weight. Plain tensors are bfloat16 in the file,
    so that they are rounded in neither, and layers add so much that the rounding of what the head reads, which both
    have, counts little. 708 logprobs: of 25, which of the errors is the larger one is chance."""
    written = write(tmp_path, family).quantized
    tensors, scales = read_tensors(written), ("o_proj.weight_scale", "down_proj.weight_scale")
    plain = {name: tensor for name, tensor in tensors.items() if tensor.dtype == np.float32 and "_scale" not in name}
    changed = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in plain.items()}
    raised = {name: tensor * np.float32(16) for name, tensor in tensors.items() if any(end in name for end in scales)}
    assert len(raised) > 4, sorted(tensors)
    changed |= raised
    folder = rewrite_folder(written, tmp_path / "scaled", changed)
    prompts = np.random.default_rng(0).integers(1, 100, (12, 60)).tolist()
    exact, rows = scores(folder, prompts, dtype="float32", quantization="none")
    near, _ = scores(folder, prompts, rows, dtype="float32")
    assert np.abs(near - exact).max() < 4 * ORDER_OF_SUMS, "of layers that add 16 times as much as others here"
    codes, _ = scores(folder, prompts, rows, dtype="bfloat16")
    rounded, _ = scores(folder, prompts, rows, dtype="bfloat16", quantization="none")
    assert np.sqrt(np.mean((codes - exact) ** 2)) <= np.sqrt(np.mean((rounded - exact) ** 2))
    assert np.abs(codes - exact).max() > ORDER_OF_SUMS, "rows are rounded, as those of a bfloat16 model are"


class LastLayerRouters:
    """transformers in float32, of a model whose last layer alone has experts: rows that are forced there change the
    scores of no router. Slots are in the order of its scores, ids that a router is compared with as well."""

    moe_layers = (1,)

    def __init__(self, oracle):
        self.oracle = oracle

    def run(self, tokens, forced):
        judged = self.oracle.judge(tokens)
        ids = np.argsort(-judged.choice, axis=-1, kind="stable")[..., : judged.ids.shape[-1]]
        ids[: len(forced)] = forced
        return JudgedSequence(ids=ids, weights=judged.weights, scores=judged.choice, logits=judged.logits)

    def ordered(self, tokens, ids):
        scores = np.take_along_axis(self.oracle.judge(tokens).choice[: len(ids)], ids, axis=-1)
        return np.take_along_axis(ids, np.argsort(-scores, axis=-1, kind="stable"), axis=-1)


@pytest.mark.parametrize("family", ["Qwen3-MoE", rarely("GLM-4")])
def test_live_ids_of_codes_in_bfloat16_are_those_of_the_float32_numbers_up_to_near_ties(tmp_path, family):
    """Judged by transformers with the dequantised numbers. Rows of the plain weights break the same rule."""
    written = write(tmp_path, family, "float channel" if family == "GLM-4" else "fp8 blocks")
    folder = half_precision(written, tmp_path / "half")
    plain = {name: tensor for name, tensor in read_tensors(folder).items() if tensor.dtype == ml_dtypes.bfloat16}
    exact = {name: tensor.astype(np.float32) for name, tensor in plain.items() if "_scale" not in name}
    prompts = np.random.default_rng(0).integers(1, 100, (12, 60)).tolist()
    with Engine(str(folder), dtype="bfloat16", **ENGINE) as engine:
        assert len(of_codes(engine)) >= 8
        rows = [engine.score(prompt).routed_experts.ids.astype(np.int64) for prompt in prompts]
    of_plain = [written.oracle.judge(prompt).ids for prompt in prompts]
    config = json.loads((written.copy / "config.json").read_text())
    written.oracle.folder = write_folder(tmp_path / "exact", config, read_tensors(written.copy) | exact)
    written.oracle.read_again()
    routers = LastLayerRouters(written.oracle)

    def judge(rows):
        pairs = [(prompt, routers.ordered(prompt, ids)) for prompt, ids in zip(prompts, rows, strict=True)]
        assert_margin_rule(routers, pairs, bar=0.02, near_tie=NEAR_TIE_OF_BF16)

    judge(rows)
    with pytest.raises(AssertionError, match=r"margin|differ; at most"):
        judge(of_plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_codes_does_not_depend_on_its_company(qwen, dtype):
    """Native kernels: alone and together, and scored once more, to the bit."""
    options = ENGINE | dict(dtype=dtype, deterministic=True, precompile_bs_paddings=(4,))
    with Engine(str(qwen.quantized), **options) as engine:
        assert len(of_codes(engine)) == 8
        alone = answers(engine)
        together = engine.generate(input_ids=PROMPTS, **ASK)
        for result, prompt, (tokens, logprobs, rows) in zip(together, PROMPTS, alone, strict=True):
            record = extract_routed_experts_from_meta_info(result)
            assert result["output_ids"] == tokens and record.tobytes() == rows
            assert result["meta_info"]["output_token_logprobs"] == logprobs
            score = engine.score([*prompt, *tokens])
            assert score.logprobs[len(prompt) - 1 :].tolist() == [value for value, *_ in logprobs]


def test_a_trainer_that_loads_float32_replays_the_rows_of_codes(qwen):
    """Quantisation itself is no mismatch: rollout and trainer compute with the same numbers."""
    model = ModelFolder.open(qwen.quantized).load(jnp.dtype("float32"))
    with Engine(str(qwen.quantized), dtype="float32", **ENGINE) as engine:
        results = [engine.generate(input_ids=prompt, **ASK) for prompt in PROMPTS]
    for prompt, result in zip(PROMPTS, results, strict=True):
        record, tokens = record_from_meta_info(result), [*prompt, *result["output_ids"]]
        samples = [replay.Sample(record, len(tokens))]
        batch = replay.align(samples, layout="pad_right", seq_len=len(tokens), spec=model.config.capture_spec)
        out = replay.forward(model, jnp.asarray([tokens]), routed=batch)
        assert float(replay.canary(out.slot_miss, batch)) == 0.0
        logprobs = np.asarray(jax.nn.log_softmax(out.logits[0, :-1]))
        own = [value for value, *_ in result["meta_info"]["output_token_logprobs"]]
        judged = [logprobs[len(prompt) - 1 + step, token] for step, token in enumerate(result["output_ids"])]
        assert np.abs(np.array(own) - judged).max() < ORDER_OF_SUMS


@pytest.mark.thorough
def test_prediction_layers_of_a_quantised_checkpoint_draft(tmp_path):
    """Their own matrices are dequantised; drafts change no answer, and are those of the dequantised copy."""
    PredictorOracle("DeepseekV3", tmp_path / "plain", modules=1)
    names = quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    assert any("eh_proj" in name for name in names)
    draft = dict(speculative=SpeculativeConfig(algorithm="NEXTN", adaptive=False), deterministic=True)
    ask = {"temperature": 1.0, "seed": 3, "max_tokens": 30, "ignore_eos": True}

    def answered(folder, **options):
        with Engine(str(folder), dtype="float32", **ENGINE | options) as engine:
            results = engine.generate(input_ids=PROMPTS, sampling_params=ask)
            totals = engine.stats().speculative
        return [result["output_ids"] for result in results], totals and totals.requests

    expected = answered(tmp_path / "copy", **draft)
    assert expected[1].accepted > 0, "some drafts of a random model are right, by common noise"
    assert answered(tmp_path / "small", quantization="none", **draft) == expected
    assert answered(tmp_path / "small", **draft) == expected
    assert answered(tmp_path / "small", deterministic=True)[0] == expected[0]


def test_native_kernels_answer_as_array_code_and_take_half_a_byte_a_number(halves):
    written, dtype, expected = halves
    with Engine(
        str(written.quantized), **ARRAY_CODE | dict(moe_backend="native", attention_backend="native")
    ) as engine:
        assert_near(answers(engine), expected)
        at = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(engine.components.served.arrays)}
        for name in of_codes(engine):
            assert name.endswith(("gate_up", "down")) and at[name].dtype == dtype
            bytes_of, scales = at[name].shape[-2], at[f"{name}_scale"].shape[-2]
            assert scales == 2 * bytes_of // 32
    model = inspect_model(ServerArgs(model_path=str(written.quantized), moe_backend="native", dtype="bfloat16"))
    count = len(written.names) + (2 if dtype == "uint8" else 0)  # gate and up of a layer of GPT-OSS are one tensor
    assert f"{count} tensors served as codes" in model.memory_plan[0], model.memory_plan[0]


def test_updates_from_disk_of_codes_of_4_bits(halves, tmp_path):
    """Of the same form: served; plain numbers and pushes of them: refused, and nothing changes."""
    written, _, expected = halves
    family = GPT_OSS if halves[1] == "uint8" else "Kimi-K2"
    other = write(tmp_path, family, seed=1)
    with Engine(str(other.quantized), **ARRAY_CODE) as engine:
        others = answers(engine)
        engine.update_weights_from_disk(written.quantized)
        assert answers(engine) == expected != others
        with pytest.raises(
            WeightsMismatchError, match=r"is stored as plain numbers, and blocks\..* is served as (int4|e2m1) codes"
        ):
            engine.update_weights_from_disk(written.copy)
        plain = nnx.state(ModelFolder.open(written.copy).load(jnp.dtype("float32")))
        for how in (dict(copy=True), dict()):
            with pytest.raises(
                WeightsMismatchError, match=r"plain numbers for blocks\..*gate_up.*, served as codes of 4 bits"
            ):
                engine.update_weights(plain, **how)
        assert answers(engine) == expected


@pytest.mark.parametrize("halves", ["Kimi-K2"], indirect=True)
def test_scales_served_in_bfloat16_are_pushed_in_any_dtype_that_it_holds(halves, tmp_path):
    """From disk and from memory; a scale that it rounds is refused, and nothing changes."""
    written, _, expected = halves
    native = ARRAY_CODE | dict(moe_backend="native", attention_backend="native")
    scales = {name: array for name, array in read_tensors(written.quantized).items() if name.endswith(".weight_scale")}
    assert scales and all(array.dtype == ml_dtypes.bfloat16 for array in scales.values())
    floats = {name: array.astype(np.float32) for name, array in scales.items()}
    same = rewrite_folder(written.quantized, tmp_path / "same", floats)
    odd = rewrite_folder(written.quantized, tmp_path / "odd", {k: v * np.float32(1.001) for k, v in floats.items()})

    def arrays(**options):
        folder = ModelFolder.open(written.quantized).with_codes(CodeSupport(formats=frozenset(["int4"]), **options))
        state = nnx.to_flat_state(nnx.state(folder.load(jnp.dtype("float32"))))
        return {".".join(map(str, path)): leaf[...] for path, leaf in state}

    with Engine(str(written.quantized), **native) as engine:
        dtypes = {
            leaf.dtype for path, leaf in nnx.to_flat_state(engine.components.served.arrays) if "_scale" in path[-1]
        }
        assert dtypes == {jnp.dtype(jnp.bfloat16)}
        engine.update_weights_from_disk(same)
        with pytest.raises(
            WeightsMismatchError, match=r"the scales of .* hold .*, and bfloat16, in which they are served"
        ):
            engine.update_weights_from_disk(odd)
        wide = arrays()
        name = next(name for name in wide if name.endswith("_scale"))
        with pytest.raises(WeightsMismatchError, match=f"{name}: float32.* for bfloat16"):
            engine.update_weights(arrays())
        engine.update_weights(wide, copy=True)
        with pytest.raises(WeightsMismatchError, match=f"state has {name} in float32, and bfloat16, .* rounds it"):
            engine.update_weights(wide | {name: wide[name] * 1.001}, copy=True)
        engine.update_weights(arrays(takes_bf16_scales=True))
        assert_near(answers(engine), expected)
    with Engine(str(odd), **native) as engine:
        engine.update_weights_from_disk(written.quantized)  # float32 holds all scales
        assert_near(answers(engine), expected)


@pytest.mark.parametrize("halves", [GPT_OSS], indirect=True)
@pytest.mark.parametrize("scale", [0.75, 2.0**66])
def test_scales_of_mxfp4_that_kernels_do_not_take_are_refused(halves, scale):
    """The format has powers of two alone, and kernels multiply codes by them in bfloat16."""
    written, _, _ = halves
    with Engine(str(written.quantized), **ARRAY_CODE) as engine:
        before = answers(engine)
        folder = ModelFolder.open(written.quantized).with_codes(CodeSupport(formats=frozenset(["e2m1"])))
        leaves = nnx.to_flat_state(nnx.state(folder.load(jnp.dtype("float32"))))
        served = {".".join(map(str, path)): leaf[...] for path, leaf in leaves}
        name = next(name for name in served if name.endswith("_scale"))
        wrong = served | {name: served[name].at[0, 0, 0].set(scale)}
        for how in (dict(), dict(copy=True)):
            with pytest.raises(WeightsMismatchError, match=f"invalid scales: {name}; expected scales of MXFP4"):
                engine.update_weights(wrong, **how)
        assert answers(engine) == before
        engine.update_weights(served | {name: served[name].at[0, 0, 0].multiply(2)}, copy=True)


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("halves", "ep_size"),
    [rarely("Kimi-K2", 1), rarely("Kimi-K2", 2), (GPT_OSS, 1), rarely(GPT_OSS, 2)],
    indirect=["halves"],
)
def test_shards_of_codes_of_4_bits_answer_as_one_device(halves, ep_size):
    """Width 160 over 2 devices is 80 each, in groups of 16. Shards of experts in tensors of their own, as those of
    Kimi-K2 are: test_shards_of_codes_answer_as_shards_of_numbers."""
    written, _, expected = halves
    with Engine(str(written.quantized), tp_size=2, ep_size=ep_size, **ARRAY_CODE) as engine:
        assert of_codes(engine)
        assert_near(answers(engine), expected)


@pytest.mark.thorough
def test_plain_stacked_experts_are_quantised_to_8_bits(tmp_path):
    """GPT-OSS in plain numbers, whose experts are [E, D, O]: from the folder and from a module alike."""
    written = write(tmp_path, GPT_OSS)
    with Engine(str(written.copy), quantization="fp8_block", **ARRAY_CODE) as engine:
        assert len(of_codes(engine)) == 8
        expected = answers(engine)
    model = ModelFolder.open(written.copy).load(jnp.dtype("float32"))
    with Engine(model=model, quantization="fp8_block", **ARRAY_CODE) as engine:
        assert answers(engine) == expected


def half_precision(written, folder, *, plain_layers=()):
    """The quantised folder as published ones are: its plain tensors are bfloat16, and some layers are plain."""
    tensors, copy = read_tensors(written.quantized), read_tensors(written.copy)
    config = json.loads((written.quantized / "config.json").read_text())
    prefixes = tuple(f"model.layers.{index}." for index in plain_layers)
    if prefixes:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
        tensors |= {name: tensor for name, tensor in copy.items() if name.startswith(prefixes)}
        config["quantization_config"]["modules_to_not_convert"] = [prefix.rstrip(".") for prefix in prefixes]
    wide = [name for name, tensor in tensors.items() if tensor.dtype == np.float32 and "scale" not in name]
    return write_folder(folder, config, tensors | {name: tensors[name].astype(jnp.bfloat16) for name in wide})


def test_scales_do_not_decide_the_dtype_that_is_served(qwen, tmp_path):
    """Many codes have more bytes of scales than there are of plain tensors; in what is quantised no others are left."""
    config = json.loads((qwen.quantized / "config.json").read_text())
    folder = half_precision(qwen, tmp_path / "small")
    coded = ModelFolder.open(folder).with_codes(CodeSupport(formats=frozenset({"e4m3"})))
    assert config["quantization_config"] and coded.config.coded_arrays
    widened = {name: tensor for name, tensor in coded.checkpoint.names().items() if tensor[1] == "float32"}
    assert widened and coded.dtype("auto") == jnp.bfloat16
    plain = write_folder(
        tmp_path / "plain",
        {name: value for name, value in config.items() if name != "quantization_config"},
        {name: tensor.astype(jnp.bfloat16) for name, tensor in read_tensors(qwen.copy).items()},
    )
    options = dict(quantization="fp8_block", moe_backend="tiled", attention_backend="paged")
    model = inspect_model(ServerArgs(model_path=str(plain), **options))
    assert model.dtype == "bfloat16"
    assert "8 arrays of layers served as e4m3 codes" in model.memory_plan[0]
    with Engine(str(plain), **options, **ENGINE) as engine:
        assert len(of_codes(engine)) == 8 and model.memory_plan[0] in engine.memory_plan


@pytest.mark.parametrize("left_out", [pytest.param((0, 2), id="in turns"), rarely((0, 3), id="both ends")])
def test_plain_layers_beside_equal_ones_of_codes_take_pushes(tmp_path, left_out):
    """Layers of codes are blocks of their own, or alternate in one; a trainer has all of them alike."""
    case = sized_case("Qwen3Moe", dict(moe_intermediate_size=320, num_hidden_layers=4, mlp_only_layers=[]))
    oracle = Oracle(dataclasses.replace(case, layer_ids=(0, 1, 2, 3)), tmp_path / "plain")
    names = quantize_folder(oracle.folder, tmp_path / "all", tmp_path / "copy", forms()["fp8 blocks"])
    written = Written(oracle, tmp_path / "all", tmp_path / "copy", names)
    tensors, copy = read_tensors(written.quantized), read_tensors(written.copy)
    config = json.loads((written.quantized / "config.json").read_text())
    prefixes = tuple(f"model.layers.{index}." for index in left_out)
    config["quantization_config"]["modules_to_not_convert"] = [prefix.rstrip(".") for prefix in prefixes]
    mixed = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
    mixed |= {name: tensor for name, tensor in copy.items() if name.startswith(prefixes)}
    folder = write_folder(tmp_path / "mixed", config, mixed)
    plain = nnx.state(ModelFolder.open(written.copy).load(jnp.dtype("float32")))
    other = jax.tree.map(lambda leaf: leaf * 1.25, plain)
    with Engine(str(folder), **ARRAY_CODE) as engine:
        assert len(of_codes(engine)) == 4, "two layers of the four"
        expected = answers(engine)
        engine.update_weights(other)
        assert answers(engine) != expected
        engine.update_weights(plain)
        once = answers(engine)
        assert_near(once, expected)
        given = jax.tree.map(jnp.copy, plain)
        engine.update_weights(given, donate=True)
        assert answers(engine) == once
        assert given["blocks"][0][0]["gate_up"].get_raw_value().is_deleted()
    with Engine(str(folder), quantization="fp8_block", **ARRAY_CODE) as engine:
        assert len(of_codes(engine)) == 4, "all layers alike, in one block"


@pytest.mark.parametrize("name", ["GraniteMoe", *map(rarely, ("Qwen3VLMoe", "Llama4", "GptOss", "Qwen3Next"))])
def test_a_folder_and_a_push_of_its_weights_are_quantised_alike(tmp_path, name):
    """Also stacks of experts [E, I, O], and matrices of fewer than 128 inputs or outputs."""
    folder = Oracle(CASES[name], tmp_path / "plain").folder
    state = nnx.state(ModelFolder.open(folder).load(jnp.dtype("float32")))
    with Engine(str(folder), quantization="fp8_block", **ARRAY_CODE) as engine:
        loaded = answers(engine)
        engine.update_weights(jax.tree.map(lambda leaf: leaf * 1.25, state))
        assert answers(engine) != loaded
        engine.update_weights(state)
        assert answers(engine) == loaded


def test_codes_are_not_exported_as_numbers(qwen):
    folder = ModelFolder.open(qwen.quantized).with_codes(CodeSupport(formats=frozenset({"e4m3"})))
    with pytest.raises(ValueError, match="the model's matrices are codes"):
        hugging_face_tensors(folder.load(jnp.dtype("float32")), folder.sources)


@pytest.mark.thorough
@pytest.mark.devices(4)
def test_data_ranks_serve_codes(qwen):
    sizes = dict(tp_size=4, dp_size=2, **ARRAY_CODE)
    with Engine(str(qwen.quantized), quantization="none", **sizes) as engine:
        expected = answers(engine)
    with Engine(str(qwen.quantized), **sizes) as engine:
        assert of_codes(engine)
        assert_near(answers(engine), expected)
