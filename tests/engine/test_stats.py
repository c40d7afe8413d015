"""Engine.stats: counts that add up, at once, whatever the engine does."""

import dataclasses
import threading
import time

import pytest

from routed_experts import CaptureDisabledError, Engine
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.loop.core import PauseMode
from support.engines import SMALL, PausedRequests, on_engine_thread
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint


def test_requests_pages_and_rows_are_counted(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:
        before = engine.stats()
        assert (before.running, before.waiting, before.cached_pages, before.last_step_age_s) == (0, 0, 0, 0.0)
        assert before.free_pages == before.total_pages and before.accepted == sum(before.finished.values())
        begun = PausedRequests(
            engine, *([5 + i] * 20 for i in range(4)), max_new_tokens=8, sampling_params={"ignore_eos": True}
        )
        during = engine.stats()  # frozen
        assert (during.running, during.waiting, during.accepted - before.accepted) == (4, 0, 4)
        pages_of_20 = -(-20 // engine.server_args.page_size)
        assert during.total_pages - during.free_pages >= 4 * pages_of_20 and during.last_step_age_s > 0
        engine.resume()
        begun.results()
        after = engine.stats()
        assert (after.running, after.waiting, after.finished["length"] - before.finished.get("length", 0)) == (0, 0, 4)
        assert after.capture_rows - before.capture_rows == 4 * (20 + 8 - 1)
        assert after.capture_missing_rows == before.capture_missing_rows
        assert after.num_steps > during.num_steps > before.num_steps
        assert after.free_pages + after.cached_pages == after.total_pages and after.cached_pages > 0
        assert (after.weight_version, after.update_count) == ("default", 0)
        assert (after.placement, dict(after.resident_hits)) == (None, {})
        with pytest.raises(dataclasses.FrozenInstanceError):
            after.running = 1


def test_a_pause_and_an_update_are_no_part_of_a_step(engine_factory):
    """What a server takes for a stall, and what a rebalancer takes for the time of a step, begins behind them."""

    def age_after(end):
        def script(core):
            core.last_progress -= 1000
            end(core)
            return time.monotonic() - core.last_progress

        return on_engine_thread(engine, script)

    def resume(core):
        core.pause(PauseMode.IN_PLACE)
        core.resume()

    with engine_factory() as engine:
        assert age_after(lambda core: None) > 900
        assert age_after(resume) < 900
        version = WeightVersion(label="next", update_count=1)
        assert age_after(lambda core: core.update_weights(None, version=version, cache="keep")) < 900


def test_it_answers_while_a_step_is_stuck_and_after_the_end(tmp_path):
    with lazy_compilation(), Engine(str(write_tiny_checkpoint(tmp_path)), **SMALL) as engine:
        stuck, release = threading.Event(), threading.Event()

        def block(core):
            stuck.set()
            assert release.wait(60)

        blocker = threading.Thread(target=on_engine_thread, args=(engine, block))
        blocker.start()
        assert stuck.wait(30) and engine.stats().capture_rows == 0
        release.set()
        blocker.join(30)
        with pytest.raises(CaptureDisabledError):
            engine.generate("a", return_routed_experts=True)
    assert engine.stats().accepted == 0
