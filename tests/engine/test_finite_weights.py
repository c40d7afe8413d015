"""Numbers that are none among weights, against NumPy's own check of the same numbers in float32."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from routed_experts.engine.control import weights
from routed_experts.engine.control.scale_rules import ScaleRule

RULE = ScaleRule.NOT_NEGATIVE
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ["nan", "-nan", "inf", "-inf", "largest", "smallest"])
def test_one_number_anywhere_decides(dtype, bits, monkeypatch):
    monkeypatch.setattr(weights, "_BLOCK", 100)
    largest = float(ml_dtypes.finfo(dtype).max)
    value = {"largest": largest, "smallest": float(ml_dtypes.finfo(dtype).smallest_subnormal)}.get(bits)
    value = float(bits) if value is None else value
    for position in (0, 99, 100, 256, 1004):
        array = np.random.default_rng(position).standard_normal(1005).astype(dtype)
        array[position] = value
        expected = bool(np.isfinite(array.astype(np.float32)).all())
        assert expected == (bits in ("largest", "smallest"))
        for each in (array, array.reshape(5, 201), array.reshape(5, 201)[:, ::2], jnp.asarray(array)):
            own = bool(np.isfinite(np.asarray(each).astype(np.float32)).all())
            assert weights._is_finite(each) == own
        flags = weights._finite_flags([jnp.asarray(array), jnp.zeros(3)], (None, None))
        assert flags.tolist() == [expected, True]


def test_whole_numbers_and_no_numbers_are_finite():
    for array in (np.full(4, 0x7F80, np.uint16), np.full(4, 0x7FFF, np.int16), np.zeros(0, np.float16)):
        assert weights._is_finite(array)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", ["0", "1", "-1", "-0", "nan", "inf"])
def test_scales_are_neither_negative_nor_infinite(dtype, value):
    """-0 is negative, as it is in a file."""
    scales = np.ones((3, 2, 5), dtype)
    scales[1, 0, 3] = float(value)
    expected = value in ("0", "1")
    for array in (scales, scales.transpose(2, 0, 1), jnp.asarray(scales)):
        assert weights._is_finite(array, RULE) == expected
    flags = weights._finite_flags([jnp.asarray(scales), -jnp.ones(3)], (RULE, None))
    assert flags.tolist() == [expected, True]
    _, flags = weights._copy_arrays([jnp.asarray(scales)], (jnp.dtype(dtype),), (RULE,), looks=True)
    assert flags.tolist() == [expected]
