"""Codes of 4 bits inside of a GPU kernel: bytes become float16, two codes in a register.

A byte has a code of each of two runs of inputs (`QuantizedWeight.run`), so the lower halves of a block of bytes are the
block of the first run, and the upper halves that of the next one; nothing is interleaved. float16 holds a code exactly,
in a unit that sums are multiplied by:

    int4    the code's bits behind the exponent of 1024, or 64 in the upper half, less 1032 or 72; unit 1
    e2m1    sign, exponent and mantissa moved to those of e4m3, whose exponents are 6 less, which one instruction
            decodes two of; unit 2^6. GPUs without it move them to those of float16, 14 less, times 2^8

Scales of e2m1 are powers of two, so bfloat16 holds a code times its scale exactly too, in units of 2^64
(`times_scales`): sums of many rows need no product by scales then. Below a scale of 2^-61 such a number may
lose bits, or be 0; from 2^66 on it would be infinite, so that scales are at most E2M1_MAX_SCALE.

By assembly, because array code of the same works on one code at a time. Dims: C columns, B bytes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float, Shaped, UInt8

from routed_experts.layers.gpu.capability import converts_e4m3
from routed_experts.layers.quantized import E2M1, INT4

RUNS = (64, 32, 16)  # inputs, that kernels read; a product on the tensor cores has a run or more
SCALED_UNIT = 2.0**64  # of `times_scales`
UNITS: Mapping[str, float] = MappingProxyType({INT4: 1.0, E2M1: 2.0**6})
# Four bytes ($2) to four codes of float16 in two registers ($0, $1). t and v get bytes 0 and 1, 2 and 3, each as the
# lower 8 of 16 bits.
_INT4 = """{{ .reg .b32 t, v, c;
prmt.b32 t, $2, 0, 0x4140; prmt.b32 v, $2, 0, 0x4342; mov.b32 c, {offset};
lop3.b32 t, t, {mask}, {exponent}, 0xEA; lop3.b32 v, v, {mask}, {exponent}, 0xEA;
sub.rn.f16x2 $0, t, c; sub.rn.f16x2 $1, v, c; }}"""
# Four bytes ($1) to four codes of e4m3 in one register ($0): the sign stays, three bits move by two.
_E2M1 = """{{ .reg .b32 t, v;
{shift} shr.b32 v, t, 2; and.b32 v, v, 0x1C1C1C1C; lop3.b32 $0, t, 0x80808080, v, 0xEA; }}"""
# As _INT4, but t and v are the upper 8 of 16 bits.
_E2M1_BY_MOVES = """{{ .reg .b32 t, v, u, c;
prmt.b32 t, $2, 0, 0x1404; prmt.b32 v, $2, 0, 0x3424; {shift} mov.b32 c, 0x5C005C00;
shr.b32 u, t, 3; and.b32 u, u, 0x0E000E00; lop3.b32 t, t, 0x80008000, u, 0xEA; mul.rn.f16x2 $0, t, c;
shr.b32 u, v, 3; and.b32 u, u, 0x0E000E00; lop3.b32 v, v, 0x80008000, u, 0xEA; mul.rn.f16x2 $1, v, c; }}"""
# Four bytes ($2) to four numbers of bfloat16 in two registers ($0, $1), each times what is twice in $3, $4. t and v get
# bytes 0 and 1, 2 and 3, each as the upper 8 of 16 bits; a code is 2^-126 of its value there. -0.0 (z) is added,
# because a product alone needs compute capability 9.0.
_SCALED = """{{ .reg .b32 t, v, u, z; mov.b32 z, 0x80008000;
prmt.b32 t, $2, 0, 0x1404; prmt.b32 v, $2, 0, 0x3424; {shift}
shr.b32 u, t, 6; and.b32 u, u, 0x01C001C0; lop3.b32 t, t, 0x80008000, u, 0xEA; fma.rn.bf16x2 $0, t, $3, z;
shr.b32 u, v, 6; and.b32 u, u, 0x01C001C0; lop3.b32 v, v, 0x80008000, u, 0xEA; fma.rn.bf16x2 $1, v, $4, z; }}"""
_LOWER_OF_TWO = "shl.b32 t, t, 4; shl.b32 v, v, 4;"  # of t and v
_SCALED_ASSEMBLY = _SCALED.format(shift=_LOWER_OF_TWO), _SCALED.format(shift="")
_MOVES_ASSEMBLY = _E2M1_BY_MOVES.format(shift=_LOWER_OF_TWO), _E2M1_BY_MOVES.format(shift="")
_SCALED_FACTOR = 2.0**126 / SCALED_UNIT
_ASSEMBLY: Mapping[str, tuple[str, str]] = MappingProxyType(  # of the lower and the upper half
    {
        INT4: (
            _INT4.format(mask="0x000F000F", exponent="0x64006400", offset="0x64086408"),
            _INT4.format(mask="0x00F000F0", exponent="0x54005400", offset="0x54805480"),
        ),
        E2M1: (_E2M1.format(shift="shl.b32 t, $1, 4;"), _E2M1.format(shift="mov.b32 t, $1;")),
    }
)


def unpack_halves(codes: Shaped[Array, "C B"], format: str, *, interpret: bool) -> tuple[Float[Array, "C B"], ...]:
    """The values of the lower and of the upper halves of bytes, float16, in units of UNITS. Any byte has finite ones.
    `interpret`: by array code, because an interpreted kernel has no assembly."""
    if interpret:
        return _by_array_code(codes, format)
    assemblies, dtype, constraints = _ASSEMBLY[format], jnp.float16, "=&r,=&r,r"
    if format == E2M1:
        if converts_e4m3():
            dtype, constraints = jnp.float8_e4m3fn, "=&r,r"
        else:
            assemblies = _MOVES_ASSEMBLY
    shape = jax.ShapeDtypeStruct(codes.shape, dtype)
    return tuple(
        plgpu.elementwise_inline_asm(
            assembly, args=[codes], constraints=constraints, pack=4, result_shape_dtypes=[shape]
        )[0].astype(jnp.float16)
        for assembly in assemblies
    )


def times_scales(
    codes: UInt8[Array, "C B"], scales: Sequence[Float[Array, "C 1"]], *, interpret: bool
) -> tuple[BFloat16[Array, "C B"], ...]:
    """The values of e2m1 in the lower and in the upper halves of bytes times the first and the last of the scales, in
    units of SCALED_UNIT. `interpret`: by array code."""
    both = scales[0], scales[-1]
    if interpret:
        unit = UNITS[E2M1] / SCALED_UNIT
        halves = zip(_by_array_code(codes, E2M1), both, strict=True)
        return tuple((half.astype(jnp.float32) * (scale * unit)).astype(jnp.bfloat16) for half, scale in halves)
    shape = jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)
    factors = [jnp.broadcast_to((scale * _SCALED_FACTOR).astype(jnp.bfloat16), codes.shape) for scale in both]
    return tuple(
        plgpu.elementwise_inline_asm(
            assembly, args=[codes, factor], constraints="=&r,=&r,r,r,r", pack=4, result_shape_dtypes=[shape]
        )[0]
        for assembly, factor in zip(_SCALED_ASSEMBLY, factors, strict=True)
    )


def _by_array_code(codes: Shaped[Array, "C B"], format: str) -> tuple[Float[Array, "C B"], ...]:
    whole = lax.bitcast_convert_type(codes, jnp.uint8)
    if format == INT4:
        return tuple(half.astype(jnp.float16) - jnp.float16(8) for half in (whole & 15, whole >> 4))
    moved = tuple((half & 0x80) | ((half >> 2) & 0x1C) for half in (whole << 4, whole))
    return tuple(lax.bitcast_convert_type(half, jnp.float8_e4m3fn).astype(jnp.float16) for half in moved)
