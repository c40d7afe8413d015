"""Products with codes and scales inside of a TPU kernel: codes are fetched as bytes and become bfloat16 in VMEM.

The matrix unit of a v5e has no float8, but its vector unit loads float8_e4m3fn, exactly, so codes need no decoding by
integer operations. A chunk of CHUNK inputs, or of a group where that is larger, is multiplied at a time; the product
of each group, float32, is multiplied by its scales before it is added. Of groups that share a chunk, each has its own
copy of the rows, in which the other groups' inputs are 0: the matrix unit multiplies CHUNK inputs in the time of one.
Dims: T rows, I inputs, O outputs, J groups."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from routed_experts.core.errors import ConfigError
from routed_experts.layers.quantized import CODE_DTYPES, E4M3, QuantizedWeight, Weight

CHUNK = 128  # inputs of the matrix unit of a v5e; a v6e's takes 256
STACKED_ROWS = 256  # most rows of one product of groups that share a chunk: its result is [rows, O] in VMEM
CODE_ROWS = 32  # rows of a tile of bytes; a cut of codes begins on one
GROUPS = (128, 64, 32, 16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBlock:
    """What a kernel holds of a matrix: numbers, or the codes of some inputs and the scales of all of them. `group` 0:
    numbers."""

    values: Any  # [1 I O]
    scales: Any = None  # [1 J O], float32
    group: int = 0

    def product(self, x: Float[Array, "T I"], first_group: Any = 0) -> Float[Array, "T O"]:
        """Rows times the block's first I inputs, float32; `first_group` is that of the first input."""
        if not self.group:
            return jnp.dot(x, self.values[0], preferred_element_type=jnp.float32)
        shapes = pltpu.VMEM(x.shape, x.dtype), pltpu.VMEM((x.shape[0], self.values.shape[2]), jnp.float32)
        return pl.run_scoped(lambda rows, total: self._scaled_sum(x, first_group, rows, total), *shapes)

    def _scaled_sum(self, x: Float[Array, "T I"], first_group: Any, rows: Any, total: Any) -> Float[Array, "T O"]:
        """The product by chunks, through references: a loop indexes no value."""
        rows[...] = x
        inputs, chunk = x.shape[1], max(CHUNK, self.group)
        whole, groups = inputs // chunk, chunk // self.group

        def add(start: Any, length: int, group: Any) -> None:
            part = pl.ds(start, length)
            total[...] += self._chunk_product(rows[:, part], self.values[0, part, :], first_group + group)

        total[...] = jnp.zeros_like(total)
        if whole:
            lax.fori_loop(
                0, whole, lambda i, _: add(pl.multiple_of(i * chunk, chunk), chunk, i * groups), None, unroll=False
            )
        if inputs % chunk:
            add(whole * chunk, inputs % chunk, whole * groups)
        return total[...]

    def _chunk_product(
        self, x: Float[Array, "T C"], codes: Float[Array, "C O"], first_group: Any
    ) -> Float[Array, "T O"]:
        """Rows times the codes of one or more groups, each sum by its scales."""
        num_rows, inputs = x.shape
        values, num_groups = codes.astype(x.dtype), pl.cdiv(inputs, self.group)
        group_of_input = lax.broadcasted_iota(jnp.int32, x.shape, 1) // self.group
        at_once = max(1, min(num_groups, STACKED_ROWS // num_rows))
        total = jnp.zeros((num_rows, codes.shape[1]), jnp.float32)
        for start in range(0, num_groups, at_once):
            groups = range(start, min(start + at_once, num_groups))
            own = [x if num_groups == 1 else jnp.where(group_of_input == group, x, 0) for group in groups]
            sums = jnp.dot(jnp.concatenate(own, axis=0), values, preferred_element_type=jnp.float32)
            for index, group in enumerate(groups):
                scales = self.scales[0, pl.ds(first_group + group, 1), :]
                total += sums[index * num_rows : (index + 1) * num_rows] * scales
        return total


def weight_arrays(weight: Weight) -> list[Array]:
    """What a kernel is given of a stack of matrices: numbers, or codes and scales.

    Raises ConfigError for codes that no TPU kernel reads."""
    if not isinstance(weight, QuantizedWeight):
        return [weight]
    if weight.format != E4M3 or weight.outputs_first or weight.group not in GROUPS:
        order = "outputs first" if weight.outputs_first else "inputs first"
        raise ConfigError(
            f"codes {weight.format}, {order}, in groups of {weight.group} inputs came to a TPU kernel, which reads "
            f"{E4M3}, inputs first, in groups of {', '.join(map(str, GROUPS))}; dequantise them when they are loaded"
        )
    num_groups = -(-weight.shape[1] // weight.group)
    assert weight.codes.dtype == CODE_DTYPES[E4M3], weight.codes.dtype
    assert weight.scales.shape == (weight.shape[0], num_groups, weight.shape[2]), (weight.scales.shape, weight.shape)
    return [weight.codes, weight.scales]


def group_of(weight: Weight) -> int:
    """Inputs that share a scale; 0 for numbers."""
    return weight.group if isinstance(weight, QuantizedWeight) else 0


def column_bytes(weight: Weight) -> int:
    """Bytes of one output of one matrix, with its scales."""
    return sum(part.shape[1] * part.dtype.itemsize for part in weight_arrays(weight))
