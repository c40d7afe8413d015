"""Programs are compared in every process before the first step: threads stand for processes, and a list of texts for
what a runner compiles."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.test_process_group import TIMEOUT_S, group
from routed_experts.core.errors import ProcessMismatchError
from routed_experts.engine.build.runner_builder import compile_together
from routed_experts.execution.orders import MAX_HEAD_BYTES, Order, OrderKind, encode

PROGRAMS = [f"{number:012x} ('forward', {number})" for number in range(3)]
OTHER = [PROGRAMS[0], "ffffffffffff ('forward', 1)", PROGRAMS[2]]


class Compiled:
    """Stands for a runner that has compiled these programs."""

    def __init__(self, digests):
        self._digests = digests

    def compile_in_order(self):
        return self._digests


def outcomes(*programs):
    """By rank, the number of programs or the error of `compile_together`."""
    with group(num_followers=len(programs) - 1) as (leader, followers, _), ThreadPoolExecutor(len(programs)) as pool:
        running = [
            pool.submit(compile_together, Compiled(digests), member)
            for digests, member in zip(programs, [leader, *followers], strict=True)
        ]
        return [future.exception(TIMEOUT_S) or future.result() for future in running]


def test_equal_programs_are_counted():
    assert outcomes(PROGRAMS, PROGRAMS, PROGRAMS) == [3, 3, 3]


@pytest.mark.parametrize("other", [OTHER, PROGRAMS[:2], [*PROGRAMS, "0" * 12 + " more"]])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_names_the_first_program_that_differs(rank, other):
    programs = [PROGRAMS] * 3
    programs[rank] = other
    for number, error in enumerate(outcomes(*programs)):
        assert isinstance(error, ProcessMismatchError), error
        wrong = rank if number != rank else (1 if rank == 0 else 0)
        assert f"process {wrong} compiles another program than process {number}" in str(error)


def test_what_512_processes_exchange_fits_into_an_order():
    order = Order(kind=OrderKind.EXCHANGE, head={"name": "compile", "value": ["0" * 16] * 512})
    assert len(encode(order)[0]) < MAX_HEAD_BYTES // 8
