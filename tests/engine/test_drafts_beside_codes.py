"""Drafts of a model beside a target whose matrices are codes: they change no token, logprob or row, before and after a
push, and the draft model's own numbers are plain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.draft_offers import answers
from oracles.eagle_heads import LAYERS, D, V, eagle3_case, eagle_case
from oracles.families import VOCAB_SIZE
from oracles.predictors import PredictorOracle
from routed_experts import Engine, SpeculativeConfig
from routed_experts.models.decoder.code_selection import CodeSupport
from routed_experts.models.model_folder import ModelFolder
from support.lazy_compile import lazy_compilation
from support.quantized_checkpoints import forms, quantize_folder
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

OPTIONS = dict(
    precompile_bs_paddings=(4,),
    precompile_token_paddings=(32,),
    skip_tokenizer_init=True,
    page_size=8,
    deterministic=True,
    enable_return_routed_experts=True,
    quantization="fp8_block",
)


def observed(folder, vocab, **options):
    """Tokens, logprobs and rows before and after a push, and the arrays of the draft model, if there is one."""
    state = nnx.state(ModelFolder.open(folder).load(jnp.dtype("float32")))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab, length).tolist() for length in (5, 17, 9)]
    with lazy_compilation(), Engine(str(folder), **OPTIONS, **options) as engine:
        assert any(leaf.dtype == jnp.float8_e4m3fn for leaf in jax.tree.leaves(engine.components.served.arrays))
        before, _ = answers(engine, prompts, 1.0, new=10)
        engine.update_weights(jax.tree.map(lambda leaf: leaf * 1.25, state))
        after, _ = answers(engine, prompts, 1.0, new=10)
        assert after != before
        totals, runner = engine.stats().speculative, engine.components.core.runner
        assert totals is None or totals.requests.accepted > 0, "by common noise some drafts of a random model are right"
        return [before, after], None if totals is None else [np.asarray(array) for array in runner._draft_weights]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A plain folder of the heads' sizes, and what an engine with its codes answers without drafts."""
    folder = tmp_path_factory.mktemp("target")
    write_tiny_checkpoint(folder, tokenizer=False, vocab_size=V, num_hidden_layers=LAYERS, hidden_size=D)
    return folder, observed(folder, V)[0]


@pytest.mark.parametrize(
    ("algorithm", "head"),
    [("EAGLE3", eagle3_case), pytest.param("EAGLE", eagle_case, marks=pytest.mark.thorough)],
)
def test_heads_read_a_target_of_codes_and_change_no_answer(target, algorithm, head, tmp_path):
    folder, expected = target
    path = str(head().write(tmp_path))
    config = SpeculativeConfig(algorithm=algorithm, draft_model_path=path, adaptive=False)
    assert observed(folder, V, speculative=config)[0] == expected


def test_a_draft_model_of_a_quantised_folder_is_dequantised_and_changes_no_answer(target, tmp_path):
    """The target drafts for itself, from a folder of codes: its numbers are those of the dequantised copy."""
    folder, expected = target
    assert quantize_folder(folder, tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    config = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=str(tmp_path / "small"), adaptive=False)
    actual, drafts = observed(folder, V, speculative=config)
    assert actual == expected
    copy = nnx.state(ModelFolder.open(tmp_path / "copy").load(jnp.dtype("float32")))
    assert_equal(drafts, jax.tree.leaves(copy))


def test_prediction_layers_beside_codes_are_plain_and_change_no_answer(tmp_path):
    """Of a folder that is quantised as it is loaded; those of a quantised folder are dequantised."""
    plain, small, copy = (tmp_path / name for name in ("plain", "small", "copy"))
    PredictorOracle("Glm4Moe", plain, modules=1)
    expected, _ = observed(plain, VOCAB_SIZE)
    actual, drafts = observed(plain, VOCAB_SIZE, speculative=SpeculativeConfig(algorithm="NEXTN", adaptive=False))
    assert actual == expected
    assert_equal(drafts, predictor_arrays(ModelFolder.open(plain)))
    assert any("eh_proj" in name for name in quantize_folder(plain, small, copy, forms()["fp8 blocks"]))
    coded = ModelFolder.open(small).with_codes(CodeSupport(formats=frozenset({"e4m3"})))
    assert coded.config.coded_arrays
    assert_equal(predictor_arrays(coded), predictor_arrays(ModelFolder.open(copy)))


def predictor_arrays(folder):
    """The arrays of the layers that predict further tokens."""
    return jax.tree.leaves(nnx.state(folder.load_predictor(jnp.dtype("float32"))))


def assert_equal(arrays, expected):
    """The same arrays to the bit."""
    assert len(arrays) == len(expected)
    for array, other in zip(arrays, expected, strict=True):
        assert array.dtype == other.dtype and np.array_equal(array, other)
