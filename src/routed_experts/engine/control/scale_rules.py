"""What the scales of codes must be, for those that a push of weights brings: as a checkpoint's are, and as kernels take
them."""

import enum

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from routed_experts.layers.quantized import E2M1, E2M1_MAX_SCALE


class ScaleRule(enum.Enum):
    """A rule, as errors state it. A GPU kernel multiplies codes of e2m1 by scales in bfloat16, which is exact for
    powers of two alone (OCP Microscaling Formats 1.0 has no others), up to E2M1_MAX_SCALE."""

    NOT_NEGATIVE = "finite scales that are not negative"
    POWERS_OF_TWO = "scales of MXFP4 that are powers of two up to 2^65, or 0"

    @staticmethod
    def for_format(format: str) -> "ScaleRule":
        """The rule for the scales of codes of that format."""
        return ScaleRule.POWERS_OF_TWO if format == E2M1 else ScaleRule.NOT_NEGATIVE

    def is_valid(
        self, scales: Float[Array, "..."] | Float[np.ndarray, "..."]
    ) -> Bool[Array, "..."] | Bool[np.ndarray, "..."]:
        """Whether each scale is what the rule says; -0.0 is negative."""
        limits = jnp.finfo(scales.dtype)
        bits = scales.view(f"uint{limits.bits}")
        fraction, rest = bits & ((1 << limits.nmant) - 1), bits >> limits.nmant  # `rest`: the sign and the exponent
        is_finite = rest < (1 << limits.nexp) - 1
        if self is ScaleRule.NOT_NEGATIVE:
            return is_finite
        is_subnormal_power = (rest == 0) & (fraction & (fraction - 1) == 0)
        is_within = bits <= _bits_of(E2M1_MAX_SCALE, scales.dtype)  # and so are not negative
        return is_finite & ((fraction == 0) | is_subnormal_power) & is_within


def _bits_of(scale: float, dtype: np.dtype) -> int:
    """The bits of the number of a dtype that is next to a scale; those of positive numbers have their order."""
    limits = jnp.finfo(dtype)
    return int(np.array(min(scale, float(limits.max)), dtype).view(f"uint{limits.bits}"))
