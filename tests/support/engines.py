"""Small engines for end-to-end tests: the tiny MoE, two padded shapes."""

import concurrent.futures
import contextlib
import functools
import tempfile

import jax

from routed_experts import Engine
from routed_experts.engine.loop.core import PauseMode
from routed_experts.execution.model_runner import ModelRunner
from support import lazy_compile
from support.tiny_checkpoint import write_tiny_checkpoint

SMALL = {"precompile_bs_paddings": (4,), "precompile_token_paddings": (32,)}


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
    engine = _shared(**args)
    engine.flush_cache()
    yield engine
    assert_idle(engine)


@functools.cache
def _shared(**args):
    assert ModelRunner.compile is not lazy_compile.compile_lazily, "a shared engine has all its programs"
    with tempfile.TemporaryDirectory() as folder:
        return Engine(str(write_tiny_checkpoint(folder)), **(SMALL | args))


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
        pages = core.scheduler.pages
        assert core.request_table.num_live == 0 and not core.scheduler.running and not core.scheduler.waiting
        assert pages.num_available == pages.allocator.num_total, (pages.num_available, pages.allocator.num_total)
        assert pages.table.num_free == pages.table.num_total

    on_engine_thread(engine, check)
    assert engine.check_integrity() == []


def on_engine_thread(engine, script):
    """Run `script(core)` on the engine thread between two steps; it may step the core itself."""
    return engine.thread.run_between_steps(lambda: script(engine.components.core))


class PausedRequests:
    """Requests in threads of their own, frozen by a pause "in_place" after each has generated `outputs` tokens or a few
    more. `engine.resume()`, or another pause, lets them go on."""

    def __init__(self, engine, *prompts, outputs=3, **options):
        engine.pause(mode="in_place")
        self._pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
        self._running = [self._pool.submit(engine.generate, input_ids=prompt, **options) for prompt in prompts]
        while on_engine_thread(engine, lambda core: core.request_table.num_live) < len(prompts):
            pass

        def begin(core):
            core.resume()
            while min(core.request_table.find(rid).num_output for rid in core.request_table.live()) < outputs:
                engine.thread.deliver(core.step().outs)
            core.pause(PauseMode.IN_PLACE)

        on_engine_thread(engine, begin)

    def results(self):
        """Wait for the answers."""
        results = [future.result(timeout=60) for future in self._running]
        self._pool.shutdown()
        return results


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
