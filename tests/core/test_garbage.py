"""Objects are left out of collections of garbage while a process serves."""

import gc

import pytest

from routed_experts.core.garbage import freeze_gc, frozen_gc


@pytest.fixture(autouse=True)
def thawed():
    """No object is frozen before a test and after it."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_are_frozen_until_the_end_also_where_it_is_an_error():
    def fail():
        with frozen_gc():
            assert gc.get_freeze_count() > 1000
            raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        fail()
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_before_stays_so():
    freeze_gc()
    with frozen_gc():
        pass
    assert gc.get_freeze_count() > 1000
