"""Parameters and configs take integers of NumPy as they take those of Python; what looks like one is refused."""

import dataclasses
import json

import numpy as np
import pytest

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError, PlacementError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.integers import is_integer, to_int
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.fleet.settings import FleetSettings

REFUSED = [
    (0, "size=0 must be an integer in 1..8; raise it"),
    (np.int64(9), "size=9 must be an integer in 1..8; lower it"),
    (2.0, "size=2.0 (float) must be an integer in 1..8; give an integer, such as 1"),
    (np.float32(2), "size=np.float32(2.0) (float32) must be an integer in 1..8; give an integer, such as 1"),
    (True, "size=True must be an integer in 1..8; give an integer, such as 1"),
    ("2", "size='2' must be an integer in 1..8; give an integer, such as 1"),
    (None, "size=None must be an integer in 1..8; give an integer, such as 1"),
    (10**30, "size=an integer of 100 bits must be an integer in 1..8; lower it"),
]
CONFIGS = [
    (DistConfig, dict(nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:5000")),
    (ServerArgs, dict(tp_size=2, page_size=8, max_total_tokens=64, precompile_bs_paddings=(1, 4))),
    (SpeculativeConfig, dict(num_draft_tokens=4, ngram_capacity=100, store_bytes=1 << 20)),
    (SpeculativeConfig, dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=(1, 2))),
    (ExpertOffloadConfig, dict(kt_num_gpu_experts=4)),
    (PlacementConfig, dict(plan="plan.npz", rebalance_every=8, num_groups=2)),
    (FleetSettings, dict(num_replicas=2)),
]


def to_numpy(value):
    if isinstance(value, tuple):
        return tuple(map(to_numpy, value))
    return np.int64(value) if isinstance(value, int) else value


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_numpy_become_those_of_python(value):
    assert is_integer(value) and type(to_int("size", value, 1, 8)) is int


@pytest.mark.parametrize(("value", "text"), REFUSED)
def test_a_refusal_has_the_name_the_value_the_limits_and_the_fix(value, text):
    with pytest.raises(PlacementError) as caught:
        to_int("size", value, 1, 8, error=PlacementError)
    assert str(caught.value) == text


def test_a_limit_below_alone_a_meaning_and_a_fix_are_in_the_text():
    with pytest.raises(ConfigError, match=r"^size=0 must be an integer of at least 1, a page; leave it out$"):
        to_int("size", 0, 1, meaning=", a page", fix="leave it out")


@pytest.mark.parametrize(("config", "fields"), CONFIGS)
def test_a_frozen_config_stores_integers_that_json_writes(config, fields):
    made = config(**{name: to_numpy(value) for name, value in fields.items()})
    assert made == config(**fields)
    json.dumps({name: dataclasses.asdict(made)[name] for name in fields})
    changed = dataclasses.replace(made, **{name: to_numpy(value) for name, value in fields.items()})
    json.dumps({name: dataclasses.asdict(changed)[name] for name in fields})
