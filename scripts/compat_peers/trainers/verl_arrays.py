"""verl's alignment of rows with tokens, on our array."""

import numpy as np
import pytest
import torch

from compat_peers.trainers.arrays import HIDDEN, TOP_K, functions, record
from routed_experts import formats

FILE, NAME = "verl/utils/megatron/router_replay_utils.py", "align_r3_router_replay_data"


@pytest.fixture(scope="module")
def align():
    return functions(FILE, names=(NAME,), torch=torch)[NAME]


def jagged(*parts: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def test_rows_of_rollouts_of_unequal_length_are_aligned(align):
    rollouts = [record(9), record(6, seed=1)]
    rows = [torch.from_numpy(formats.verl.encode(rollout)) for rollout in rollouts]
    aligned = align(jagged(*rows), jagged(*(torch.zeros(rollout.num_tokens) for rollout in rollouts)))
    for rollout, part in zip(rollouts, aligned.unbind(), strict=True):
        assert part.shape == (rollout.num_tokens, HIDDEN, TOP_K) and part.dtype == torch.int16
        assert np.array_equal(part.numpy()[:-1][:, list(rollout.layer_ids)], rollout.ids) and not part[-1].any()


def test_a_lost_row_is_an_error(align):
    rows = torch.from_numpy(formats.verl.encode(record(9)))[1:]
    with pytest.raises(RuntimeError, match="7 route rows for 9 input tokens"):
        align(jagged(rows), jagged(torch.zeros(9)))
