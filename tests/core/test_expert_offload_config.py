"""ExpertOffloadConfig refuses what cannot work, with the name, the value, the limit and the remedy in its words."""

import re

import numpy as np
import pytest

from routed_experts import ConfigError, ExpertOffloadConfig, PlacementError, ResidencyMap

REFUSED = {
    "negative": ({"kt_num_gpu_experts": -1}, "kt_num_gpu_experts=-1 .* at least 0"),
    "a truth": ({"kt_num_gpu_experts": True}, "kt_num_gpu_experts=True"),
    "two names": ({"kt_num_gpu_experts": 1, "num_device_experts": 2}, "kt_num_gpu_experts=1 and num_device_experts=2"),
    "method": ({"kt_method": "AMXINT4"}, "kt_method='AMXINT4' .* auto, bf16, f32"),
    "no thread": ({"kt_num_gpu_experts": 2, "kt_cpuinfer": 0}, "kt_cpuinfer=0, but the host's experts need a thread"),
    "policy": ({"residency": "lru"}, "residency='lru' .* 'first', 'adaptive', or a ResidencyMap"),
    "pools": ({"kt_threadpool_count": 2}, "kt_threadpool_count=2, but .* in 1 pool"),
    "deferral": ({"kt_max_deferred_experts_per_token": None}, "kt_max_deferred_experts_per_token=None must be"),
    "path": ({"kt_weight_path": 3}, "kt_weight_path=3 must be text"),
    "threshold": ({"kt_gpu_prefill_token_threshold": -2}, "kt_gpu_prefill_token_threshold=-2"),
    "no number": (
        {"kt_weight_path": "folder", "kt_cpuinfer": 4},
        "kt_cpuinfer, kt_weight_path without kt_num_gpu_experts",
    ),
    "plan": (
        {"kt_num_gpu_experts": 3, "residency": ResidencyMap.first_n(2, 8, 4)},
        "kt_num_gpu_experts=3 and the plan's num_resident=4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_cannot_work_is_refused_by_name(case):
    fields, match = REFUSED[case]
    with pytest.raises(ConfigError, match=match):
        ExpertOffloadConfig(**fields)


def test_without_a_number_no_expert_is_on_the_host():
    assert ExpertOffloadConfig().num_resident is None
    assert ExpertOffloadConfig(kt_num_gpu_experts=0).num_resident == 0
    assert (
        ExpertOffloadConfig(num_device_experts=3).num_resident
        == ExpertOffloadConfig(kt_num_gpu_experts=3, num_device_experts=3).num_resident
        == 3
    )


def test_a_threshold_of_zero_is_never():
    thresholds = [
        ExpertOffloadConfig(kt_num_gpu_experts=1, kt_gpu_prefill_token_threshold=value).stream_threshold
        for value in (None, 0, 7)
    ]
    assert thresholds == [None, None, 7]


def test_first_means_the_lowest_ids():
    assert (ExpertOffloadConfig(kt_num_gpu_experts=3).build_residency(2, 8).experts == np.arange(3)).all()


def test_residents_must_fit_the_model():
    with pytest.raises(ConfigError, match=re.escape("kt_num_gpu_experts=9 is above the 8 experts")):
        ExpertOffloadConfig(kt_num_gpu_experts=9).build_residency(2, 8)
    with pytest.raises(ConfigError, match="no MoE layer"):
        ExpertOffloadConfig(kt_num_gpu_experts=1).build_residency(0, 0)
    with pytest.raises(PlacementError, match="2 MoE layers x 8 experts does not fit a model of 3 x 8"):
        ExpertOffloadConfig(residency=ResidencyMap.first_n(2, 8, 4)).build_residency(3, 8)
