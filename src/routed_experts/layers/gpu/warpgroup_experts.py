"""Experts of many rows on a Hopper GPU: rows are copied into tiles of one expert each, and warpgroups multiply tiles.

Both products read and write the rows of expert_rows.py, so no copy has a mask. These rows are memory that the other
kernels do not take: K copies of each row, and up to a tile more an expert. Dims: N tokens, K experts per token,
D hidden."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.code_plans import plan_down, plan_gate_up
from routed_experts.layers.gpu.expert_rows import AnyRows, Tiles, group_rows
from routed_experts.layers.gpu.scaled_rows import ScaledRows, scale_rows, scale_rows_at
from routed_experts.layers.gpu.warpgroup_codes import has_code_blocks, multiply_codes
from routed_experts.layers.gpu.warpgroup_numbers import NUMBER_TILE, multiply_numbers, suits_number_products
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.moe import ExpertCall, combine
from routed_experts.layers.quantized import QuantizedWeight

# Rows of an expert, on average, from which on calls suit. Measured on an H200 with 128 experts of 2048 x 768, top-8:
# with 32 rows the Triton kernels are faster, with 64 slower by 2 %; of codes, faster with 4 rows and slower with 16.
FEWEST_ROWS = 64
FEWEST_CODE_ROWS = 12


def suits_warpgroups(call: ExpertCall) -> bool:
    """Whether these kernels compute the call, and faster than the Triton kernels do: many rows an expert, no biases,
    matrices of 16-bit numbers with sides of whole steps, or of e4m3 codes in blocks of 128 x 128."""
    matrices, rows = (call.gate_up, call.down), call.expert_rows
    if call.gate_up_bias is not None:
        return False
    if all(has_code_blocks(matrix) for matrix in matrices):
        return rows >= FEWEST_CODE_ROWS and call.x.dtype == jnp.bfloat16
    return rows >= FEWEST_ROWS and all(suits_number_products(matrix, call.x.dtype) for matrix in matrices)


def tiled_outputs(
    call: ExpertCall, warpgroups: Warpgroups, *, scaled_x: ScaledRows | None = None, stride: int = 1, interpret: bool
) -> tuple[Float[Array, "P D"], Int[Array, "N K"]]:
    """Each slot's expert applied to its row, of a call that suits, and the row of each slot, which is not defined for
    slots of padding. `scaled_x`: the rows scaled, where they are at hand. `first_expert` counts in steps of
    `stride`."""
    first, gate_up, down, dtype = call.first_expert.reshape(1), call.gate_up, call.down, call.x.dtype

    def grouped(x: AnyRows, tile: int) -> tuple[AnyRows, Int[Array, "N K"], Tiles]:
        return group_rows(x, call.ids, call.valid, call.num_experts, tile, interpret=interpret)

    if isinstance(gate_up, QuantizedWeight):
        assert isinstance(down, QuantizedWeight), "see `suits_warpgroups`"
        scaled = scale_rows(call.x, interpret=interpret) if scaled_x is None else scaled_x
        _, width, dim = down.shape
        plans = plan_gate_up(call.expert_rows, dim), plan_down(call.expert_rows, width, dim)
        scaled, rows, tiles = grouped(scaled, plans[0].tile)
        hidden = multiply_codes(
            scaled, gate_up, first, tiles, call.activation, dtype, warpgroups, plan=plans[0], stride=stride
        )
        scaled = scale_rows_at(hidden, rows, call.valid, interpret=interpret)
        return multiply_codes(scaled, down, first, tiles, None, dtype, warpgroups, plan=plans[1], stride=stride), rows
    assert not isinstance(down, QuantizedWeight), "see `suits_warpgroups`"
    copied, rows, tiles = grouped(call.x, NUMBER_TILE)
    options = dict(expert_rows=call.expert_rows, stride=stride)
    hidden = multiply_numbers(copied, gate_up, first, tiles, call.activation, warpgroups, **options)
    return multiply_numbers(hidden, down, first, tiles, None, warpgroups, **options), rows


def warpgroup_experts(call: ExpertCall, warpgroups: Warpgroups, *, interpret: bool = False) -> Float[Array, "N D"]:
    """The whole expert computation of a layer, of a call that suits."""
    outputs, rows = tiled_outputs(call, warpgroups, interpret=interpret)
    return combine(jnp.take(outputs, rows, axis=0, mode="clip"), call.weights, call.valid)
