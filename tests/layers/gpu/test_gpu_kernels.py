"""Every GPU kernel, interpreted, against the plain code that it stands for. The same cases run on a card: benchmarks/gpu_check.py."""

import pytest

from gpu_cases import small_cases

CASES = {f"{case.kernel}: {case.name}": case for case in small_cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_plain_code(case):
    outcome = case.run(True)
    assert outcome.is_good, outcome
