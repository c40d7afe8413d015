"""The EAGLE-3 head of the demo model: it fits the package, drafts well, and changes no answer."""

from pathlib import Path

import pytest

import routed_experts
from routed_experts import Engine, SpeculativeConfig
from routed_experts.models.loading.model_source import demo_head_path
from support.lazy_compile import lazy_compilation

ROOT = Path(routed_experts.__file__).parents[2]
PROMPTS = [
    "Once upon a time there was a small fox who lived in a forest.",
    "def first(iterable):",
    "Mr. Speaker, the state of the Union",
    "The river was wide, and the old man",
]


def test_the_head_takes_at_most_a_megabyte():
    files = sorted(file.name for file in demo_head_path().iterdir())
    assert files == ["config.json", "model.safetensors"]
    assert sum(file.stat().st_size for file in demo_head_path().iterdir()) <= 1 << 20


@pytest.fixture(scope="module")
def engine():
    config = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="demo", num_steps=3, adaptive=False)
    sizes = dict(precompile_bs_paddings=(4,), precompile_token_paddings=(64,))
    with (
        lazy_compilation(),
        Engine("demo", **sizes, deterministic=True, enable_return_routed_experts=True, speculative=config) as engine,
    ):
        yield engine


@pytest.mark.parametrize(("temperature", "floor"), [(0.0, 2.0), (1.0, 1.5)])
def test_the_head_drafts_well_and_changes_no_answer(engine, temperature, floor):
    engine.flush_cache()
    sampling = {"temperature": temperature, "seed": 5, "max_new_tokens": 64, "ignore_eos": True}
    before = engine.stats().speculative.requests
    answers = [
        engine.generate(PROMPTS, {**sampling, "speculative": drafts}, return_routed_experts=True, return_logprob=True)
        for drafts in (False, True)
    ]
    after = engine.stats().speculative.requests
    plain, drafted = (
        [
            (out["output_ids"], out["meta_info"]["output_token_logprobs"], out["meta_info"]["routed_experts"])
            for out in outs
        ]
        for outs in answers
    )
    assert plain == drafted
    assert (after.emitted - before.emitted) / (after.verify_steps - before.verify_steps) >= floor


def test_another_folder_named_demo_wins(tmp_path, monkeypatch):
    from routed_experts.models.loading.model_source import draft_folder_path

    monkeypatch.chdir(tmp_path)
    assert draft_folder_path("demo") == draft_folder_path(Path("demo")) == demo_head_path()
    (tmp_path / "demo").mkdir()
    assert draft_folder_path("demo") == Path("demo")
