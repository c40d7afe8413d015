"""The programs of an engine without drafts are among those of one with drafts, equal as lowered StableHLO: drafts add
programs and change none.

An exception is a head that reads the outputs of layers (EAGLE-3): they are outputs of the layers' programs, so these
are others. That the texts of these differ shows that the comparison sees a change."""

import functools

import pytest

from oracles.eagle_heads import LAYERS, D, V, eagle3_case
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.runner_builder import build_runner
from routed_experts.engine.build.startup_phases import PhaseClock
from support.family_folders import write_family
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

SIZES = dict(
    precompile_bs_paddings=(4,), precompile_token_paddings=(32,), page_size=8, context_length=64, max_total_tokens=256
)
DRAFT_PROGRAMS = {"accept", "advance", "commit", "draft", "locate"}
OF_EVERY_STEP = {"forward", "count"}  # those of verify steps are further ones


def table_of(folder, speculative, **options):
    """Each program of an engine, by its key, as the call that lowers it; those that are compiled at first use, too."""
    args = ServerArgs(model_path=str(folder), **SIZES | options)
    nothing = dict.fromkeys(("model", "on_load", "experts", "placement", "group"))
    build = functools.partial(build_runner, registry=DEFAULT_BACKENDS, clock=PhaseClock(None), load_format="auto")
    return build(args, speculative=speculative, **nothing).runner._programs.jobs


def changed_keys(off, on):
    """The programs of one table whose texts in the other differ."""
    changed = set()
    for key, lower in off.items():
        text = lower().as_text()
        assert len(text.splitlines()) > 5
        changed |= {key} if on[key]().as_text() != text else set()
    return changed


@functools.cache
def target_of(algorithm, root):
    """The folder of a target, and the draft of an algorithm for it."""
    folder = root / algorithm
    if algorithm == "EAGLE3":
        write_tiny_checkpoint(folder, tokenizer=False, vocab_size=V, num_hidden_layers=LAYERS, hidden_size=D)
        return folder, SpeculativeConfig(
            algorithm=algorithm, draft_model_path=str(eagle3_case().write(root / "head")), num_steps=3, adaptive=False
        )
    if algorithm == "recurrent":
        return write_family(folder, "lfm2-moe"), SpeculativeConfig(num_draft_tokens=4, adaptive=False)
    write_tiny_checkpoint(folder, tokenizer=False)
    if algorithm == "STANDALONE":
        own = SpeculativeConfig(algorithm=algorithm, draft_model_path=str(folder), num_steps=3, adaptive=False)
        return folder, own
    return folder, SpeculativeConfig(algorithm=algorithm, num_draft_tokens=4, adaptive=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return lambda algorithm: target_of(algorithm, root)


def is_of_drafts(key):
    """Whether a program is one of those that drafts add."""
    parts = key[1:] if key[0] == "masked" else key
    is_verify = getattr(parts[1], "mode", None) is ForwardMode.TARGET_VERIFY
    return parts[0] in DRAFT_PROGRAMS or (parts[0] in OF_EVERY_STEP and is_verify)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param("NGRAM", dict(enable_return_routed_experts=True), id="NGRAM, capture"),
        pytest.param("NGRAM", dict(deterministic=True), id="NGRAM, deterministic"),
        pytest.param("STANDALONE", dict(enable_return_routed_experts=True), id="STANDALONE, capture"),
        pytest.param("recurrent", dict(), id="layers with states"),
    ],
)
def test_an_engine_with_drafts_has_the_programs_of_one_without(algorithm, options, target):
    folder, speculative = target(algorithm)
    off, on = table_of(folder, None, **options), table_of(folder, speculative, **options)
    assert off.keys() < on.keys() and on.keys() - off.keys() == set(filter(is_of_drafts, on))
    assert not changed_keys(off, on)


def test_a_change_is_seen_outputs_of_layers_that_a_head_reads(target):
    """The layers' programs alone differ."""
    folder, speculative = target("EAGLE3")
    off = table_of(folder, None)
    layers = {key for key in off if key[0] == "forward"}
    assert changed_keys(off, table_of(folder, speculative)) == layers
