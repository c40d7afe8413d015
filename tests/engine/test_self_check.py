"""The check of capture at start: rows that are played back are those that run, and a replay that is none is noticed."""

import pytest

from routed_experts import Engine
from routed_experts.core.errors import CaptureUnsupportedError, InvalidRequestError
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build import self_check
from support.engines import SMALL, assert_idle, on_engine_thread
from support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    phases = []
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with Engine(
        str(folder), enable_return_routed_experts=True, self_check=True, on_phase=phases.append, **SMALL
    ) as engine:
        yield engine, phases


def test_it_is_the_last_phase_and_leaves_nothing(engine):
    engine, phases = engine
    assert [phase.name for phase in phases][-2:] == ["compile", "self-check"] and "15 rows" in phases[-1].detail
    assert_idle(engine)
    assert on_engine_thread(engine, lambda core: core.request_table.accepted) == 0
    assert engine.routing_stats().num_tokens.sum() == 0, "what it fed counts for nobody"
    assert engine.generate(input_ids=[5, 6, 7] * 4, max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


def test_after_it_nothing_compiles(engine):
    engine, _ = engine
    assert engine.compiles.serving == 0
    engine.generate(input_ids=[5, 6, 7], max_new_tokens=4, return_routed_experts=True)
    assert engine.compiles.serving == 0 < engine.compiles.startup


class Forgetful:
    """A scorer that routes live whatever it is given."""

    def __init__(self, scorer):
        self._scorer = scorer

    def run(self, sequences, routed, served):
        return self._scorer.run(sequences, [None] * len(sequences), served)


def test_a_replay_that_routes_live_is_refused(engine):
    engine, _ = engine
    core = engine.components.core
    new_core = lambda: type(core)(core.ranks, core.runner, core.capturers)  # noqa: E731
    sizes = {"vocab_size": 313, "context_length": 512}
    run = lambda scorer: on_engine_thread(engine, lambda _: self_check.check_replay(new_core, scorer, **sizes))  # noqa: E731
    assert run(engine.scorer) == 15
    with pytest.raises(
        CaptureUnsupportedError,
        match=r"replayed 15 rows, and \d+ of them ran on other experts, the first at token 0",
    ):
        run(Forgetful(engine.scorer))
    engine.flush_cache()


def test_a_context_without_room_for_a_sequence_is_not_checked(engine):
    engine, _ = engine
    assert self_check.check_replay(lambda: None, None, vocab_size=313, context_length=4) == 0


def test_without_capture_there_is_nothing_to_check(tmp_path, engine_factory):
    with engine_factory() as plain:
        assert "self-check" not in [phase.name for phase in plain.phases]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"speculative": SpeculativeConfig(algorithm="NGRAM")}])
def test_a_queue_that_is_shorter_than_a_batch_is_one_of_users_alone(tmp_path, options):
    """Start-up checks and timings feed whole batches."""
    folder = write_tiny_checkpoint(tmp_path)
    with Engine(str(folder), **SMALL, max_queued_requests=2, self_check=True, **options) as engine:
        assert len(engine.generate(input_ids=[[5, 6, 7], [7, 6, 5]], max_new_tokens=2)) == 2
        with pytest.raises(InvalidRequestError, match="max_queued_requests"):
            engine.generate(input_ids=[[5, 6, 7]] * 3, max_new_tokens=2)
