"""Which inputs a block of a GPU kernel sums, counted in inputs, bytes and groups, and codes of 4 bits as numbers."""

import dataclasses
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from routed_experts.layers.gpu import attention, backends, packed_codes
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.capability import converts_e4m3
from routed_experts.layers.gpu.operands import Inputs
from routed_experts.layers.gpu.packed_codes import SCALED_UNIT, UNITS, times_scales, unpack_halves

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
VALUES = {"int4": [code - 8.0 for code in range(16)], "e2m1": [*E2M1, *(-value for value in E2M1)]}
BYTES = np.arange(256, dtype=np.uint8).reshape(8, 32)


@pytest.mark.parametrize(("length", "size"), [(384, 64), (384, 128), (384, 192), (384, 512), (160, 64), (64, 16)])
@pytest.mark.parametrize("unit", [1, 2, 32, 128])
def test_steps_are_counted_in_whole_units(length, size, unit):
    """As the inputs of that step are, one by one; also of a part behind others, where parts have whole units."""
    parts = (None, 0, 3) if length % unit == 0 else (None,)
    for part, index in itertools.product(parts, range(-(-length // size))):
        begin = length * (part or 0)
        inputs = Inputs(length=length, size=size, part=None if part is None else jnp.int32(part))
        assert inputs.first(jnp.int32(index), size, unit) == (begin + index * size) // unit
        if size % unit or length % unit:
            continue
        units, exists = inputs.step(jnp.int32(index), size, unit)
        expected = [begin // unit + (index * size) // unit + number for number in range(size // unit)]
        assert units.tolist() == expected
        real = [unit_id < (begin + length) // unit for unit_id in expected]
        assert (exists is None and all(real)) or exists.tolist() == real


def primitives(jaxpr) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        names |= {equation.primitive.name}
        for value in equation.params.values():
            names |= primitives(value.jaxpr) if hasattr(value, "jaxpr") else set()
    return names


@pytest.mark.parametrize("unit", [1, 2, 32])
def test_whole_units_are_counted_without_a_quotient(unit):
    """Triton loads codes one byte at a time behind a quotient, and does not pipeline the loads."""
    inputs = Inputs(length=2880, size=64)
    counted = jax.make_jaxpr(lambda part, index: Inputs(length=2880, size=64, part=part).first(index, 64, unit))(1, 2)
    assert not primitives(counted.jaxpr) & {"div", "floor_divide", "rem", "select_n"}
    assert "div" in primitives(jax.make_jaxpr(lambda index: inputs.first(index, 64, 128))(2).jaxpr)


def values(form: str, upper: int) -> np.ndarray:
    return np.asarray(VALUES[form])[BYTES >> 4 if upper else BYTES & 15]


def run_on_gpu(function, *arrays):
    """The arrays that the function makes of others inside one kernel."""
    shapes = jax.eval_shape(lambda *arrays: function(*arrays, interpret=True), *arrays)

    def kernel(*refs):
        results = function(*(plgpu.load(ref) for ref in refs[: len(arrays)]), interpret=False)
        for ref, result in zip(refs[len(arrays) :], results, strict=True):
            plgpu.store(ref, result)

    return jax.jit(pl.pallas_call(kernel, shapes, compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1)))(
        *arrays
    )


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    compute_capability: str = ""


def test_e4m3_needs_compute_capability_8_9():
    assert converts_e4m3() and converts_e4m3([Device("cpu")])
    for capability, converts in (("8.0", False), ("8.6", False), ("8.9", True), ("9.0", True), ("12.0", True)):
        assert converts_e4m3([Device("cpu"), Device("gpu", capability)]) == converts, capability
    assert not converts_e4m3([Device("gpu", "9.0"), Device("gpu", "8.0")])
    assert not converts_e4m3([Device("gpu", "gfx942")])  # AMD's


@pytest.mark.parametrize("module", [backends, attention])
def test_gpus_below_8_9_keep_no_codes_of_8_bits(module, monkeypatch):
    monkeypatch.setattr(module, "converts_e4m3", lambda: False)
    if module is backends:
        formats = [gpu_kernels(interpret=interpret).code_formats for interpret in (False, True)]
        assert formats == [{"int4", "e2m1"}, {"e4m3", "int4", "e2m1"}]
    else:
        assert [gpu_attention_backend(interpret=interpret).kv_formats for interpret in (False, True)] == [
            frozenset(),
            frozenset({"e4m3"}),
        ]


COMPILED = [pytest.param(False, id="array code"), pytest.param(True, id="assembly", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("converts", [True, False])
@pytest.mark.parametrize("form", VALUES)
def test_every_byte_has_the_values_of_its_halves(form, converts, compiled, monkeypatch):
    """Also as GPUs decode e2m1 that have no instruction for e4m3."""
    monkeypatch.setattr(packed_codes, "converts_e4m3", lambda: converts)
    codes = jnp.asarray(BYTES if form == "e2m1" else BYTES.view(np.int8))

    def unpack(codes, *, interpret):
        return unpack_halves(codes, form, interpret=interpret)

    halves = run_on_gpu(unpack, codes) if compiled else unpack(codes, interpret=True)
    for upper, half in enumerate(halves):
        assert half.dtype == jnp.float16
        np.testing.assert_array_equal(np.asarray(half, np.float64) * UNITS[form], values(form, upper))


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("exponents", [(-8, -5), (0, 3), (-61, -60), (62, 65)])
def test_codes_times_powers_of_two_are_exact(exponents, compiled):
    """Rows of the block have the two scales and some between them."""
    powers = np.linspace(*exponents, len(BYTES)).round()
    scales = [jnp.asarray(2.0**exponent, jnp.bfloat16)[:, None] for exponent in (powers, powers[::-1])]

    def multiply(codes, lower, upper, *, interpret):
        return times_scales(codes, [lower.astype(jnp.float32), upper.astype(jnp.float32)], interpret=interpret)

    arguments = (jnp.asarray(BYTES), *scales)
    numbers = run_on_gpu(multiply, *arguments) if compiled else multiply(*arguments, interpret=True)
    for upper, (half, exponent) in enumerate(zip(numbers, (powers, powers[::-1]), strict=True)):
        assert half.dtype == jnp.bfloat16
        expected = [
            [Fraction(value) * Fraction(2.0**power) for value in row]
            for row, power in zip(values("e2m1", upper), exponent, strict=True)
        ]
        actual = [[Fraction(float(number)) * Fraction(SCALED_UNIT) for number in row] for row in half]
        assert actual == expected
