"""Codes of 4 bits inside of a GPU kernel: bytes become float16, two codes in a register.

A byte has a code of each of two runs of inputs (`QuantizedWeight.run`), so the lower halves of a block of bytes are the
block of the first run, and the upper halves that of the next one; nothing is interleaved. float16 holds a code exactly,
in a unit that the scale is multiplied by:

    int4    the code's bits behind the exponent of 1024, or 64 in the upper half, less 1032 or 72; unit 1
    e2m1    sign, exponent and mantissa moved to those of float16, whose exponents are 14 less; unit 2^14

By assembly, because array code of the same works on one code at a time. Dims: C columns, B bytes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Shaped

from routed_experts.layers.quantized import E2M1, INT4

RUNS = (64, 32, 16)  # inputs, that kernels read; a product on the tensor cores has a run or more
UNITS: Mapping[str, float] = MappingProxyType({INT4: 1.0, E2M1: 2.0**14})
# Four bytes ($2) to four codes, two registers ($0, $1). t and v get bytes 0 and 1, 2 and 3, each as 16 bits: of int4 as
# the lower 8, of e2m1 as the upper 8.
_INT4 = """{{ .reg .b32 t, v, c;
prmt.b32 t, $2, 0, 0x4140; prmt.b32 v, $2, 0, 0x4342; mov.b32 c, {offset};
lop3.b32 t, t, {mask}, {exponent}, 0xEA; lop3.b32 v, v, {mask}, {exponent}, 0xEA;
sub.rn.f16x2 $0, t, c; sub.rn.f16x2 $1, v, c; }}"""
_E2M1 = """{{ .reg .b32 t, v, u;
prmt.b32 t, $2, 0, 0x1404; prmt.b32 v, $2, 0, 0x3424; {shift}
shr.b32 u, t, 3; and.b32 u, u, 0x0E000E00; lop3.b32 $0, t, 0x80008000, u, 0xEA;
shr.b32 u, v, 3; and.b32 u, u, 0x0E000E00; lop3.b32 $1, v, 0x80008000, u, 0xEA; }}"""
_ASSEMBLY: Mapping[str, tuple[str, str]] = MappingProxyType(  # of the lower and the upper half
    {
        INT4: (
            _INT4.format(mask="0x000F000F", exponent="0x64006400", offset="0x64086408"),
            _INT4.format(mask="0x00F000F0", exponent="0x54005400", offset="0x54805480"),
        ),
        E2M1: (_E2M1.format(shift="shl.b32 t, t, 4; shl.b32 v, v, 4;"), _E2M1.format(shift="")),
    }
)


def unpack_halves(codes: Shaped[Array, "C B"], format: str, *, interpret: bool) -> tuple[Float[Array, "C B"], ...]:
    """The values of the lower and of the upper halves of bytes, float16, in units of UNITS. Any byte has finite ones.
    `interpret`: by array code, because an interpreted kernel has no assembly."""
    if interpret:
        return _by_array_code(codes, format)
    shape = jax.ShapeDtypeStruct(codes.shape, jnp.float16)
    return tuple(
        plgpu.elementwise_inline_asm(
            assembly, args=[codes], constraints="=&r,=&r,r", pack=4, result_shape_dtypes=[shape]
        )[0]
        for assembly in _ASSEMBLY[format]
    )


def _by_array_code(codes: Shaped[Array, "C B"], format: str) -> tuple[Float[Array, "C B"], ...]:
    whole = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint16)
    halves: tuple[Any, Any] = whole & 15, whole >> 4
    if format == INT4:
        return tuple(half.astype(jnp.float16) - jnp.float16(8) for half in halves)
    return tuple(lax.bitcast_convert_type(((half & 7) << 9) | ((half & 8) << 12), jnp.float16) for half in halves)
