"""From a folder to a model: what is refused and the error's words, and that the loaded module holds the checkpoint's
numbers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from routed_experts import Engine
from routed_experts.core.errors import CheckpointError
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.loading.model_source import demo_model_path
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.registry import FAMILIES
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_checkpoint

SMALL = dict(
    num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, hidden_size=16, head_dim=8, intermediate_size=24
)
PLAIN = dict(tokenizer=False, **SMALL)


def load_arrays(folder, dtype="auto"):
    opened = ModelFolder.open(folder)
    state = nnx.state(opened.load(opened.dtype(dtype)))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def rewrite_config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "Qwen3MoeForCausalLm", ""])
def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(tmp_path, architecture):
    folder = write_tiny_checkpoint(tmp_path, **PLAIN)
    rewrite_config(folder, architectures=[architecture])
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(folder)
    assert repr(architecture) in str(caught.value)
    assert all(known in str(caught.value) for known in FAMILIES)


@pytest.mark.parametrize(
    ("keys", "words"),
    [  # a layer has 8 tensors of attention and norms; an MoE layer also a router and 3 an expert, a dense one 3
        (dict(num_hidden_layers=3), ["21 missing", "2.input_layernorm.weight"]),
        (dict(num_hidden_layers=1), ["21 unexpected", "1.input_layernorm.weight"]),
        (
            dict(num_experts=5),
            ["3 missing", "1.mlp.experts.4.gate_proj.weight", "1.mlp.gate.weight is [4, 16], expected [5, 16]"],
        ),
        (
            dict(num_experts=3),
            ["3 unexpected", "1.mlp.experts.3.down_proj.weight", "1.mlp.gate.weight is [4, 16], expected [3, 16]"],
        ),
        (dict(hidden_size=24), ["misshapen", "model.embed_tokens.weight is [313, 16], expected [313, 24]"]),
        (dict(head_dim=4), ["misshapen", "0.self_attn.q_proj.weight is [32, 16], expected [16, 16]"]),
        (dict(num_key_value_heads=4), ["misshapen", "0.self_attn.k_proj.weight is [16, 16], expected [32, 16]"]),
        (dict(mlp_only_layers=[]), ["13 missing", "0.mlp.gate.weight", "3 unexpected", "0.mlp.gate_proj.weight"]),
        (
            dict(decoder_sparse_step=3),
            ["3 missing", "1.mlp.gate_proj.weight", "13 unexpected", "1.mlp.experts.0.up_proj.weight"],
        ),
        (
            dict(moe_intermediate_size=8),
            ["12 misshapen", "1.mlp.experts.0.down_proj.weight is [16, 32], expected [16, 8]"],
        ),
        (dict(vocab_size=400), ["2 misshapen", "lm_head.weight is [313, 16], expected [400, 16]"]),
        (dict(num_local_experts=8), ["num_experts and num_local_experts differ", "[4, 8]"]),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_refused_by_name(tmp_path, keys, words):
    folder = write_tiny_checkpoint(tmp_path, **PLAIN)
    rewrite_config(folder, **keys)
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(folder)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_missing_unexpected_and_misshapen_are_reported_at_once_and_by_the_engine_too(tmp_path):
    config = tiny_config(**SMALL)
    tensors = tiny_tensors(config)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"], tensors["model.norm.weight"]
    tensors |= {
        "model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32),
        "model.layers.1.mlp.gate.weight": np.zeros((16, 4), np.float32),
    }
    tensors["lm_head.weight"] = np.zeros((313, 16), np.int8)
    folder = save(tmp_path, config, tensors)
    messages = []
    for call in (lambda: ModelFolder.open(folder), lambda: Engine(str(folder), skip_tokenizer_init=True)):
        with pytest.raises(CheckpointError) as caught:
            call()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    for words in (
        "2 missing (model.norm.weight, model.layers.1.mlp.experts.2.up_proj.weight)",
        "1 unexpected (model.layers.0.self_attn.q_proj.bias)",
        "1 misshapen (model.layers.1.mlp.gate.weight is [16, 4], expected [4, 16])",
        "lm_head.weight is I8",
    ):
        assert words in messages[0], messages[0]


def test_a_missing_head_is_no_fault_of_a_tied_model_and_an_equal_one_is_surplus(tmp_path):
    tied = write_tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True, **PLAIN)
    assert "head" not in load_arrays(tied)
    config, tensors = tiny_config(tie_word_embeddings=True, **SMALL), tiny_tensors(tiny_config(**SMALL))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    ignored_tensors = save(tmp_path / "surplus", config, tensors)
    assert "head" not in load_arrays(ignored_tensors)
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight"
    ):
        ModelFolder.open(save(tmp_path / "other", config, tensors))
    headless = write_tiny_checkpoint(tmp_path / "headless", tie_word_embeddings=True, **PLAIN)
    rewrite_config(headless, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"1 missing \(lm_head.weight\)"):
        ModelFolder.open(headless)


def test_every_array_holds_the_numbers_of_its_tensors(tmp_path):
    """The oracle joins and transposes in its own code, without the table of names."""
    config = tiny_config(**{**SMALL, "num_hidden_layers": 4, "mlp_only_layers": [1]})
    tensors = tiny_tensors(config)
    arrays = load_arrays(save(tmp_path, config, tensors))
    assert np.array_equal(arrays["embed"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(arrays["head"], tensors["lm_head.weight"].T)
    assert np.array_equal(arrays["norm"], tensors["model.norm.weight"])
    for run, layers in enumerate(([0], [1], [2, 3])):
        for row, layer in enumerate(layers):
            at = f"model.layers.{layer}."
            own = {
                name.removeprefix(at).removesuffix(".weight"): t for name, t in tensors.items() if name.startswith(at)
            }

            def array(name, run=run):
                dense = "dense_" if run == 1 and name in ("gate_up", "down") else ""
                return arrays[f"blocks.{run}.0.{dense}{name}"]

            qkv = np.concatenate([own[f"self_attn.{x}_proj"] for x in "qkv"]).T
            assert np.array_equal(array("qkv")[row], qkv)
            assert np.array_equal(array("out")[row], own["self_attn.o_proj"].T)
            assert np.array_equal(array("input_norm")[row], own["input_layernorm"])
            assert np.array_equal(array("post_norm")[row], own["post_attention_layernorm"])
            for x in "qk":
                assert np.array_equal(array(f"{x}_norm")[row], own[f"self_attn.{x}_norm"])
            experts = ["mlp"] if layer == 1 else [f"mlp.experts.{expert}" for expert in range(4)]
            for expert, mlp in enumerate(experts):
                index = row * len(experts) + expert
                assert np.array_equal(
                    array("gate_up")[index], np.concatenate([own[f"{mlp}.gate_proj"], own[f"{mlp}.up_proj"]]).T
                )
                assert np.array_equal(array("down")[index], own[f"{mlp}.down_proj"].T)
            if layer != 1:
                assert np.array_equal(array("router")[row], own["mlp.gate"].T)


def test_a_sharded_checkpoint_gives_the_same_bits(tmp_path):
    whole = write_tiny_checkpoint(tmp_path / "whole", **PLAIN)
    tensors = tiny_tensors(tiny_config(**SMALL))
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {name: f"model-{at % 3 + 1:05}-of-00003.safetensors" for at, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text((whole / "config.json").read_text())
    left, right = load_arrays(whole), load_arrays(folder)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("expected", ["auto", "float32", "bfloat16", "float16"])
def test_the_dtype_is_the_checkpoints_or_the_requested_one(tmp_path, stored, expected):
    folder = write_tiny_checkpoint(tmp_path, dtype=stored, **PLAIN)
    arrays = load_arrays(folder, expected)
    assert {array.dtype for array in arrays.values()} == {jnp.dtype(stored if expected == "auto" else expected)}
    exact = tiny_tensors(tiny_config(**SMALL), dtype=stored)["model.embed_tokens.weight"]
    assert np.array_equal(arrays["embed"], exact.astype(arrays["embed"].dtype))


def test_auto_is_the_most_common_dtype(tmp_path):
    config, few = tiny_config(**SMALL), tiny_tensors(tiny_config(**SMALL))
    tensors = {name: tensor if "norm" in name else tensor.astype(jnp.bfloat16) for name, tensor in few.items()}
    assert ModelFolder.open(save(tmp_path, config, tensors)).dtype("auto") == jnp.bfloat16


def test_progress_ends_at_the_size_of_the_checkpoint(tmp_path):
    opened, calls = ModelFolder.open(write_tiny_checkpoint(tmp_path, **PLAIN)), []
    opened.load(jnp.dtype(jnp.float32), progress=lambda done, total: calls.append((done, total)))
    size = sum(tensor.nbytes for tensor in tiny_tensors(tiny_config(**SMALL)).values())
    assert calls[-1] == (size, size) and [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_opening_reads_headers_and_loading_names_what_is_damaged(tmp_path):
    """A file cut short inside the last tensor has good headers in front; safetensors reports it when the folder is
    opened."""
    folder = write_tiny_checkpoint(tmp_path, **PLAIN)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
        ModelFolder.open(folder)


def test_demo_is_the_model_of_the_package(tmp_path, monkeypatch):
    assert ModelFolder.open("demo").path == ModelFolder.open(demo_model_path()).path == demo_model_path()
    monkeypatch.chdir(write_tiny_checkpoint(tmp_path / "demo", **PLAIN).parent)
    assert ModelFolder.open("demo").config.num_layers == 2  # a folder of that name comes first
