"""Experts of many rows on a Hopper GPU: rows are copied into tiles of one expert each, and warpgroups multiply tiles.

Both products read and write the rows of expert_rows.py, so no copy has a mask. Dims: N tokens, K experts per token,
D hidden."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.layers.gpu.expert_rows import group_rows
from routed_experts.layers.gpu.scaled_rows import scale_rows
from routed_experts.layers.gpu.warpgroup_codes import CODE_ROWS, GROUP, multiply_codes
from routed_experts.layers.gpu.warpgroup_numbers import NUMBER_ROWS, STEP, multiply_numbers
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.moe import ExpertCall, combine
from routed_experts.layers.quantized import E4M3, QuantizedWeight

FEWEST_ROWS = 64  # of an expert, on average; with fewer, the Triton kernels are as fast
FEWEST_CODE_ROWS = 24  # the same of codes


def suits_warpgroups(call: ExpertCall) -> bool:
    """Whether these kernels compute the call, and faster than the Triton kernels do: many rows an expert, no biases,
    matrices of 16-bit numbers with sides of whole steps, or of e4m3 codes in blocks of 128 x 128."""
    matrices, rows = (call.gate_up, call.down), call.ids.size // call.num_experts
    if call.gate_up_bias is not None:
        return False
    if all(isinstance(matrix, QuantizedWeight) and _has_blocks(matrix) for matrix in matrices):
        return rows >= FEWEST_CODE_ROWS and call.x.dtype == jnp.bfloat16 and call.down.shape[1] % GROUP == 0
    return (
        rows >= FEWEST_ROWS
        and call.x.dtype in (jnp.bfloat16, jnp.float16)
        and all(not isinstance(matrix, QuantizedWeight) and matrix.dtype == call.x.dtype for matrix in matrices)
        and all(side % STEP == 0 for side in call.down.shape[1:])
    )


def _has_blocks(matrix: QuantizedWeight) -> bool:
    """Whether the codes are what the kernels read."""
    inputs, outputs = matrix.shape[1:]
    blocks = matrix.group == matrix.span == GROUP and inputs % GROUP == 0 and outputs % GROUP == 0
    return matrix.format == E4M3 and matrix.outputs_first and blocks


def warpgroup_experts(call: ExpertCall, warpgroups: Warpgroups, *, interpret: bool = False) -> Float[Array, "N D"]:
    """The whole expert computation of a layer, of a call that suits."""
    first, gate_up, down = call.first_expert.reshape(1), call.gate_up, call.down
    if isinstance(gate_up, QuantizedWeight):
        assert isinstance(down, QuantizedWeight), "see `suits_warpgroups`"
        scaled, dtype = scale_rows(call.x, interpret=interpret), call.x.dtype
        rows, tiles = group_rows(scaled, call.ids, call.valid, call.num_experts, CODE_ROWS, interpret=interpret)
        hidden = multiply_codes(rows, gate_up, first, tiles, call.activation, dtype, warpgroups)
        hidden = scale_rows(hidden, interpret=interpret)
        outputs = multiply_codes(hidden, down, first, tiles, None, dtype, warpgroups)
    else:
        assert not isinstance(down, QuantizedWeight), "see `suits_warpgroups`"
        rows, tiles = group_rows(call.x, call.ids, call.valid, call.num_experts, NUMBER_ROWS, interpret=interpret)
        hidden = multiply_numbers(rows, gate_up, first, tiles, call.activation, warpgroups)
        outputs = multiply_numbers(hidden, down, first, tiles, None, warpgroups)
    return combine(jnp.take(outputs, tiles.rows, axis=0, mode="clip"), call.weights, call.valid)
