"""Run a function of rows in blocks of one size, one after the other. Dims: S rows, R rows of a block."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def map_blocks(function: Callable[..., Any], block: int, *rows: Any) -> Any:
    """Apply `function` to each `block` rows of the arrays of `rows` (trees whose leaves are [S, ...]); the results are
    joined. It is traced for [block, ...] alone, so a row's bits do not depend on S. S is a multiple of `block`."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    assert num_rows % block == 0, (num_rows, block)
    if num_rows == block:
        return function(*rows)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(num_rows // block, block, *leaf.shape[1:]), rows)
    results = lax.map(lambda arrays: function(*arrays), blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(num_rows, *leaf.shape[2:]), results)
