"""Which scales of codes a push may bring: against the numbers themselves, in every dtype, on host and device."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.engine.control.scale_rules import ScaleRule
from routed_experts.layers.quantized import E2M1, E4M3, INT4

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def is_scale_of_mxfp4(number: float) -> bool:
    fraction, exponent = math.frexp(number)  # of a power of two: 0.5, and one more than its exponent
    return number == 0 or (fraction == 0.5 and exponent - 1 <= 65)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_host", [False, True])
def test_rules_are_met_by_the_numbers_that_they_name(dtype, on_host):
    """For every number of 16 bits; of float32, for those of bfloat16 and their neighbours."""
    bits = np.arange(2**16, dtype=np.uint16)
    if dtype == jnp.float32:
        wide = bits.astype(np.uint32) << 16
        numbers = np.concatenate([wide, wide | 1, wide | 0xFFFF]).view(np.float32)
    else:
        numbers = bits.view(jnp.dtype(dtype))
    scales = numbers if on_host else jnp.asarray(numbers)
    values = [float(number) for number in numbers]
    finite = [math.isfinite(value) and math.copysign(1, value) > 0 for value in values]
    np.testing.assert_array_equal(ScaleRule.NOT_NEGATIVE.is_valid(scales), finite)
    powers = [keeps and is_scale_of_mxfp4(value) for keeps, value in zip(finite, values, strict=True)]
    np.testing.assert_array_equal(ScaleRule.POWERS_OF_TWO.is_valid(scales), powers)


def test_scales_of_mxfp4_alone_are_powers_of_two():
    assert [ScaleRule.for_format(form) for form in (E4M3, INT4, E2M1)] == [
        ScaleRule.NOT_NEGATIVE,
        ScaleRule.NOT_NEGATIVE,
        ScaleRule.POWERS_OF_TWO,
    ]
