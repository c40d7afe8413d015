"""The table of the peers' own tests: what it says stands in the page, and a test that differs from it is found."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from compat_peers import run, serving  # noqa: E402
from compat_peers.suites import SUITES  # noqa: E402


def test_the_table_has_an_outcome_and_a_reason_for_every_test_and_the_page_shows_it():
    table = run.read_table()
    assert set(table) <= set(SUITES) and {"vllm", "sglang", "sglang-jax"} <= set(table)
    for peer, files in table.items():
        assert set(files) <= set(SUITES[peer])
        for file, tests in files.items():
            assert tests, file
            for test, (outcome, reason) in tests.items():
                assert outcome in ("pass", "fails", "not applicable") and bool(reason) is (outcome != "pass"), test
    section = run.PAGE.read_text(encoding="utf-8").partition(run.HEADING)
    assert "".join(section[1:]).splitlines() == "\n".join(run.page_section(table)).splitlines(), (
        "run scripts/compat --peers FOLDER --write"
    )


def test_the_page_does_not_depend_on_the_order_of_runs():
    table = {"b": {"b.py": {"two": ("fails", "x")}, "a.py": {"one": ("pass", "")}}, "a": {"c.py": {"t": ("pass", "")}}}
    ordered = {peer: dict(sorted(files.items())) for peer, files in sorted(table.items())}
    assert run.page_section(table) == run.page_section(ordered)


def test_what_differs_from_the_table_is_found():
    expected = {"vllm": {"a.py": {"one": ("pass", ""), "two": ("fails", "why"), "unit": ("not applicable", "unit")}}}
    assert not list(run.differences(expected, expected))
    seen = {"vllm": {"a.py": {"one": ("fails", "x"), "two": ("pass", ""), "unit": ("pass", ""), "new": ("pass", "")}}}
    actual = list(run.differences(expected, seen))
    assert [line.split()[0] for line in actual] == ["DIFF", "DIFF", "NEW"]
    assert ["::" + line.split("::")[1].split(":")[0] for line in actual] == ["::one", "::two", "::new"]
    merged = run.merged(expected, seen, whole=True)["vllm"]["a.py"]
    assert merged["unit"] == ("not applicable", "unit"), "luck changes nothing"
    assert merged["one"] == ("fails", "x") and merged["two"] == ("pass", "") and merged["new"] == ("pass", "")
    assert run.shares(merged.values()) == "2 of 3 applicable tests pass (67 %), 1 are not applicable"


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (["--tp", "4", "--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--tp=4", "--enable-lora", "--lora-modules", "a=b", "--page-size", 1], ["--page-size", "1"]),
        (["--max-model-len", "128"], ["--max-model-len", "128"]),
    ],
)
def test_flags_of_the_machine_and_of_adapters_are_left_out_and_no_others(monkeypatch, args, kept):
    monkeypatch.setenv("COMPAT_MODEL_PATH", "MODEL")
    command = serving.serve_command("org/name", args)
    assert command[1:7] == ["-m", "routed_experts", "serve", "MODEL", "--served-model-name", "org/name"]
    assert command[-len(kept) :] == kept
    assert ("--context-length" in command) is ("--max-model-len" not in kept)
