"""MemoryControl: the engine's device memory, given up and taken back while the engine lives on: a trainer on the
same device needs it. Knows nothing of requests but that they wait.

What runs goes back to the queue with its tokens and rows, then the KV pool is freed, and with it every cached prefix:
nothing that was filed under a page is kept. Compiled programs stay, so taking memory back compiles nothing."""

import threading
from collections.abc import Sequence
from typing import Any

from flax import nnx

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import EngineComponents
from routed_experts.engine.build.served_model import ServedModel
from routed_experts.engine.control.score import Scorer
from routed_experts.engine.control.weights import Weights, state_of
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.engine_thread import EngineThread
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner

TAGS = ("kv_cache", "weights")


class MemoryControl:
    """A core in its loop, and the memory that it holds."""

    def __init__(self, args: ServerArgs, assembly: EngineComponents) -> None:
        self._assembly = assembly
        self._loop = EngineThread(assembly.core)
        self._placing = threading.Lock()  # weights are exchanged, moved or released, one after another
        self._scorer = Scorer(args, assembly.buckets, assembly.core.runner, self._loop.run_between_steps)

    def release_memory_occupation(self, tags: Sequence[str] = TAGS) -> None:
        """Free the KV pool ("kv_cache"), the engine's hold on its weights ("weights"), or both, between two steps.
        Requests that run go back to the queue and, with those that come in, wait until all is taken back. Arrays of
        weights that the caller holds too stay the caller's. What is released already stays so. Raises
        InvalidRequestError for other tags, and on an engine with experts=."""
        core = self._assembly.core
        refuse_split(core, "release_memory_occupation")
        chosen = frozenset(tags) if isinstance(tags, Sequence) and not isinstance(tags, str) else frozenset[str]()
        if not chosen or not chosen <= frozenset(TAGS):
            raise InvalidRequestError(
                f"tags={short_repr(tags)} must be a list of some of {', '.join(TAGS)}", param="tags"
            )
        with self._placing, self._scorer.turn:  # a score holds weights and pages of its own until it has ended
            self._loop.run_drained(lambda: core.release_memory(chosen))

    def resume_memory_occupation(self, state: Weights | None = None, *, version: int | None = None) -> None:
        """Take back all that was released, with an empty pool, and go on with what waits. Released weights come from
        `state`, as `update_weights` takes it, under a `version` that rises, or have come by `update_weights` meanwhile.
        Without a release nothing happens. Raises InvalidRequestError where weights are wanted and none are given, or
        one of `state` and `version` is missing; WeightsMismatchError as `update_weights`. Then all stays released."""
        core = self._assembly.core
        if (state is None) != (version is None):
            raise InvalidRequestError(
                "state and version come together: weights, and the number that they are known by", param="version"
            )

        def resume(arrays: nnx.State[Any, Any] | None) -> None:
            if not core.released:
                return
            if arrays is not None and version is not None:
                core.update_weights(arrays, version=version, cache="flush")
            if "weights" in core.released:
                text = "the weights were released; give state= and version=, or call update_weights first"
                raise InvalidRequestError(text, param="state")
            core.resume_memory()

        with self._placing:
            served = served_now(self._assembly)
            arrays = None if state is None else served.placed(state_of(state, served.arrays))
            self._loop.run_drained(lambda: resume(arrays))

    @property
    def released(self) -> tuple[str, ...]:
        """What has been released and not been taken back: tags of `release_memory_occupation`."""
        return tuple(tag for tag in TAGS if tag in self._assembly.core.released)


def served_now(assembly: EngineComponents) -> ServedModel:
    """The served model, its experts where they are now."""
    runner = assembly.core.runner
    return (
        assembly.served.under(runner.placement, runner.factor)
        if isinstance(runner, ReplicatedExpertRunner)
        else assembly.served
    )


def refuse_released(core: EngineCore, what: str) -> None:
    """Raise InvalidRequestError where memory is released."""
    if core.released:
        text = f"{what} needs memory that is released ({', '.join(sorted(core.released))}); call resume_memory_occupation first"
        raise InvalidRequestError(text, param="tags")


def refuse_split(core: EngineCore, what: str) -> None:
    """Raise InvalidRequestError where some experts live on the host."""
    if isinstance(core.runner, OffloadRunner):
        text = f"{what} is not supported by this release on an engine with experts=; build one without it"
        raise InvalidRequestError(text, param="experts")
