"""Checkpoints whose tensors differ in dtype run in the one that most of their bytes have; a module whose arrays differ
is refused when an engine is built."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from oracles.families import CASES, Oracle
from routed_experts import Engine
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.models.model_folder import ModelFolder

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

ENGINE = dict(
    precompile_bs_paddings=(2,), precompile_token_paddings=(16,), page_size=8, max_total_tokens=128, context_length=64
)
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}


def cast_checkpoint(folder, dtype_of):
    file = folder / "model.safetensors"
    tensors = {name: tensor.astype(dtype_of(name)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def half_but_norms_and_routers(name):
    """As some published checkpoints are: few large tensors in half precision, many small ones in single."""
    return (
        np.float32
        if "norm" in name or "gate.weight" in name or "router" in name or "bias" in name
        else ml_dtypes.bfloat16
    )


def is_wide(path):
    """Numbers that choose experts, or that a state decays by, are float32 whatever the model's dtype is."""
    return path[-1] in ("selection_bias", "dt_bias", "a_log")


@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "Ernie4_5_Moe", "Qwen3Next", "GptOss"])
def test_a_checkpoint_of_two_dtypes_is_cast_to_that_of_most_of_its_bytes(tmp_path, name):
    folder = Oracle(CASES[name], tmp_path).folder
    whole = nnx.to_flat_state(nnx.state(ModelFolder.open(folder).load(jnp.dtype(jnp.float32))))
    tensors = cast_checkpoint(folder, half_but_norms_and_routers)
    dtypes = [tensor.dtype for tensor in tensors.values()]
    assert dtypes.count(np.float32) and dtypes.count(ml_dtypes.bfloat16)
    opened = ModelFolder.open(folder)
    assert opened.dtype("auto") == jnp.bfloat16
    for (path, expected), (_, leaf) in zip(
        whole, nnx.to_flat_state(nnx.state(opened.load(opened.dtype("auto")))), strict=True
    ):
        assert leaf.dtype == (
            jnp.float32 if is_wide(path) or (name[:5] == "Ernie" and path[-1] == "router") else jnp.bfloat16
        ), path
        if path[-1] != "a_log":  # which the checkpoint has in half precision here
            assert np.array_equal(leaf[...], expected[...].astype(leaf.dtype)), path


def test_a_checkpoint_of_two_dtypes_runs_on_the_best_kernels(tmp_path):
    folder = Oracle(CASES["Qwen3Moe"], tmp_path).folder
    cast_checkpoint(folder, half_but_norms_and_routers)
    kwargs = dict(input_ids=[5, 6, 7, 8, 9], sampling_params=GREEDY)
    with Engine(str(folder), skip_tokenizer_init=True, enable_return_routed_experts=True, **ENGINE) as engine:
        mixed = engine.generate(**kwargs)["output_ids"]
    cast_checkpoint(folder, lambda name: ml_dtypes.bfloat16)
    with Engine(str(folder), skip_tokenizer_init=True, enable_return_routed_experts=True, **ENGINE) as engine:
        assert engine.generate(**kwargs)["output_ids"] == mixed


def test_many_small_tensors_do_not_outvote_few_large_ones(tmp_path):
    folder = Oracle(CASES["GptOss"], tmp_path).folder  # experts are stacked: few tensors
    tensors = cast_checkpoint(
        folder, lambda name: ml_dtypes.bfloat16 if "experts" in name and "bias" not in name else np.float32
    )
    half = [tensor for tensor in tensors.values() if tensor.dtype == ml_dtypes.bfloat16]
    assert len(half) < len(tensors) / 2
    cast = sum(tensor.nbytes for tensor in half) > sum(tensor.nbytes for tensor in tensors.values()) / 2
    assert ModelFolder.open(folder).dtype("auto") == (jnp.bfloat16 if cast else jnp.float32)


@pytest.mark.parametrize("moe_backend", ["auto", "reference"])
def test_a_module_of_two_dtypes_is_refused_when_an_engine_is_built(tmp_path, moe_backend):
    model = ModelFolder.open(Oracle(CASES["DeepseekV3"], tmp_path).folder).load(jnp.dtype(jnp.bfloat16))
    model.norm = nnx.Param(model.norm[...].astype(jnp.float32))
    with pytest.raises(
        ConfigError,
        match=r"bfloat16 \(blocks.*, \.\.\.\); 1 are float32 \(norm, \.\.\.\); expected one of .*; cast: nnx",
    ) as caught:
        build_engine(ServerArgs(moe_backend=moe_backend, **ENGINE), model=model)
    assert "\n" not in str(caught.value)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model)))  # as the error advises
    build_engine(ServerArgs(moe_backend="reference", **ENGINE), model=model)


def test_a_module_of_a_dtype_that_no_kernel_computes_in_is_refused(tmp_path):
    model = ModelFolder.open(Oracle(CASES["Llama"], tmp_path).folder).load(jnp.dtype(jnp.float32))
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.int8), nnx.state(model)))
    with pytest.raises(ConfigError, match=r"are int8 .* expected one of bfloat16, float16, float32"):
        build_engine(ServerArgs(**ENGINE), model=model)
