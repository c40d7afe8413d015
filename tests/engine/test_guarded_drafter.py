"""A drafter that raises, in whatever operation, costs its drafts alone: the failure is counted, and the third is the
last."""

import numpy as np
import pytest

from oracles.driver import request
from routed_experts.core.speculative_stats import SpeculativeTotals
from routed_experts.engine.loop.guarded_drafter import MAX_FAILURES, GuardedDrafter
from routed_experts.speculation.drafter import Draft, DraftSample

OPERATIONS = {
    "open": lambda guarded, req: guarded.index(req),
    "extend": lambda guarded, req: guarded.index(req),
    "propose": lambda guarded, req: guarded.propose(req, 3),
    "remember": lambda guarded, req: guarded.remember(req.tokens[:2], req.tokens[2:4], DraftSample()),
    "forget": lambda guarded, req: guarded.forget(),
    "close": lambda guarded, req: guarded.close(req),
    "nbytes": lambda guarded, req: (guarded.propose(req, 3), guarded.count_bytes()),
}


class Failing:
    """A drafter of one token that raises in one operation, in all of its calls."""

    def __init__(self, operation):
        self.operation, self.num_calls = operation, 0

    def check(self, operation):
        if operation == self.operation:
            self.num_calls += 1
            raise RuntimeError(operation)

    @property
    def nbytes(self):
        self.check("nbytes")
        return 100

    def open(self, key, tokens, info):
        self.check("open")

    def extend(self, key, tokens):
        self.check("extend")

    def propose(self, key, most):
        self.check("propose")
        return Draft(np.array([4], np.int32), np.ones(1))

    def remember(self, prompt, output, sample):
        self.check("remember")

    def forget(self):
        self.check("forget")

    def close(self, key):
        self.check("close")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_is_counted_and_the_third_is_the_last(operation, caplog):
    drafter, totals, req = Failing(operation), SpeculativeTotals(), request("r", [5, 6, 7, 8])
    guarded = GuardedDrafter(drafter, 10, totals)
    if operation == "extend":
        assert guarded.index(req)
        req.num_known -= 1  # another length than is indexed
    for count in range(1, MAX_FAILURES + 3):
        OPERATIONS[operation](guarded, req)
        failures = min(count, MAX_FAILURES)
        assert totals.skipped["drafter_failed"] == guarded.num_failures == drafter.num_calls == failures
        assert guarded.has_failed is (failures == MAX_FAILURES)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert guarded.propose(req, 3) is None and not guarded.index(req)
    guarded.count_bytes()
    assert totals.store_bytes == 0


def test_without_a_failure_everything_is_passed_on():
    totals, req = SpeculativeTotals(), request("r", [5, 6, 7, 8])
    guarded = GuardedDrafter(Failing(None), 10, totals)
    for call in OPERATIONS.values():
        call(guarded, req)
    assert guarded.propose(req, 3).tokens.tolist() == [4]
    assert totals.store_bytes == 100 and not totals.skipped and not guarded.has_failed
