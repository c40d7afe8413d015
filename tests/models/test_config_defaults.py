"""A key that a config.json leaves out means what transformers takes for it: each key that a family reads, left out and
written out."""

import dataclasses
import json
from collections.abc import Callable

import pytest
import transformers

from oracles.families import CASES, SIZES
from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.registry import FAMILIES

LENGTH = 65_536  # longer than every default window
# a wrong guess of these cannot load: tensors have other shapes, or layers are left over
SHOWN_BY_TENSORS = {"head_dim", "num_key_value_heads", "q_lora_rank", "num_nextn_predict_layers", "num_hidden_layers"}
NAMES = [name for name in CASES if name != "BailingMoeV2"]  # transformers has no config of it


class RecordingDict(dict):
    """Records which keys are read."""

    def __init__(self, values):
        super().__init__(values)
        self.keys_read = set()

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)


def build_config(name):
    case = CASES[name]
    kind = getattr(transformers, case.settings or f"{name}Config")
    config = kind(**{**SIZES, **case.config, "max_position_embeddings": LENGTH})
    family = FAMILIES[case.model or f"{name}ForCausalLM"]
    return kind, json.loads(config.to_json_string()), family if case.vision is None else OfText(family.read_config)


@dataclasses.dataclass
class OfText:
    """A family whose config.json holds that of its text model."""

    read_whole: Callable

    def read_config(self, reader):
        return self.read_whole(ConfigReader({"text_config": reader.values}, reader.path))


def read(family, values):
    """The config, or None where it is refused."""
    try:
        return family.read_config(ConfigReader(values, "config.json"))
    except CheckpointError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(name):
    kind, values, family = build_config(name)
    recording = RecordingDict(values)
    assert read(family, recording) is not None
    checked = 0
    for key in sorted(recording.keys_read - SHOWN_BY_TENSORS):
        without = {other: value for other, value in values.items() if other != key}
        parsed = read(family, without)
        default = json.loads(kind.from_dict(dict(without)).to_json_string()).get(key)
        if parsed is None or default is None:
            continue
        assert parsed == read(family, without | {key: default}), (key, default)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Gemma4"])  # its positions differ by layer
def test_a_base_that_is_left_out_of_positions_is_what_transformers_takes(name):
    kind, values, family = build_config(name)
    without = values | {"rope_parameters": {"rope_type": "default"}}
    default = json.loads(kind.from_dict(dict(without)).to_json_string())["rope_parameters"]
    assert default["rope_theta"] > 0
    assert read(family, without) == read(family, without | {"rope_parameters": default})
