"""Small engines for end-to-end tests: the tiny MoE, two padded shapes.

tests/conftest.py registers this module as a plugin: its fixture guards the engines that tests share."""

import concurrent.futures
import contextlib
import tempfile
import threading
import time

import jax
import pytest

from routed_experts import Engine
from routed_experts.engine.loop.core import PauseMode
from routed_experts.execution.model_runner import ModelRunner
from support import lazy_compile
from support.tiny_checkpoint import write_tiny_checkpoint

SMALL = {"precompile_bs_paddings": (4,), "precompile_token_paddings": (32,)}
GRACE_S = 5.0  # in which requests that a test has left may end: a server needs a moment to notice that a client is gone
_shared_engines = {}  # by their settings


@contextlib.contextmanager
def open_engine(folder, **args):
    """An engine of a checkpoint folder; it must be idle at the end."""
    with Engine(str(folder), **(SMALL | args)) as engine:
        yield engine
        assert_idle(engine)


@contextlib.contextmanager
def shared_engine(**args):
    """The engine of these settings that all test files of a process share, because compiling is slow. Its cache is
    empty, and it must be idle at the end."""
    settings = frozenset(args.items())
    if settings not in _shared_engines:
        assert ModelRunner.compile is not lazy_compile.compile_lazily, "a shared engine has all its programs"
        with tempfile.TemporaryDirectory() as folder:
            _shared_engines[settings] = Engine(str(write_tiny_checkpoint(folder)), **(SMALL | args))
    engine = _shared_engines[settings]
    engine.flush_cache()
    yield engine
    assert_idle(engine)


@pytest.fixture(autouse=True)
def restore_shared_engines():
    """After a test, end what it has left on a shared engine, so that no other test meets it, and report the test."""
    yield
    left = [state for settings in tuple(_shared_engines) if (state := _restore(settings)) is not None]
    assert not left, f"the test left a shared engine {'; '.join(left)}"


def _restore(settings):
    """Make a shared engine idle; returns the state in which it was, None if it was idle."""
    engine = _shared_engines[settings]
    if not engine.thread.is_alive:
        del _shared_engines[settings]  # the next test that asks for it builds another
        return "shut down"
    paused, table = engine.paused, engine.components.core.request_table
    end = time.monotonic() + GRACE_S
    while paused is None and table.num_live and time.monotonic() < end:
        on_engine_thread(engine, lambda core: None)
    live = on_engine_thread(engine, lambda core: core.request_table.live()) if table.num_live else ()
    if paused is None and not live:
        return None
    engine.resume()
    engine.abort(abort_all=True)
    engine.thread.run_drained(lambda: None)  # deliver their last outputs
    return (f"paused ({paused}), " if paused else "") + f"with {len(live)} live requests: {', '.join(live)}"


@contextlib.contextmanager
def assert_nothing_allocated():
    """No array is alive at the end of the block that was not alive before it. Other arrays may be freed meanwhile."""
    before = jax.live_arrays()  # held: the id of a freed array could be that of a new one
    known = {id(array) for array in before}
    try:
        yield
    finally:
        new = [array.shape for array in jax.live_arrays() if id(array) not in known]
        assert not new, f"{len(new)} arrays were allocated, the first {new[:4]}"


def assert_idle(engine):
    """Assert that the engine is intact and holds no request, no page and no row."""

    def check(core):
        pages = core.ranks[0].pages
        assert core.request_table.num_live == 0 and not core.ranks.running and not core.ranks[0].waiting
        assert pages.num_available == pages.allocator.num_total, (pages.num_available, pages.allocator.num_total)
        assert pages.table.num_free == pages.table.num_total

    on_engine_thread(engine, check)
    assert engine.check_integrity() == []


def on_engine_thread(engine, script):
    """Run `script(core)` on the engine thread between two steps; it may step the core itself."""
    return engine.thread.run_between_steps(lambda: script(engine.components.core))


class PausedRequests:
    """Requests in threads of their own, frozen by a pause "in_place" after each has generated `outputs` tokens or a few
    more. `engine.resume()`, or another pause, lets them go on.

    Raises the error that refused a request, or TimeoutError; then the requests are aborted and the pause is over."""

    def __init__(self, engine, *prompts, outputs=3, timeout_s=60, **options):
        engine.pause(mode="in_place")
        deadline = time.monotonic() + timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
        self._running = [self._pool.submit(engine.generate, input_ids=prompt, **options) for prompt in prompts]

        def check_time(awaited):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(prompts)} requests {awaited} in {timeout_s} s")

        def begin(core):
            core.resume()
            while min(core.request_table.find(rid).num_output for rid in core.request_table.live()) < outputs:
                check_time(f"have not generated {outputs} tokens each")
                engine.thread.deliver(core.step().outs)
            core.pause(PauseMode.IN_PLACE)

        try:
            while on_engine_thread(engine, lambda core: core.request_table.num_live) < len(prompts):
                check_time("were not accepted")
                for refused in (future for future in self._running if future.done()):
                    refused.result()
            on_engine_thread(engine, begin)
        except BaseException:
            engine.abort(abort_all=True)
            engine.resume()
            self._pool.shutdown()
            raise

    def results(self):
        """Wait for the answers."""
        results = [future.result(timeout=60) for future in self._running]
        self._pool.shutdown()
        return results


class HeldThread:
    """An engine thread that takes no command and runs no step until `release`."""

    def __init__(self, engine):
        self._engine, self._go_on, held = engine, threading.Event(), threading.Event()

        def hold(core):
            held.set()
            self._go_on.wait(60)

        self._pool = concurrent.futures.ThreadPoolExecutor(8)
        self._pool.submit(on_engine_thread, engine, hold)
        assert held.wait(10)

    def start(self, call, *args):
        """Make a call in a thread of its own."""
        return self._pool.submit(call, *args)

    def submit(self, call, *args):
        """Make a call in a thread of its own; returns its future once it has sent a command to the engine."""
        before = self._engine.thread.num_pending_commands
        future = self.start(call, *args)
        while self._engine.thread.num_pending_commands == before:
            assert not future.done(), future.result()
        return future

    def release(self):
        self._go_on.set()
        self._pool.shutdown()


def letter_bias(engine, count=20):
    """A logit bias under which a random model generates ASCII letters alone; some tokens are several letters."""
    tokenizer = engine.tokenizer
    alphabetic = [
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token).isalpha() and not tokenizer.is_special(token)
    ]
    ascii_only = [token for token in alphabetic if tokenizer.token_bytes(token).isascii()]
    assert len(ascii_only) > count
    return dict.fromkeys(sorted(ascii_only, key=lambda token: -len(tokenizer.token_bytes(token)))[:count], 100.0)
