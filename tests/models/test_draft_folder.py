"""Folders of EAGLE heads: what is refused, and which layers of the target a head reads."""

import json
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.eagle_heads import D, HeadCase, V, eagle3_case, eagle_case, target_config
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.models.drafts.draft_folder import DraftFolder, read_draft_config
from routed_experts.models.drafts.tapped_layers import chosen_outputs, tapped_outputs

FLOAT32 = jnp.dtype("float32")


def load_head(path, **how):
    return DraftFolder.open(path, target_config(), **how).load(FLOAT32)


IDS = "eagle_aux_hidden_state_layer_ids"


def refusal(folder, *, target=None, **how) -> str:
    """The one line that a folder is refused with, before a weight is loaded."""
    with pytest.raises(CheckpointError) as caught:
        DraftFolder.open(folder, target or target_config(), **how)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def with_tensors(case: HeadCase, drop: tuple[str, ...] = (), **tensors) -> HeadCase:
    names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    retained = {name: tensor for name, tensor in case.tensors.items() if name not in drop}
    return HeadCase(case.config, retained | names)


def test_a_missing_folder_is_refused(tmp_path):
    assert "no checkpoint folder" in refusal(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "config.json does not exist" in refusal(tmp_path / "empty")


def test_a_folder_without_weights_is_refused(tmp_path):
    path = eagle3_case().write(tmp_path / "head")
    (path / "model.safetensors").unlink()
    assert "holds neither model.safetensors" in refusal(path)


def test_pickled_weights_are_refused_with_the_line_that_converts_them(tmp_path):
    path = eagle3_case().write(tmp_path / "head")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    message = refusal(path)
    assert "pytorch_model.bin" in message and "save_file(torch.load('pytorch_model.bin', weights_only=True)" in message
    (path / "pytorch_model.bin").rename(path / "model.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"")
    DraftFolder.open(path, target_config())  # safetensors beside it: the pickle is left alone


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architectures=['Qwen3MoeForCausalLM'] is not an EAGLE head"),
        ({"architectures": ["LlamaForCausalLM"]}, "expected LlamaForCausalLMEagle3: it has draft_vocab_size"),
        ({"architectures": None}, "architectures=None is not an EAGLE head"),
        ({"architectures": [{}]}, "architectures=[{}] is not an EAGLE head"),
        ({"architectures": {"a": 1}}, "architectures={'a': 1} is not an EAGLE head"),
        ({"architectures": ["MedusaModel"]}, "holds Medusa"),
        ({"architectures": None, "medusa_num_heads": 4}, "holds Medusa (by medusa_num_heads)"),
        ({"architectures": ["DFlashDraftModel"]}, "holds DFlash"),
        ({"architectures": ["DSparkDraftModel"]}, "holds DSpark"),
        ({"architectures": ["PEagleLlamaForCausalLM"]}, "holds P-EAGLE"),
        ({"parallel_drafting": True}, "holds P-EAGLE (by parallel_drafting)"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "holds an MLP speculator"),
        ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "holds an LSTM speculator"),
        ({"model_type": "mlp_speculator"}, "holds an MLP speculator"),
        ({"architectures": ["EagleSpeculator"]}, "an EAGLE-1 head in the speculators format"),
        ({"auto_map": {"": "code.Head"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config of quant_method='gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "of quant_method='fp8'; expected plain bfloat16"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False; expected true"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state=False; expected true"),
        ({"norm_before_fc": True}, "norm_before_fc=True; expected false"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True; expected false"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2; expected 1"),
        ({"draft_vocab_size": V + 1}, f"draft_vocab_size={V + 1}; expected an integer at least 1 and at most {V}"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1; expected a number of at least 0"),
        ({"head_dim": 2**20}, "head_dim=1048576; expected an integer at least 2 and at most 16384"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({IDS: [1, 2, 3]}, "as at the top level"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_name(tmp_path, changes, words):
    case = eagle3_case()
    path = HeadCase(case.config | changes, case.tensors).write(tmp_path / "head")
    assert words in refusal(path)


def test_a_number_of_layers_that_no_head_has_is_refused_before_they_are_counted(tmp_path):
    case = eagle_case()
    path = HeadCase(case.config | {"num_hidden_layers": 10**25}, case.tensors).write(tmp_path / "head")
    assert f"num_hidden_layers={10**25}" in refusal(path)


def test_a_path_that_the_system_cannot_have_is_no_folder():
    with pytest.raises(CheckpointError, match=r"no checkpoint folder 'x+'\.\.\. \(5000 characters\)"):
        DraftFolder.open("x" * 5000, target_config())


@pytest.mark.parametrize("case", [eagle3_case(), eagle_case()], ids=["eagle 3", "eagle 1"])
def test_a_head_of_another_target_is_refused_with_both_numbers(tmp_path, case):
    path = case.write(tmp_path / "head")
    message = refusal(path, target=target_config(hidden_size=24))
    assert f"hidden_size={D}" in message and "hidden_size of the target is 24" in message
    message = refusal(path, target=target_config(vocab_size=50))
    assert f"vocab_size={V}" in message and "vocab_size of the target is 50" in message


CASES = {
    "eagle 3": eagle3_case(draft_vocab_size=17, fc_norm=True, attention_bias=True),
    "a wide target": eagle3_case(own_embedding=True, target_hidden_size=24),
    "eagle 1": eagle_case(num_hidden_layers=2, copied_embedding=False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_that_is_missing_or_misshapen_is_refused_by_name(tmp_path, name):
    case, target = CASES[name], target_config(CASES[name].config.get("target_hidden_size", D))
    for tensor, array in case.tensors.items():
        if tensor != "t2d":
            path = with_tensors(case, drop=(tensor,)).write(tmp_path / "head")
            assert re.search(rf"1 missing \({re.escape(tensor)}\)", refusal(path, target=target))
        wider = np.concatenate([array, array[:1]])
        path = HeadCase(case.config, case.tensors | {tensor: wider}).write(tmp_path / "head")
        message = refusal(path, target=target)
        assert tensor in message and f"{len(array) + 1}" in message and f"{len(array)}" in message


@pytest.mark.parametrize(
    ("case", "tensor", "words"),
    [
        (eagle3_case(), "midlayer.self_attn.q_norm.weight", "1 unexpected (midlayer.self_attn.q_norm.weight)"),
        (eagle3_case(), "midlayer.self_attn.q_proj.bias", "1 unexpected"),
        (eagle3_case(), "fc.bias", "1 unexpected"),
        (eagle3_case(), "layers.1.mlp.up_proj.weight", "1 unexpected"),
        (eagle3_case(), "mask_hidden", "holds P-EAGLE (by the tensor mask_hidden)"),
        (eagle3_case(), "layers.0.hidden_norm.weight", "both midlayer.hidden_norm.weight and layers.0.hidden_norm"),
        (eagle3_case(), "model.norm.weight", "both"),
        (eagle_case(), "layers.0.input_layernorm.weight", "1 unexpected"),
        (eagle_case(bias=False), "fc.bias", "1 unexpected"),
        (eagle_case(), "norm.weight", "1 unexpected"),
        (eagle_case(), "embed_tokens.weight", "1 misshapen"),
    ],
)
def test_a_surplus_tensor_is_refused_by_name(tmp_path, case, tensor, words):
    path = HeadCase(case.config, case.tensors | {tensor: np.zeros((3, 3), np.float32)}).write(tmp_path / "head")
    assert words in refusal(path)


def test_a_head_with_streams_of_another_number_of_layers_is_refused_with_both_shapes(tmp_path):
    path = eagle3_case(streams=2).write(tmp_path / "head")
    assert f"fc.weight is [{D}, {2 * D}], expected [{D}, {3 * D}]" in refusal(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d2t, t2d: (np.where(np.arange(17) == 16, V, d2t), t2d), "expected one below 40"),
        (lambda d2t, t2d: (d2t - 1 - d2t[0], t2d), "the target's id -1"),
        (lambda d2t, t2d: (-np.arange(17), t2d), "maps 17 draft ids to 1 ids"),
        (lambda d2t, t2d: (d2t, np.roll(t2d, 1)), "agree"),
        (lambda d2t, t2d: (d2t, np.ones(V, bool)), "t2d marks 40"),
        (lambda d2t, t2d: (d2t + np.arange(17), t2d), "expected"),  # ids in place of differences
        (lambda d2t, t2d: (d2t.astype(np.float32), t2d), "d2t is float32 [17], expected I32 or I64 [17]"),
        (lambda d2t, t2d: (d2t[:-1], t2d), "d2t is I64 [16], expected I32 or I64 [17]"),
        (lambda d2t, t2d: (d2t, t2d[:-1]), "t2d is BOOL [39]"),
    ],
)
def test_a_broken_map_of_ids_is_refused(tmp_path, change, words):
    case = eagle3_case(draft_vocab_size=17)
    d2t, t2d = change(case.tensors["d2t"], case.tensors["t2d"])
    assert words in refusal(with_tensors(case, d2t=d2t, t2d=t2d).write(tmp_path / "head"))


def test_headers_are_checked_before_the_map_of_ids_is_read(tmp_path):
    case = eagle3_case(draft_vocab_size=17)
    broken = with_tensors(case, d2t=np.full(17, V), fc__weight=np.zeros((2, 2), np.float32))
    message = refusal(broken.write(tmp_path / "head"))
    assert "fc.weight is [2, 2]" in message and "d2t" not in message


def test_a_map_that_renames_ids_needs_a_head(tmp_path):
    ids = np.roll(np.arange(V), 1) - np.arange(V)
    case = with_tensors(eagle3_case(own_head=False), d2t=ids, t2d=np.ones(V, bool))
    assert "no lm_head.weight" in refusal(case.write(tmp_path / "head"))


def test_draft_ids_are_mapped_to_ids_of_the_target(tmp_path):
    case = eagle3_case(draft_vocab_size=17)
    head = load_head(case.write(tmp_path / "head"))
    ids = head.target_ids()
    assert ids is not None and ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, np.flatnonzero(case.tensors["t2d"]))
    same = with_tensors(eagle3_case(), d2t=np.zeros(V, np.int64), t2d=np.ones(V, bool))
    assert load_head(same.write(tmp_path / "same")).target_ids() is None
    bare = with_tensors(case, drop=("t2d",))
    assert DraftFolder.open(bare.write(tmp_path / "bare"), target_config()).token_ids is not None


def test_an_index_of_several_files_is_read(tmp_path):
    path = eagle3_case().write(tmp_path / "head")
    (path / "model.safetensors").rename(path / "part.safetensors")
    names = dict.fromkeys(eagle3_case().tensors, "part.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert load_head(path).tapped_layers == (1, 3, 6)


def test_the_config_alone_can_be_read(tmp_path):
    path = eagle3_case(draft_vocab_size=17, attention_bias=True).write(tmp_path / "head", speculators=True)
    (path / "model.safetensors").unlink()
    config = read_draft_config(path)
    assert config.hidden_size == D and config.vocab_size == V and config.draft_vocab_size == 17
    assert config.layer.attention.bias_in and config.layer.attention.bias_out and config.cache.num_layers == 1


def test_arrays_are_placed_and_cast_as_asked(tmp_path):
    device = jax.local_devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    case = eagle3_case(draft_vocab_size=17)
    folder = DraftFolder.open(case.write(tmp_path / "head"), target_config())
    head = folder.load(jnp.dtype("bfloat16"), sharding=sharding)
    shapes = folder.shapes(jnp.dtype("bfloat16"))
    leaves, expected = jax.tree.leaves(nnx_state(head)), jax.tree.leaves(shapes)
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in expected]
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    assert all(leaf.sharding == sharding for leaf in leaves)


def nnx_state(head):
    return nnx.split(head)[1]


@pytest.mark.parametrize(
    ("ids", "outputs"),
    [
        ((1, 3, 6), (1, 3, 6)),
        ((2, 4, 7), (1, 3, 6)),
        ((2, 4, 8), (1, 3, 7)),  # the input of a layer behind the last one
        ((1, 4, 7), (1, 4, 7)),
        ((3, 1, 2), (2, 0, 1)),
        ((1,), (1,)),
    ],
)
def test_both_spellings_of_layers_name_outputs(ids, outputs, caplog):
    with caplog.at_level(logging.WARNING):
        assert tapped_outputs(ids, 8, where="config.json") == outputs
    assert not caplog.records


@pytest.mark.parametrize("ids", [(1, 3, 8), (2, 4, 9), (0, 3, 6), (2, -1, 3)])
def test_layers_that_the_target_lacks_are_refused(ids):
    with pytest.raises(CheckpointError, match="8 layers lacks"):
        tapped_outputs(ids, 8, where="config.json")


@pytest.mark.parametrize("changes", [{"eagle_config": None}, {"eagle_config": {IDS: []}}])
def test_layers_that_are_not_named_are_guessed_with_a_warning(tmp_path, caplog, changes):
    path = eagle3_case(**changes).write(tmp_path / "head")
    with caplog.at_level(logging.WARNING):
        folder = DraftFolder.open(path, target_config(num_layers=32))
    assert folder.config.tapped_layers == (1, 15, 28)
    assert "guessed the outputs of layers 1, 15, 28 of 32" in caplog.text and "speculative_eagle_layers" in caplog.text
    assert "too few to guess" in refusal(path, target=target_config(num_layers=3))


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_config": {IDS: [1, 3, 6]}},
        {"eagle_config": {IDS: [2, 4, 7]}},
        {"eagle_config": None, IDS: [2, 4, 7]},
        {"eagle_config": {IDS: [1, 3, 6]}, IDS: [1, 3, 6]},
    ],
)
def test_a_folder_names_its_layers_in_either_place_and_spelling(tmp_path, changes):
    head = load_head(eagle3_case(**changes).write(tmp_path / "head"))
    assert head.tapped_layers == (1, 3, 6)


def test_chosen_layers_replace_those_of_the_folder(tmp_path, caplog):
    path = eagle3_case(eagle_config=None).write(tmp_path / "head")
    with caplog.at_level(logging.WARNING):
        head = load_head(path, layers=[2, 4, 7])
    assert head.tapped_layers == (2, 4, 7) and not caplog.records
    for wrong in ([], [1, 2, 8], [-1, 2, 3]):
        with pytest.raises(ConfigError, match=r"from 0 to 7"):
            chosen_outputs(wrong, 8)
    assert f"expected [{D}, {2 * D}]" in refusal(path, layers=[1, 2])
    eagle = eagle_case().write(tmp_path / "eagle")
    with pytest.raises(ConfigError, match="reads no layers"):
        DraftFolder.open(eagle, target_config(), layers=[1, 2, 3])
