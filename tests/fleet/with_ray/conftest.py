"""One fleet of two replicas for all tests of this folder: the tiny MoE, through HAProxy."""

import pytest

from support.fleet_process import ADMIN, KEY, FleetProcess, wait_until
from support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Checkpoints below one root: w0 is served first, w1 and w2 have other weights, and two are refused. Two layers,
    the second of them MoE."""
    root = tmp_path_factory.mktemp("weights")
    for seed in range(3):
        write_tiny_checkpoint(root / f"w{seed}", seed=seed, num_hidden_layers=2)
    write_tiny_checkpoint(root / "other", tokenizer=False, num_hidden_layers=2, num_experts_per_tok=2)
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="session")
def fleet_session(folders):
    flags = ["--num-replicas", "2", "--enable-return-routed-experts", "--weights-root", str(folders)]
    flags += ["--api-key", KEY, "--admin-api-key", ADMIN, "--shutdown-timeout", "5", "--stream-interval", "0"]
    process = FleetProcess(folders / "w0", *flags)
    try:
        yield process.wait_ready()
    except BaseException:
        print(process.log()[-4000:])
        raise
    finally:
        process.close()


@pytest.fixture
def fleet(fleet_session):
    """The fleet, whole: two replicas serve one version. What a test has killed is replaced before the next one."""
    with fleet_session.client(ADMIN) as admin:
        wait_until(lambda: is_whole(admin))
        yield fleet_session
        wait_until(lambda: admin.post("/continue_generation").status_code == 200)


@pytest.fixture
def client(fleet):
    with fleet.client() as client:
        yield client


@pytest.fixture
def admin(fleet):
    with fleet.client(ADMIN) as client:
        yield client


def is_whole(client):
    response = client.get("/ready")
    replicas = response.json().get("replicas", [])
    return response.status_code == 200 and [replica["state"] for replica in replicas] == ["serving"] * 2
