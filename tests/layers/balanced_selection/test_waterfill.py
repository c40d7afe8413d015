"""Water-filling: the loops of its definition, the linear programme's optimum, and one result for cut and uncut
tokens."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from layers.balanced_selection.test_selection import VARIANTS, random_case, same_bits
from oracles.replica_loads import best_max_load, device_loads, plain_waterfill
from oracles.selection import popular, replica_table
from routed_experts.core.errors import ConfigError
from routed_experts.layers.balanced_selection.selection import Selection, balanced_expert_selection
from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas

FILL = jax.jit(waterfill_replicas, static_argnames=("num_devices", "num_instances", "iterations"))
SIZES = [(288, 32), (384, 128)]


@pytest.mark.parametrize("seed", range(6))
def test_loads_are_those_of_the_loops_and_every_slot_runs_on_its_expert(seed):
    rng = np.random.default_rng(seed)
    table = replica_table(rng, 12, 20, 4)
    ids = np.argsort(-(rng.gumbel(size=(40, 12)) + rng.standard_normal(12)), axis=1)[:, :3].astype(np.int32)
    ids[rng.random(40) < 0.2] = -1
    got = np.asarray(FILL(ids, table, num_devices=5, num_instances=20))
    owners = {int(i): e for e, row in enumerate(table) for i in row if i >= 0} | {-1: -1}
    assert np.array_equal(np.vectorize(owners.__getitem__)(got), ids)
    plain = plain_waterfill(ids, table, 5, 20, 16)
    assert np.mean(got != plain) <= 0.02, "a cut may fall on the other side of a half in float32"
    assert np.max(np.abs(device_loads(got, 5, 20) - device_loads(plain, 5, 20))) <= 1


@pytest.mark.parametrize(("num_instances", "num_devices"), SIZES)
def test_the_fullest_device_is_within_5_percent_of_the_linear_programmes(num_instances, num_devices):
    ratios, even = [], []
    for seed in range(3):
        scores, table = popular(seed, 1.0, num_instances, num_devices)
        ids = np.argsort(-scores, axis=1)[:, :8].astype(np.int32)
        best = best_max_load(np.bincount(ids.ravel(), minlength=256), table, num_devices, num_instances)
        for results, iterations in ((ratios, 16), (even, 1)):
            got = np.asarray(
                FILL(ids, table, num_devices=num_devices, num_instances=num_instances, iterations=iterations)
            )
            results.append(best / device_loads(got, num_devices, num_instances).max())
    assert min(ratios) >= 0.95, ratios
    assert np.mean(ratios) > np.mean(even), "one iteration is the even split"


def test_no_tokens_one_token_and_one_device():
    table = replica_table(np.random.default_rng(0), 4, 6, 3)
    assert np.all(np.asarray(FILL(np.full((5, 2), -1, np.int32), table, num_devices=3, num_instances=6)) == -1)
    instances = np.asarray(FILL(np.array([[2, 0]], np.int32), table, num_devices=6, num_instances=6))
    assert instances[0, 0] in table[2] and instances[0, 1] in table[0]
    assert np.all(np.asarray(FILL(np.array([[3, 1]] * 9, np.int32), table, num_devices=1, num_instances=6)) >= 0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_devices": 4}, "num_instances=6 does not divide into num_devices=4"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"ids": np.zeros((0, 2), np.int32)}, r"ids are \[0, 2\] of 4 experts"),
        ({"iterations": 0}, "iterations=0; at least 1"),
        ({"ids": np.zeros((5, 2), np.int64)}, r"ids is int64\[5, 2\]"),
        ({"ids": np.zeros(5, np.int32)}, r"ids is int32\[5\]"),
        ({"replica_order": np.zeros((2, 4, 3), np.int32)}, r"replica_order is int32\[2, 4, 3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, match):
    arguments = {
        "ids": np.zeros((5, 2), np.int32),
        "replica_order": np.zeros((4, 3), np.int32),
        "num_devices": 3,
        "num_instances": 6,
    }
    arguments |= changes
    with pytest.raises(ConfigError, match=match):
        waterfill_replicas(arguments.pop("ids"), arguments.pop("replica_order"), **arguments)


ROWS, NAMES = {"logical_ids", "instance_ids", "weights"}, list(Selection.__dataclass_fields__)


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("variant", "axis_name", "impl", "reroute"),
    [
        (2, "expert", "rounds", True),
        (3, "expert", "rounds", True),
        (3, None, "rounds", True),
        (4, "expert", "native", True),
        (2, "expert", "auto", False),
        (2, None, "auto", False),
    ],
)
def test_four_devices_select_as_one_whether_tokens_are_sharded_or_replicated(variant, axis_name, impl, reroute):
    shape, num_sources, on_exhausted = VARIANTS[variant]
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    assert mesh.size == 4
    sizes = {"impl": impl, "on_exhausted": on_exhausted} if reroute else {"num_devices": 4, "num_instances": shape[3]}
    options = {"k": shape[2], "mode": "reroute" if reroute else "replicas"} | sizes

    def run(scores, weights, order, capacity, source, valid, axis_name=axis_name):
        own = {"capacity": capacity, "source": source} if reroute else {}
        return balanced_expert_selection(scores, weights, order, valid=valid, axis_name=axis_name, **own, **options)

    sharded, replicated = P("expert"), P()
    rows = replicated if axis_name is None else sharded
    in_specs = (rows, rows, replicated, replicated, rows if num_sources else None, rows)
    out_specs = Selection(**{name: rows if name in ROWS else replicated for name in NAMES})
    on_mesh = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    plain = jax.jit(functools.partial(run, axis_name=None))
    for seed in range(12):
        case = random_case(seed, shape, num_sources)
        arguments = (case.scores, case.weights, case.order, case.capacity, case.sources, case.valid)
        actual, expected = on_mesh(*arguments), plain(*arguments)
        for name in NAMES:
            assert same_bits(getattr(actual, name), getattr(expected, name)), (seed, name)
