"""DistConfig: what cannot work is refused when it is made, in one sentence."""

import pytest

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError

GROUP = {"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}
REFUSED = [
    ({"nnodes": 0}, r"nnodes=0 must be an integer in 1\.\.1024"),
    ({"nnodes": True}, r"nnodes=True must be an integer"),
    ({"nnodes": "2"}, r"nnodes='2' must be an integer"),
    (GROUP | {"node_rank": 2}, r"node_rank=2 must be an integer in 0\.\.1; nnodes=2 ranks begin at 0"),
    (GROUP | {"node_rank": -1}, r"node_rank=-1 must be"),
    ({"node_rank": 1}, r"node_rank=1 must be an integer in 0\.\.0"),
    ({"nnodes": 2}, r"nnodes=2 needs dist_init_addr.*host:port"),
    ({"dist_init_addr": "10.0.0.1:5000"}, r"with nnodes=1, which is one process"),
    (GROUP | {"dist_init_addr": "10.0.0.1"}, r"is not host:port"),
    (GROUP | {"dist_init_addr": "tcp://10.0.0.1:5000"}, r"is not host:port"),
    (GROUP | {"dist_init_addr": "fd00::1:5000"}, r"is not host:port"),
    (GROUP | {"dist_init_addr": 5000}, r"is not host:port"),
    (GROUP | {"dist_init_addr": "10.0.0.1:0"}, r"port must be 1 to 65534"),
    (GROUP | {"dist_init_addr": "10.0.0.1:65535"}, r"port must be 1 to 65534, because the next one is used too"),
    (GROUP | {"dist_init_addr": "0.0.0.0:5000"}, r"no address that other processes can connect to"),
    (GROUP | {"dist_init_addr": "[::]:5000"}, r"no address that other processes can connect to"),
    (GROUP | {"dist_timeout": 0}, r"dist_timeout=0 must be 1 to 86400 seconds"),
    (GROUP | {"watchdog_timeout": float("nan")}, r"watchdog_timeout=nan must be"),
    (GROUP | {"watchdog_timeout": "30"}, r"watchdog_timeout='30' must be"),
]


@pytest.mark.parametrize(("fields", "expected"), REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(fields, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        DistConfig(**fields)
    assert "\n" not in str(caught.value)


def test_an_address_is_read_with_the_next_port_for_jax():
    dist = DistConfig(**GROUP, node_rank=1)
    assert (dist.address, dist.coordinator_address) == (("10.0.0.1", 5000), "10.0.0.1:5001")
    assert dist.is_group and not dist.is_leader
    dist = DistConfig(nnodes=2, dist_init_addr="[fd00::1]:65534")
    assert (dist.address, dist.coordinator_address) == (("fd00::1", 65534), "[fd00::1]:65535")


def test_one_process_is_no_group():
    assert not DistConfig().is_group and DistConfig().is_leader
