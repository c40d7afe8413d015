"""PlacementConfig refuses what cannot work, with the name, the value, the limit and the remedy in its words."""

from fractions import Fraction

import numpy as np
import pytest

from routed_experts import ConfigError, ExpertPlacement, PlacementConfig
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.placement_config import UNBOUNDED, parse_fraction

PLAN = ExpertPlacement.identity(2, 8, 2)
REROUTE = {"mode": "reroute", "capacity_factor": 1.25}
REFUSED = {
    "plan": ({"plan": 3}, "plan=3 is no placement; give an ExpertPlacement, or the .npz file"),
    "mode": ({"mode": "random"}, "mode='random' is unknown; choose one of replicas, reroute"),
    "exhausted": (REROUTE | {"on_exhausted": "wait"}, "on_exhausted='wait' is unknown; choose one of overflow, drop"),
    "no factor": ({"mode": "reroute"}, "'reroute' needs a factor, such as 1.25"),
    "factor alone": ({"capacity_factor": 2}, "a capacity factor and 'drop' go with mode='reroute'"),
    "drop alone": ({"on_exhausted": "drop"}, "a capacity factor and 'drop' go with mode='reroute'"),
    "text": (REROUTE | {"capacity_factor": "much"}, "capacity_factor='much' is no number"),
    "zero": (REROUTE | {"capacity_factor": 0}, "capacity_factor=0; it must be above 0"),
    "by zero": (REROUTE | {"capacity_factor": "1/0"}, "capacity_factor='1/0' is no number"),
    "nan": (REROUTE | {"capacity_factor": float("nan")}, "capacity_factor=nan is no number"),
    "fine": (REROUTE | {"capacity_factor": "1/5000"}, "a fraction of integers up to 4096"),
    "steps": ({"rebalance_every": -1}, "rebalance_every=-1 must be an integer of at least 0"),
    "layers": ({"layers_per_step": 0}, "layers_per_step=0 must be an integer of at least 1"),
    "truth": ({"num_nodes": True}, "num_nodes=True must be an integer"),
    "share": ({"expert_share": 0.0}, "expert_share=0.0 must be a finite number above 0"),
    "link": ({"link_bytes_per_s": float("inf")}, "link_bytes_per_s=inf must be a finite number above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_value_that_cannot_work_is_refused_by_name(case):
    fields, match = REFUSED[case]
    with pytest.raises(ConfigError, match=match):
        PlacementConfig(**({"plan": PLAN} | fields))


def test_a_factor_is_its_decimal_digits():
    factors = [1.25, "5/4", "1.1", 2, Fraction(7, 3), "inf", float("inf"), None]
    assert [parse_fraction(factor) for factor in factors] == [
        (5, 4),
        (5, 4),
        (11, 10),
        (2, 1),
        (7, 3),
        *[UNBOUNDED] * 3,
    ]


@pytest.mark.parametrize("factor", ["1/0", "1e99999999", "1E+99999999", "9" * 1000, "x"])
def test_a_factor_that_is_no_number_of_that_size_is_refused_at_once(factor):
    with pytest.raises(ConfigError, match="capacity_factor="):
        parse_fraction(factor)


def test_a_plan_may_be_a_file(tmp_path):
    PLAN.save(tmp_path / "plan.npz")
    for value in (PLAN, tmp_path / "plan.npz", str(tmp_path / "plan.npz"), PlacementConfig(plan=tmp_path / "plan.npz")):
        read = PlacementConfig.create(value)
        np.testing.assert_array_equal(read.initial.physical_to_logical_map, PLAN.physical_to_logical_map)
        assert not read.capacity_limited and read.rebalance_every == 0
    assert PlacementConfig.create(None) is None
    with pytest.raises(ConfigError, match="is no file; give the"):
        PlacementConfig.create(str(tmp_path / "other.npz"))
    (tmp_path / "broken.npz").write_bytes(b"no zip")
    with pytest.raises(RoutingFormatError, match=r"broken.npz"):
        PlacementConfig.create(tmp_path / "broken.npz")
