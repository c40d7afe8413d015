"""Engines whose keys and values are e4m3 codes with the scales of a checkpoint, against whole sequences in NumPy whose
keys and values are rounded as scale * e4m3(number / scale); and powers of two against weights that hold them."""

import dataclasses
import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from oracles.draft_offers import answers as sampled_answers
from oracles.eagle_heads import LAYERS as HEAD_LAYERS
from oracles.eagle_heads import D, V, eagle3_case
from oracles.full_sequence import FullSequence
from routed_experts import ConfigError, Engine, SpeculativeConfig, extract_routed_experts_from_meta_info
from routed_experts.core.errors import CheckpointError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.models.model_folder import ModelFolder
from support.family_folders import VOCAB_SIZE as FAMILY_VOCAB_SIZE
from support.family_folders import write_family
from support.fast_compile import fast_compilation
from support.process_groups import group, one_process
from support.quantized_checkpoints import forms, quantize_folder, read_tensors, rewrite_folder
from support.quantized_families import ENGINE as SMALL_ENGINE
from support.tiny_checkpoint import VOCAB_SIZE, tiny_config, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

LAYERS = 4  # the first one dense: a block of its own
AT = "model.layers.{}.self_attn.{}"
SCALES = np.array([[0.011, 0.0021], [0.9, 0.004], [0.023, 1.1], [0.006, 0.0013]], np.float32)
POWERS = np.array([[-6, -9], [-1, -8], [-5, 1], [-7, -10]])
CODES = dict(kv_cache_dtype="fp8_e4m3")
ENGINE = SMALL_ENGINE | dict(max_total_tokens=512, context_length=96)
ARRAY_CODE = dict(moe_backend="tiled", attention_backend="paged")
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
PROMPTS = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist() for seed, length in ((0, 40), (1, 7))]
over_backends = pytest.mark.parametrize("kernels", [{}, ARRAY_CODE], ids=["native", "array code"])


def scale_tensors(scales):
    return {
        AT.format(layer, name): np.float32(value).reshape(1)
        for layer, pair in enumerate(scales)
        for name, value in zip(("k_scale", "v_scale"), pair, strict=True)
    }


@dataclasses.dataclass
class Folders:
    """The tiny MoE in e4m3 codes without scales of keys and values, with SCALES, with powers of two, and with these in
    the weights instead; and the numbers of the first one."""

    small: object
    scaled: object
    powers: object
    folded: object
    copy: object


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path / "plain", tokenizer=False)
    quantize_folder(path / "plain", path / "small", path / "copy", forms()["fp8 blocks"])
    tensors, folded = read_tensors(path / "small"), {}
    for layer, (keys, values) in enumerate(np.exp2(POWERS.astype(np.float32))):
        factors = {"q_norm.weight": keys, "k_norm.weight": 1 / keys}
        factors |= {"v_proj.weight_scale_inv": 1 / values, "o_proj.weight_scale_inv": values}
        for name, factor in factors.items():
            full = AT.format(layer, name)
            folded[full] = (tensors[full] * factor).astype(tensors[full].dtype)
    return Folders(
        small=path / "small",
        scaled=rewrite_folder(path / "small", path / "scaled", scale_tensors(SCALES)),
        powers=rewrite_folder(path / "small", path / "powers", scale_tensors(np.exp2(POWERS.astype(np.float32)))),
        folded=rewrite_folder(path / "small", path / "folded", folded),
        copy=path / "copy",
    )


def answers(engine, prompts=PROMPTS):
    """Tokens, logprobs and rows, to the bit."""
    results = [
        engine.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True, return_routed_experts=True)
        for prompt in prompts
    ]
    return [
        (
            result["output_ids"],
            [entry[0] for entry in result["meta_info"]["output_token_logprobs"]],
            extract_routed_experts_from_meta_info(result).tobytes(),
        )
        for result in results
    ]


class RoundedSequence(FullSequence):
    """The same with keys and values that are rounded as they are stored."""

    def __init__(self, config, tensors, scales):
        super().__init__(config, tensors)
        self.scales = scales.astype(np.float64)

    def _stored(self, layer, k, v):
        of_keys, of_values = self.scales[layer]
        return self._rounded(k, of_keys), self._rounded(v, of_values)

    @staticmethod
    def _rounded(numbers, scale):
        codes = np.clip(numbers / scale, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        return scale * codes.astype(np.float64)


@over_backends
@fast_compilation()
def test_scores_are_those_of_whole_sequences_in_numpy(folders, kernels):
    """Teacher-forced on the rows that ran. A scale of another layer, or that of values for keys, is seen."""
    with Engine(str(folders.scaled), dtype="float32", **ENGINE, **CODES, **kernels) as engine:
        results = [engine.score(prompt) for prompt in PROMPTS]
    tensors = load_file(folders.copy / "model.safetensors")

    def distance(scales):
        oracle, far = RoundedSequence(tiny_config(), tensors, scales), []
        for prompt, result in zip(PROMPTS, results, strict=True):
            judged = oracle.run(prompt, result.routed_experts.ids).logprobs
            expected = judged[np.arange(len(prompt) - 1), prompt[1:]]
            far.append(np.abs(result.logprobs - expected).max())
        return max(far)

    assert distance(SCALES) < 1e-3
    for wrong in (np.ones_like(SCALES), np.roll(SCALES, 1, axis=0), SCALES[:, ::-1]):
        assert distance(wrong) > 2e-2


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        pytest.param("float32", {}, id="float32-native"),
        pytest.param("bfloat16", {}, id="bfloat16-native"),
        pytest.param("float32", ARRAY_CODE, id="float32-array code", marks=pytest.mark.thorough),
        pytest.param("bfloat16", ARRAY_CODE, id="bfloat16-array code"),
    ],
)
@fast_compilation()
def test_powers_of_two_are_those_in_the_weights_by_the_bit(folders, kernels, dtype):
    actual = []
    for folder in (folders.powers, folders.folded, folders.small):
        with Engine(str(folder), dtype=dtype, **ENGINE, **CODES, **kernels) as engine:
            actual.append(answers(engine))
    assert actual[0] == actual[1]
    assert actual[0] != actual[2]


def test_a_rollout_is_its_score_and_a_cached_prefix_and_a_cut_change_no_bit(folders):
    for sizes in ({}, {"chunked_prefill_size": 32, "max_prefill_tokens": 32}):
        with Engine(str(folders.scaled), dtype="bfloat16", **ENGINE, **CODES, **sizes) as engine:
            cold, cached = answers(engine), answers(engine)
            assert cold == cached
            for prompt, (tokens, logprobs, _) in zip(PROMPTS, cold, strict=True):
                (scored,) = engine.score([prompt + tokens])
                assert np.array_equal(scored.logprobs[len(prompt) - 1 :].astype(np.float32), np.float32(logprobs))
                again = engine.score(prompt + tokens, routed=scored.routed_experts)
                assert np.array_equal(again.logprobs, scored.logprobs)


@pytest.mark.usefixtures("fast_in_every_run")  # test_kv_cache_dtype.py has programs as they are shipped
def test_drafts_change_no_answer(folders):
    plain = dict(**ENGINE, **CODES, dtype="float32", deterministic=True)
    with Engine(str(folders.scaled), **plain) as engine:
        expected = answers(engine, [prompt * 2 for prompt in PROMPTS])
    drafts = SpeculativeConfig(algorithm="NGRAM", adaptive=False)
    with Engine(str(folders.scaled), **plain, speculative=drafts) as engine:
        assert answers(engine, [prompt * 2 for prompt in PROMPTS]) == expected
        assert engine.stats().speculative.requests.proposed > 0


@pytest.mark.usefixtures("fast_in_every_run")
def test_a_head_that_reads_layers_changes_no_answer(tmp_path):
    """Its target runs layer by layer, the plain engine in one kernel."""
    write_tiny_checkpoint(
        tmp_path / "plain", tokenizer=False, vocab_size=V, num_hidden_layers=HEAD_LAYERS, hidden_size=D
    )
    quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    scales = scale_tensors(np.tile(SCALES, (HEAD_LAYERS, 1))[:HEAD_LAYERS])
    scaled = rewrite_folder(tmp_path / "small", tmp_path / "scaled", scales)
    config = SpeculativeConfig(
        algorithm="EAGLE3", draft_model_path=str(eagle3_case().write(tmp_path / "head")), adaptive=False
    )
    prompts, actual = [[token % V for token in prompt] for prompt in PROMPTS], []
    for how in ({}, {"speculative": config}):
        with Engine(str(scaled), **ENGINE, **CODES, deterministic=True, **how) as engine:
            actual.append(sampled_answers(engine, prompts, 1.0, new=16)[0])
    assert actual[0] == actual[1]


@fast_compilation()
def test_scales_are_not_read_unless_codes_are_asked_for(folders, caplog):
    with caplog.at_level(logging.INFO), Engine(str(folders.scaled), dtype="float32", **ENGINE) as engine:
        actual = answers(engine)
    assert "8 scales of keys and values are read where kv_cache_dtype='fp8_e4m3'" in caplog.text
    with Engine(str(folders.small), dtype="float32", **ENGINE) as engine:
        assert answers(engine) == actual


@fast_compilation()
def test_pushes_leave_the_scales_as_they_are(folders):
    own = dict(**ENGINE, **CODES, dtype="float32", quantization="none")
    with Engine(str(folders.scaled), **own) as engine:
        expected = answers(engine)
        state = nnx.state(ModelFolder.open(folders.copy).load(jnp.dtype("float32")))
        engine.update_weights(state)
        assert answers(engine) == expected
        for folder in (folders.copy, folders.small, folders.powers):
            engine.update_weights_from_disk(folder)
            assert answers(engine) == expected, "the same weights, and the scales of the first checkpoint"


@fast_compilation()
def test_experts_on_the_host_attend_with_the_scales(folders):
    own = dict(**ENGINE, **CODES, dtype="float32", quantization="none")
    with Engine(str(folders.scaled), **own) as engine:
        expected = [engine.score(prompt).logprobs for prompt in PROMPTS]
    with Engine(str(folders.scaled), experts=ExpertOffloadConfig(kt_num_gpu_experts=4), **own) as engine:
        for prompt, logprobs in zip(PROMPTS, expected, strict=True):
            np.testing.assert_allclose(engine.score(prompt).logprobs, logprobs, atol=2e-3)


@pytest.mark.devices(2)
@fast_compilation()
def test_two_devices_have_the_scales_of_one(folders):
    scores = []
    for devices in (1, 2):
        with Engine(str(folders.scaled), tp_size=devices, **ENGINE, **CODES, **ARRAY_CODE) as engine:
            scores.append(engine.score([PROMPTS[0]])[0].logprobs)
    np.testing.assert_allclose(*scores, atol=5e-3)


@pytest.mark.thorough  # test_two_devices_have_the_scales_of_one has the shards
def test_two_processes_have_the_scales_of_one(folders):
    engine, asked = {"deterministic": True, **CODES}, dict(prompts=PROMPTS, params=GREEDY, logprob_start_len=0)
    with (
        group(folders.scaled, engine, lazy=True) as members,
        one_process(folders.scaled, engine, devices=2, lazy=True) as single,
    ):
        single.wait_ready()
        assert members[0].call("generate", **asked) == single.call("generate", **asked)
        assert (members[0].end(), members[1].exit_code(), single.end()) == (0, 0, 0)


def test_the_plan_says_where_scales_come_from(folders):
    sizes = dict(dtype="bfloat16", **CODES)
    lines = [inspect_model(ServerArgs(model_path=str(f), **sizes)).memory_plan for f in (folders.scaled, folders.small)]
    of_pages = [next(line for line in plan if line.startswith("KV pages")) for plan in lines]
    assert of_pages[0].endswith(", e4m3 with the checkpoint's scales") and of_pages[1].endswith(", e4m3")


@pytest.mark.parametrize(
    "kernels", [pytest.param({}, id="native"), pytest.param(ARRAY_CODE, id="array code", marks=pytest.mark.thorough)]
)
def test_rows_of_several_shapes_have_the_scales_of_their_layers(tmp_path, kernels):
    """Powers of two, or these in the norms of queries and keys."""
    write_family(tmp_path / "plain", "gemma4")
    quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    stem = ModelFolder.open(tmp_path / "small").config.stem
    tensors, powers, folded = read_tensors(tmp_path / "small"), {}, {}
    for layer, keys in enumerate(np.float32([2**-6, 2**-1, 2**-5])):
        at = f"{stem}layers.{layer}.self_attn"
        powers |= {f"{at}.k_scale": keys.reshape(1), f"{at}.v_scale": np.ones(1, np.float32)}
        for name, factor in (("q_norm", keys), ("k_norm", 1 / keys)):
            folded[f"{at}.{name}.weight"] = tensors[f"{at}.{name}.weight"] * factor
    scores = []
    for name, new in (("powers", powers), ("folded", folded), ("plain codes", {})):
        folder = rewrite_folder(tmp_path / "small", tmp_path / name, new)
        with Engine(str(folder), dtype="float32", **ENGINE, **CODES, **kernels) as engine:
            scores.append(engine.score([token % FAMILY_VOCAB_SIZE for token in PROMPTS[0]]).logprobs)
    np.testing.assert_array_equal(scores[0], scores[1])
    assert not np.array_equal(scores[0], scores[2])


def test_bad_scales_stop_the_build_and_inspection(folders, tmp_path):
    bad = {AT.format(2, "k_scale"): np.float32([-1.0])}
    folder = rewrite_folder(folders.scaled, tmp_path / "bad", bad)
    for build in (lambda how: Engine(str(folder), **ENGINE, **how), inspected(folder)):
        with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_scale holds -1\.0; expected a finite"):
            build(CODES)
    inspected(folder)({})


def inspected(folder):
    return lambda how: inspect_model(ServerArgs(model_path=str(folder), **how))


def test_latent_rows_are_refused_with_scales_too(tmp_path):
    write_family(tmp_path / "plain", "deepseek")
    quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    scaled = rewrite_folder(tmp_path / "small", tmp_path / "scaled", scale_tensors(SCALES[:3]))
    with pytest.raises(ConfigError, match=r"with latent attention \(MLA\).*leave kv_cache_dtype out"):
        Engine(str(scaled), **ENGINE, **CODES)
