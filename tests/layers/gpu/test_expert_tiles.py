"""The list of slots by expert and of their tiles, interpreted and on a GPU, against a dict of lists.

Dims: N tokens, K experts per token, E experts, T rows of a tile."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.gpu.slot_lists import sort_slots

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = [  # N, K, E; all ratios of slots to experts, one expert, and more tiles of an expert than are written at once
    (1, 2, 8),
    (5, 3, 64),
    (24, 4, 16),
    (65, 2, 3),
    (300, 1, 1),
    (40, 8, 128),
]
ROWS = [8, 16, 64]


def some_ids(kind, num_rows, top_k, num_experts):
    rng = np.random.default_rng(num_rows * num_experts)
    if kind == "same":
        return np.tile(np.arange(num_experts)[-top_k:], (num_rows, 1))
    return np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)])


def check_tiles(ids, valid, num_experts, *, interpret):
    (num_rows, top_k), by_expert = ids.shape, {expert: [] for expert in range(num_experts)}
    for row in range(num_rows):
        for k in range(top_k):
            if valid[row] and 0 <= ids[row, k] < num_experts:
                by_expert[int(ids[row, k])].append(row * top_k + k)
    run = functools.partial(sort_slots, num_experts=num_experts, rows=ROWS, interpret=interpret)
    order, tables = jax.jit(run)(jnp.asarray(ids, jnp.int32), jnp.asarray(valid))
    order = np.asarray(order)
    for rows, table in zip(ROWS, tables, strict=True):
        listed = {expert: [] for expert in range(num_experts)}
        real = [tile for tile in np.asarray(table).tolist() if tile[1] < tile[2]]
        for expert, start, end in real:
            listed[expert] += order[start : min(start + rows, end)].tolist()
        assert listed == by_expert
        assert len(real) == sum(math.ceil(len(own) / rows) for own in by_expert.values())
        table = np.asarray(table)
        assert (table[:, 1] <= table[:, 2]).all() and (np.diff(table[:, 0]) >= 0).all()
        assert len(table) <= min(ids.size, ids.size // rows + num_experts)


def cases(function):
    """Rows of padding are the last ones, some in between, or all; "outside": of some rows an id is no expert."""
    kinds = pytest.mark.parametrize("kind", ["spread", "same"])
    paddings = pytest.mark.parametrize("padding", ["none", "last", "between", "outside", "all"])
    return kinds(paddings(pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), SIZES)(function)))


def case(kind, padding, num_rows, top_k, num_experts):
    ids, rows = some_ids(kind, num_rows, top_k, num_experts), np.arange(num_rows)
    if padding == "outside":
        ids[rows % 4 == 1, 0], ids[rows % 4 == 3, -1] = -1, num_experts
    valid = {"last": rows < num_rows // 2, "between": rows % 3 != 1, "all": rows < 0}
    return ids, valid.get(padding, rows >= 0)


@cases
def test_every_slot_is_in_one_tile_of_its_expert(kind, padding, num_rows, top_k, num_experts):
    check_tiles(*case(kind, padding, num_rows, top_k, num_experts), num_experts, interpret=True)


@pytest.mark.gpu
@cases
def test_compiled_every_slot_is_in_one_tile_of_its_expert(kind, padding, num_rows, top_k, num_experts):
    check_tiles(*case(kind, padding, num_rows, top_k, num_experts), num_experts, interpret=False)
