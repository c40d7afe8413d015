"""NeMo-RL's padding of vLLM's rows, on our array in their place."""

from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch

from compat_peers.trainers.arrays import HIDDEN, TOP_K, functions, record
from routed_experts import formats

FILE, NAME = "nemo_rl/models/generation/vllm/utils.py", "pad_and_align_routed_expert_indices"


@pytest.fixture(scope="module")
def pad():
    names = {"torch": torch, "np": np, "Any": Any, "Optional": Optional, "G_ROUTED_EXPERTS_RANGE_CHECKED": False}
    marks = {
        "ROUTED_EXPERTS_FALLBACK_DTYPE": torch.int16,
        "ROUTED_EXPERTS_MISSING_ROUTE_SENTINEL": -1,
        "R3_MISSING_ROUTE_SENTINEL": -1,
    }
    return functions(FILE, names=(NAME, "_as_routed_experts_tensor"), **names, **marks)[NAME]


def padded(pad, rows, num_tokens, **options):
    output = SimpleNamespace(routed_experts=torch.from_numpy(rows))
    sizes = {"valid_length": num_tokens, "padded_length": 12, "device": "cpu", "return_stats": True}
    return pad(SimpleNamespace(), output, **sizes, **options)


def test_no_row_is_missing_and_none_too_much(pad):
    rollout = record(9)
    rows = formats.nemo_rl.encode(rollout)
    full, stats = padded(pad, rows, 9, require_complete_routed_experts=True)
    assert full.shape == (12, HIDDEN, TOP_K) and np.array_equal(full[:8].numpy(), rows)
    assert (stats["actual_routes"], stats["missing_routes"], stats["surplus_routes"]) == (8, 0, 0)


def test_lost_rows_are_left_to_the_router(pad):
    full, stats = padded(pad, formats.nemo_rl.encode(record(9))[:-2], 9)
    assert stats["missing_routes"] == 2 and (full[6:8] == -1).all()
