"""Numbers of devices that can share a model."""

import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.models.base.partitioning import ParallelConfig, Segment, column_parallel, tensor_parallel_sizes

PARTITIONS = {
    "q": column_parallel(Segment(64, 8, "query heads")),
    "kv": column_parallel(Segment(16, 2, "kv heads", repeated=True), Segment(16, 2, "kv heads", repeated=True)),
    "mlp": column_parallel(Segment(48, 48, "columns of an expert")),
}


@pytest.mark.parametrize("devices", [3, 5, 16, 1000])
def test_every_invalid_size_names_the_same_valid_sizes(devices):
    assert tensor_parallel_sizes(PARTITIONS) == (1, 2, 4, 8)
    with pytest.raises(ConfigError, match=f"tp_size={devices} does not divide .*; values that .*: 1, 2, 4, 8$"):
        ParallelConfig(devices).check(PARTITIONS)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_sizes_that_work_are_accepted(devices):
    ParallelConfig(devices).check(PARTITIONS)
