"""The examples run, in a small form."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.usefixtures("fast_compilation")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo_tiny", EXAMPLES / "grpo_tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_tiny"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["grpo_tiny"]


def test_grpo_trains_with_and_without_replay_and_logs_each_step(grpo, tmp_path, capsys):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        assert (
            grpo.main(["--steps", "2", "--prompts", "2", "--group", "3", "--new-tokens", "12", "--out", str(tmp_path)])
            == 0
        )
    runs = json.loads((tmp_path / "grpo.json").read_text())
    assert list(runs) == ["off", "on"]
    for run, logs in runs.items():
        assert [log["step"] for log in logs] == [0, 1]
        assert all(0 <= log["reward"] <= 1 and math.isfinite(log["loss"]) and log["k3"] >= 0 for log in logs)
        assert all((log["canary"] is None) == (run == "off") for log in logs)
    assert runs["off"][0]["reward"] == runs["on"][0]["reward"], "the first rollouts are the same"
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")
    assert "replay on: mean k3" in capsys.readouterr().out


def test_the_reward_is_the_share_of_vowels_and_advantages_are_relative_to_the_group(grpo):
    assert grpo.vowel_share("aeb!") == pytest.approx(2 / 3) and grpo.vowel_share("123 ?") == 0.0
    advantages = grpo.group_advantages(grpo.np.array([0.0, 1.0, 0.5, 0.5]), 2)
    assert advantages[:2] == pytest.approx([-1, 1], rel=1e-3) and advantages[2:] == pytest.approx([0, 0])


@pytest.mark.parametrize("argv", [["--steps", "0"], ["--group", "1"], ["--replay", "maybe"]])
def test_arguments_out_of_range_are_refused(grpo, argv):
    with pytest.raises(SystemExit):
        grpo.main(argv)
