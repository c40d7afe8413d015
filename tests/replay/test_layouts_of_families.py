"""Where a sequence lies in a training batch changes none of its logits: behind padding, between padding, and behind
another sequence, with the positions that the forward counts itself. Families that cut attention by positions, keep
states, or have other features of attention; the others with scripts/thorough."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles.families import CASES, Oracle
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import RoutedBatch, forward
from support.fast_compile import fast_compilation

LENGTH, LENGTHS = 56, (19, 30, 26)  # the chunks of the tiny Llama 4 are shorter
FAMILIES = [
    name if name in ("Llama4", "GptOss", "Qwen3Next") else pytest.param(name, marks=pytest.mark.thorough)
    for name, case in CASES.items()
    if "expert" in str(case.config)  # without experts there are no rows
]


def place(sequences, places):
    """Tokens, rows, segments and flags of a batch: places are (row, first column) of each sequence."""
    rows = max(row for row, _ in places) + 1
    tokens, segments = np.full((rows, LENGTH), 7, np.int32), np.zeros((rows, LENGTH), np.int32)
    ids = np.zeros((rows, LENGTH, *sequences[0][1].shape[1:]), np.int32)
    valid, pad = np.zeros((rows, LENGTH), bool), np.ones((rows, LENGTH), bool)
    for index, ((own_tokens, own_ids, own_valid), (row, first)) in enumerate(zip(sequences, places, strict=True)):
        columns = slice(first, first + len(own_tokens))
        tokens[row, columns], segments[row, columns], ids[row, columns] = own_tokens, index, own_ids
        valid[row, columns], pad[row, columns] = own_valid, False
    return jnp.asarray(tokens), RoutedBatch(*map(jnp.asarray, (ids, valid, pad))), jnp.asarray(segments)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_sequence_alone(name, tmp_path):
    Oracle(CASES[name], tmp_path)
    folder = ModelFolder.open(tmp_path)
    model, spec, rng = folder.load(jnp.dtype("float32")), folder.config.capture_spec, np.random.default_rng(0)
    assert spec is not None
    sequences = []
    for length in LENGTHS:
        experts = np.tile(np.arange(spec.num_experts), (length, spec.num_moe_layers, 1))
        ids = rng.permuted(experts, axis=-1)[..., : spec.top_k]
        sequences.append((rng.integers(0, folder.config.vocab_size, length), ids, rng.random(length) < 0.5))
    with fast_compilation():
        run = jax.jit(lambda tokens, routed, segments: forward(model, tokens, routed=routed, segment_ids=segments))
        alone = np.asarray(run(*place(sequences, [(0, 0), (1, 0), (2, 0)])).logits)
        first, second, third = sequences
        moved = np.asarray(run(*place([first, second, third, first], [(0, 37), (1, 0), (1, 30), (2, 20)])).logits)
    for row, column, expected in ((0, 37, 0), (1, 0, 1), (1, 30, 2), (2, 20, 0)):
        length = LENGTHS[expected]
        np.testing.assert_allclose(moved[row, column : column + length], alone[expected, :length], atol=2e-4)
