"""Small engines for tests of what users meet: the tiny MoE, two padded shapes. Knows no test."""

import concurrent.futures
import contextlib
import functools
import tempfile

import jax

from routed_experts import Engine
from routed_experts.engine.loop.core import PauseMode
from routed_experts.execution.model_runner import ModelRunner
from support import at_first_use
from support.tiny import write_tiny_checkpoint

SMALL = {"precompile_bs_paddings": (4,), "precompile_token_paddings": (32,)}


@contextlib.contextmanager
def serve(folder, **args):
    """An engine of a checkpoint folder; at the end it must be whole, with no request left."""
    with Engine(str(folder), **(SMALL | args)) as engine:
        yield engine
        assert_idle(engine)


@contextlib.contextmanager
def borrow(**args):
    """The engine of these settings that all test files of a process share, for compiling is most of a test: with an
    empty cache, and given back idle."""
    engine = _shared(**args)
    engine.flush_cache()
    yield engine
    assert_idle(engine)


@functools.cache
def _shared(**args):
    assert ModelRunner.compile is not at_first_use.compile_at_first_use, (
        "others will share this engine: it has all its programs"
    )
    with tempfile.TemporaryDirectory() as folder:
        return Engine(str(write_tiny_checkpoint(folder)), **(SMALL | args))


@contextlib.contextmanager
def nothing_allocated():
    """What happens within leaves no array behind that was not there before; what others left may go at any time, and
    says nothing."""
    before = jax.live_arrays()  # held: an array that went could give its name to a new one
    known = {id(array) for array in before}
    try:
        yield
    finally:
        new = [array.shape for array in jax.live_arrays() if id(array) not in known]
        assert not new, f"{len(new)} arrays were allocated, the first {new[:4]}"


def assert_idle(engine):
    """Nothing is broken, nothing is left: no request, no page, no row."""

    def look(core):
        pages = core.scheduler.pages
        assert core.request_table.num_live == 0 and not core.scheduler.running and not core.scheduler.waiting
        assert pages.num_available == pages.allocator.num_total, (pages.num_available, pages.allocator.num_total)
        assert pages.table.num_free == pages.table.num_total

    on_engine_thread(engine, look)
    assert engine.check_integrity() == []


def on_engine_thread(engine, script):
    """Run `script(core)` between two steps; what it sees cannot change under it, and it may step the core itself."""
    return engine.thread.run_between_steps(lambda: script(engine.components.core))


class Begun:
    """Requests in threads of their own, begun and then frozen by a pause "in_place": each has generated `outputs`
    tokens or a few more, and none can end before the test says so. Resume, or pause otherwise, to go on."""

    def __init__(self, engine, *prompts, outputs=3, **said):
        engine.pause(mode="in_place")
        self._pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
        self._running = [self._pool.submit(engine.generate, input_ids=prompt, **said) for prompt in prompts]
        while on_engine_thread(engine, lambda core: core.request_table.num_live) < len(prompts):
            pass

        def begin(core):
            core.resume()
            while min(core.request_table.find(rid).num_output for rid in core.request_table.live()) < outputs:
                engine.thread.deliver(core.step().outs)
            core.pause(PauseMode.IN_PLACE)

        on_engine_thread(engine, begin)

    def results(self):
        """The answers, once they have ended."""
        results = [one.result(timeout=60) for one in self._running]
        self._pool.shutdown()
        return results


def letters(engine, count=20):
    """A logit bias that leaves a random model nothing to say but ASCII letters, several a token here and there."""
    tokenizer = engine.tokenizer
    spoken = [
        token
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token).isalpha() and not tokenizer.is_special(token)
    ]
    ascii_only = [token for token in spoken if tokenizer.token_bytes(token).isascii()]
    assert len(ascii_only) > count
    return dict.fromkeys(sorted(ascii_only, key=lambda token: -len(tokenizer.token_bytes(token)))[:count], 100.0)
