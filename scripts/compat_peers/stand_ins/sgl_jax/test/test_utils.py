"""sgl-jax's `test_utils` has the names of SGLang's."""

from sglang.test.test_utils import *  # noqa: F403
from sglang.test.test_utils import __getattr__ as __getattr__
