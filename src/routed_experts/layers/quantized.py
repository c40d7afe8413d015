"""Weights as codes and scales: a number of a matrix is its code times the scale of its group of inputs.

    number[r, i, o] = value(codes[r, i, o]) * scales[r, i // group, o]

Kernels multiply rows by the values of codes, which bfloat16 holds exactly, and each group's sum in float32 by the
scale of its output, so no weight is rounded:

    y[n, o] = sum over groups j of  scales[j, o] * (sum over inputs i of group j of  x[n, i] * value(codes[i, o]))

The last group may be short. Dims: R matrices of a stack, I inputs, O outputs, J = ceil(I / group) groups."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

E4M3 = "e4m3"  # a byte each: float8_e4m3fn (OCP 8-bit Floating Point Specification 1.0; no infinity)
CODE_DTYPES: Mapping[str, jnp.dtype] = MappingProxyType({E4M3: jnp.dtype(jnp.float8_e4m3fn)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A stack of matrices. `group`: inputs that share a scale, 128, 64, 32 or 16. `outputs_first`: the last two axes of
    the codes are swapped, [R, O, I], as checkpoints have them; scales are [R, J, O] in either case. `dtype`: of the
    model, which weights have that are not codes; kernels may round rows to it, as they would for such a weight."""

    codes: Float[Array, "R I O"] | Float[Array, "R O I"]
    scales: Float[Array, "R J O"]  # float32
    group: int = dataclasses.field(metadata={"static": True})
    format: str = dataclasses.field(default=E4M3, metadata={"static": True})  # a key of CODE_DTYPES
    outputs_first: bool = dataclasses.field(default=False, metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(default=jnp.dtype(jnp.float32), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        """R, I and O."""
        stack, first, second = self.codes.shape
        return (stack, second, first) if self.outputs_first else (stack, first, second)

    def slice(self, first: Int[Array, ""] | int, count: int) -> "QuantizedWeight":
        """Neighbouring matrices of the stack."""
        codes, scales = (lax.dynamic_slice_in_dim(part, first, count) for part in (self.codes, self.scales))
        return dataclasses.replace(self, codes=codes, scales=scales)

    def take(self, indices: Int[Array, " T"]) -> "QuantizedWeight":
        """Matrices by index."""
        codes, scales = (jnp.take(part, indices, axis=0) for part in (self.codes, self.scales))
        return dataclasses.replace(self, codes=codes, scales=scales)

    def dequantize(self) -> Float[Array, "R I O"]:
        """The numbers, float32: one product each, rounded to nearest even."""
        codes = self.codes.astype(jnp.float32)
        codes = jnp.swapaxes(codes, -1, -2) if self.outputs_first else codes
        return codes * jnp.repeat(self.scales, self.group, axis=1)[:, : codes.shape[1]]


Weight = Float[Array, "R I O"] | QuantizedWeight
