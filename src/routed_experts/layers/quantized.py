"""Weights as codes and scales: a number of a matrix is its code times the scale of its group of inputs and its span of
outputs.

    number[r, i, o] = value(codes[r, i, o]) * scales[r, i // group, o // span]

Codes of 4 bits are two a byte. With `run` 1, as in checkpoints, they are neighbours: byte h of an output has input 2h
in its lower half and 2h + 1 in its upper half. With longer runs, the lower halves of `run` bytes have as many
neighbouring inputs, and the upper halves the next ones:

    byte h = p * run + b, 0 <= b < run:   lower half input 2 * p * run + b,   upper half input (2 * p + 1) * run + b

The dtype of an array tells the format of its codes.

Kernels multiply rows by the values of codes, which bfloat16 holds exactly, and each group's sum in float32 by the
scale of its output, so no weight is rounded:

    y[n, o] = sum over groups j of  scales[j, o // span] * sum over inputs i of group j of  x[n, i] * value(codes[i, o])

The last group may be short; spans are whole. Dims: R matrices of a stack, I inputs, O outputs, J = ceil(I / group)
groups, P = O / span spans."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped, UInt8

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)  # of scales
SCALE = "_scale"  # behind the name of an array of codes: its scales
GROUPS = (128, 64, 32, 16)  # inputs that may share a scale
SPANS = (128, 1)  # outputs that may share a scale
E4M3 = "e4m3"  # a byte each: float8_e4m3fn (OCP 8-bit Floating Point Specification 1.0; no infinity)
INT4 = "int4"  # 4 bits: whole numbers plus 8, so -8 to 7 (compressed-tensors, pack-quantized)
E2M1 = "e2m1"  # 4 bits: sign, two bits of exponent, one behind the point (OCP Microscaling Formats 1.0)
E2M1_MAX_SCALE = 2.0**65  # products of larger ones with codes are infinite in a kernel
CODE_DTYPES: Mapping[str, jnp.dtype] = MappingProxyType(
    {E4M3: jnp.dtype(jnp.float8_e4m3fn), INT4: jnp.dtype(jnp.int8), E2M1: jnp.dtype(jnp.uint8)}
)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODE_VALUES: Mapping[str, tuple[float, ...]] = MappingProxyType(  # of the codes of 4 bits
    {INT4: tuple(float(code - 8) for code in range(16)), E2M1: (*_FP4, *(-number for number in _FP4))}
)


def inputs_of_byte(format: str) -> int:
    """Inputs that a byte of codes holds."""
    return 2 if format in CODE_VALUES else 1


def packed_run(inputs: int, group: int, runs: tuple[int, ...]) -> int | None:
    """The first of the `runs` that kernels read in which so many inputs are packed whole: a run is within a group, and
    the inputs are a multiple of two runs. None where no run is."""
    return next((run for run in runs if (run == 1 or group % run == 0) and inputs % (2 * run) == 0), None)


def pack_runs(codes: Shaped[np.ndarray, "... bytes"], run: int) -> Shaped[np.ndarray, "... bytes"]:
    """Bytes of neighbouring inputs, along the last axis, as bytes of runs; a new array. Whole pairs of runs."""
    assert codes.shape[-1] % run == 0 and run % 2 == 0, (codes.shape, run)
    half = np.dtype((np.void, run // 2))  # bytes of one run, two inputs each
    stored = np.ascontiguousarray(codes).view(np.uint8).reshape(-1, run)
    first, last = (np.ascontiguousarray(stored.view(half)[:, side]).view(np.uint8) for side in range(2))
    packed = np.empty((*first.shape, 2), np.uint8)
    packed[..., 0] = (first & 15) | (last << 4)
    packed[..., 1] = (first >> 4) | (last & 0xF0)
    return packed.reshape(codes.shape).view(codes.dtype)


def has_nan(codes: Shaped[np.ndarray, "..."]) -> bool:
    """Whether bytes of e4m3 hold one of its two NaN codes, 0x7F and 0xFF: the largest signed and unsigned byte. On the
    host, without a copy."""
    return bool(codes.view(np.int8).max(initial=0) == 0x7F or codes.view(np.uint8).max(initial=0) == 0xFF)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A stack of matrices. `group`: inputs that share a scale, one of GROUPS; `span`: outputs that do, one of SPANS.
    `outputs_first`: the last two axes of the codes are swapped, [R, O, I], as checkpoints have them; scales are
    [R, J, P] in either case, float32, or of codes of 4 bits also bfloat16. With codes of 4 bits the axis of inputs has
    I / 2 bytes, packed in runs of `run` inputs. `dtype`: of the model, which weights have that are no codes; kernels
    may round rows to it, as they would for such a weight."""

    codes: Shaped[Array, "R I O"] | Shaped[Array, "R O I"]
    scales: Float[Array, "R J P"]
    group: int = dataclasses.field(metadata={"static": True})
    span: int = dataclasses.field(default=1, metadata={"static": True})
    format: str = dataclasses.field(default=E4M3, metadata={"static": True})  # a key of CODE_DTYPES
    outputs_first: bool = dataclasses.field(default=False, metadata={"static": True})
    run: int = dataclasses.field(default=1, metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(default=FLOAT32, metadata={"static": True})

    @staticmethod
    def create(
        codes: Shaped[Array, "R I O"] | Shaped[Array, "R O I"],
        scales: Float[Array, "R J P"],
        *,
        outputs_first: bool = False,
        runs: tuple[int, ...] = (1,),
        dtype: jnp.dtype = FLOAT32,
    ) -> "QuantizedWeight":
        """From its arrays, whose dtype tells the format, and whose shapes tell group and span. `runs`: of which codes
        of 4 bits have what `packed_run` chooses."""
        format = next((name for name, dtype in CODE_DTYPES.items() if dtype == codes.dtype), None)
        assert format is not None, codes.dtype
        inputs = codes.shape[-1 if outputs_first else -2] * inputs_of_byte(format)
        group = next((group for group in GROUPS if math.ceil(inputs / group) == scales.shape[-2]), None)
        assert group is not None, (codes.shape, codes.dtype, scales.shape, outputs_first)
        outputs = codes.shape[-2 if outputs_first else -1]
        span = next((span for span in SPANS if span * scales.shape[-1] == outputs), None)
        assert span is not None, (codes.shape, codes.dtype, scales.shape, outputs_first)
        run = packed_run(inputs, group, runs) if format in CODE_VALUES else 1
        assert run is not None, (codes.shape, group, runs)
        return QuantizedWeight(
            codes=codes,
            scales=scales,
            group=group,
            span=span,
            format=format,
            outputs_first=outputs_first,
            run=run,
            dtype=dtype,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """R, I and O."""
        stack, *sides = self.codes.shape
        inputs, outputs = reversed(sides) if self.outputs_first else sides
        return stack, inputs * inputs_of_byte(self.format), outputs

    def slice(self, first: Int[Array, ""] | int, count: int) -> "QuantizedWeight":
        """Neighbouring matrices of the stack."""
        return self._map(lambda part: lax.dynamic_slice_in_dim(part, first, count))

    def take(self, indices: Int[Array, " T"]) -> "QuantizedWeight":
        """Matrices by index."""
        return self._map(lambda part: jnp.take(part, indices, axis=0))

    def dequantize(self) -> Float[Array, "R I O"]:
        """The numbers, float32: one product each, rounded to nearest even."""
        codes = jnp.swapaxes(self.codes, -1, -2) if self.outputs_first else self.codes
        values = self._values(codes)
        scales = self.scales.astype(jnp.float32)
        by_output = scales if self.span == 1 else jnp.repeat(scales, self.span, axis=2)
        return values * jnp.repeat(by_output, self.group, axis=1)[:, : values.shape[1]]

    def _values(self, codes: Shaped[Array, "R bytes O"]) -> Float[Array, "R I O"]:
        """What the codes are."""
        if self.format not in CODE_VALUES:
            return codes.astype(jnp.float32)
        stack, count, outputs = codes.shape
        whole = lax.bitcast_convert_type(codes, jnp.uint8).reshape(stack, -1, self.run, outputs)
        halves = jnp.stack([whole & 15, whole >> 4], axis=2)  # [R, pairs of runs, 2, run, O]
        values = jnp.asarray(CODE_VALUES[self.format], jnp.float32)
        return jnp.take(values, halves.astype(jnp.int32)).reshape(stack, 2 * count, outputs)

    def _map(self, select: Callable[[Array], Array]) -> "QuantizedWeight":
        """Select matrices. Codes are moved as bytes: on CPU XLA would convert all of them to floats and back."""
        moved = select(lax.bitcast_convert_type(self.codes, jnp.uint8))
        codes = lax.bitcast_convert_type(moved, self.codes.dtype)
        return dataclasses.replace(self, codes=codes, scales=select(self.scales))


Weight = Float[Array, "R I O"] | QuantizedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledRows:
    """Rows for products with codes: each of P parts of a row, of equal lengths, times a power of two, and the inverses,
    which its sums are multiplied by."""

    values: Float[Array, "N D"]  # float16
    inverse: Float[Array, "P N"]  # float32

    @property
    def shape(self) -> tuple[int, ...]:
        """N and D."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def part(self) -> int:
        """Numbers of a part."""
        return self.values.shape[1] // self.inverse.shape[0]


LARGEST_E4M3 = 448.0
_SHIFT = 2.0**14  # neighbours of float32 are 2^-9 apart from here on, as subnormal numbers of e4m3 are
_SHIFT_BITS = 0x46800000
_BIAS = (127 - 7) << 3  # of the exponent of float32 over that of e4m3, in codes
_NAN = 0x7F
LEAST_PEAK = LARGEST_E4M3 * 2.0**-126  # of a block that has a scale: smaller ones are zeros
_AT_ONCE = 1 << 26  # numbers that are quantised at once
BLOCK = 128  # inputs and outputs that share a scale where plain numbers are quantised


@functools.partial(jax.jit, static_argnames=("segments", "group", "span", "outputs_first"))
def quantize_blocks(
    numbers: Float[Array, "R I O"],
    *,
    segments: tuple[int, ...],
    group: int,
    span: int = 1,
    outputs_first: bool = False,
) -> tuple[Float[Array, "R I O"] | Float[Array, "R O I"], Float[Array, "R J P"]]:
    """Codes of e4m3, and scales for groups of inputs and spans of outputs, of blocks of 128 x 128: a block's scale is
    its largest absolute value over 448, and a code the number over the scale, rounded to nearest even. A block of
    zeros, or of numbers whose scale would be below the least normal number, has the scale 1 and zeros. Blocks of each
    of the `segments` of the outputs begin anew, and the last ones are cut short; with a span of 128 none is. All in
    float32. Some matrices at a time: temporaries stay near 1 GiB, or a few matrices."""
    assert all(size % span == 0 for size in segments), (segments, span)
    stack, dtype = numbers.shape[0], numbers.dtype
    most = max(1, _AT_ONCE // math.prod(numbers.shape[1:]))
    batch = next(size for size in range(min(most, stack), 0, -1) if stack % size == 0)
    bits = {2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]  # bits are not converted outside of the loop

    def quantize(stored: Array) -> tuple[Array, Array]:
        matrix = functools.partial(
            _quantize_matrix, segments=segments, group=group, span=span, outputs_first=outputs_first
        )
        return jax.vmap(matrix)(lax.bitcast_convert_type(stored, dtype))

    stored = lax.bitcast_convert_type(numbers, bits).reshape(stack // batch, batch, *numbers.shape[1:])
    codes, scales = lax.map(quantize, stored)
    return codes.reshape(stack, *codes.shape[2:]), scales.reshape(stack, *scales.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def through_grid(numbers: Float[Array, "R I O"], segments: tuple[int, ...]) -> Float[Array, "R I O"]:
    """The numbers that `quantize_blocks` keeps, in the dtype of those given. The gradient is that of the identity
    (straight-through estimator; Bengio et al. 2013)."""
    codes, scales = quantize_blocks(numbers, segments=segments, group=BLOCK)
    return QuantizedWeight.create(codes, scales).dequantize().astype(numbers.dtype)


def _through_grid_forward(
    numbers: Float[Array, "R I O"], segments: tuple[int, ...]
) -> tuple[Float[Array, "R I O"], None]:
    return through_grid(numbers, segments), None


def _through_grid_backward(
    segments: tuple[int, ...], residual: None, gradient: Float[Array, "R I O"]
) -> tuple[Float[Array, "R I O"]]:
    return (gradient,)


through_grid.defvjp(_through_grid_forward, _through_grid_backward)


def _quantize_matrix(
    numbers: Float[Array, "I O"], *, segments: tuple[int, ...], group: int, span: int, outputs_first: bool
) -> tuple[Float[Array, "I O"] | Float[Array, "O I"], Float[Array, "J P"]]:
    wide, inputs = numbers.astype(jnp.float32), numbers.shape[0]
    parts = jnp.split(jnp.abs(wide), np.cumsum(segments)[:-1].tolist(), axis=1)
    peaks = jnp.concatenate([_block_peaks(part) for part in parts], axis=1)  # [blocks of I, blocks of O]
    # XLA multiplies by the inverse of a divisor that is a constant, or that it can invert before it is repeated; that
    # rounds otherwise. So divisors depend on every number.
    is_scaled = peaks >= LEAST_PEAK
    scales = jnp.where(is_scaled, peaks, 1.0) / jnp.where(is_scaled, LARGEST_E4M3, 1.0)
    of_outputs = block_of_outputs(segments)
    by_number = jnp.repeat(jnp.take(scales, of_outputs, axis=1), BLOCK, axis=0)[:inputs]
    codes = e4m3_bits(wide / jnp.where(wide == 0, 1.0, by_number))
    codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    groups = np.arange(math.ceil(inputs / group)) * group // BLOCK
    shown = jnp.take(jnp.take(scales, of_outputs[::span], axis=1), groups, axis=0)
    return codes.T if outputs_first else codes, shown


def _block_peaks(sizes: Float[Array, "I O"]) -> Float[Array, "I_blocks O_blocks"]:
    """The largest number of each block."""
    inputs, outputs = sizes.shape
    padded = jnp.pad(sizes, ((0, -inputs % BLOCK), (0, -outputs % BLOCK)))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).max((1, 3))


def block_of_outputs(segments: tuple[int, ...]) -> Int[np.ndarray, " O"]:
    """The block of each output."""
    counts = [math.ceil(size / BLOCK) for size in segments]
    firsts = np.cumsum([0, *counts])
    return np.concatenate([first + np.arange(size) // BLOCK for first, size in zip(firsts, segments, strict=False)])


def e4m3_bits(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Numbers as bytes of e4m3: clipped to 448, rounded to nearest even; NaN stays one. By integers, which round alike
    on all devices and inside of kernels; a conversion of XLA may round twice."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    size = lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
    clipped = jnp.where(size > LARGEST_E4M3, LARGEST_E4M3, size)
    wide = lax.bitcast_convert_type(clipped, jnp.uint32)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - _BIAS
    small = lax.bitcast_convert_type(clipped + _SHIFT, jnp.uint32) - _SHIFT_BITS
    code = jnp.where(clipped < 2.0**-6, small, normal)
    code = jnp.where(size == size, code, _NAN)
    return (code | ((bits >> 24) & 0x80)).astype(jnp.uint8)
