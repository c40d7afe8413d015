"""EngineControl: what a training loop or an operator does with a running engine: weights, pauses, scores. Knows nothing
of text.

Every method may be called from any thread and acts between two steps."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int32

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    CaptureDisabledError,
    InvalidRequestError,
    PromptTooLongError,
    RoutingAlignmentError,
)
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import EngineComponents
from routed_experts.engine.build.expert_offload import ffi_unavailable_reason
from routed_experts.engine.build.served_model import ServedModel
from routed_experts.engine.control.memory_control import refuse_released, served_now
from routed_experts.engine.control.placement_control import PlacementControl
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.engine.control.stats import EngineStats, engine_stats
from routed_experts.engine.control.weights import Weights, load_state, state_of
from routed_experts.engine.loop.core import EngineCore, PauseMode
from routed_experts.engine.loop.engine_thread import EngineThread
from routed_experts.engine.requests.input_processor import is_nested
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.memory.hugepages import advise_hugepages
from routed_experts.replay.check import check_record


class EngineControl(PlacementControl):
    """A core in its loop, and what can be done with it beside generating."""

    def __init__(self, args: ServerArgs, assembly: EngineComponents) -> None:
        super().__init__(args, assembly)

    def update_weights(self, state: Weights, *, version: int, cache: str = "flush", donate: bool = False) -> None:
        """Run later steps with other weights of the same tree, shapes and dtypes; nothing is compiled. `state` is an
        nnx.State, a module, or (nested or dotted) names to arrays; arrays that lie where the served ones do are taken
        as they are, so do not donate them afterwards. `version` must rise. Running requests prefill again with
        `cache="flush"` and keep their pages with "keep"; rows that were written stay, and their `version_spans` tell
        which weights made them. No new request matches old pages. Raises WeightsMismatchError naming the first arrays
        that differ; then nothing has changed.

        With `donate=True` the arrays are the engine's from now on, whoever still refers to them: one that had to be
        copied to where it is served is deleted there and then, and one that is served is deleted when other weights
        take its place or `release_memory_occupation` gives it up. So after an exchange the devices hold one copy of the
        weights. During it they hold the old and the new, unless the old were released before. It waits for a score that
        is under way.

        With experts= the host holds the old and the new store during it, the accelerator but one table: residents are
        written into it between two steps, one after another. A copy that fails leaves the old weights served, under the
        old version."""
        if not isinstance(donate, bool):
            raise InvalidRequestError(f"donate={short_repr(donate)} must be True or False", param="donate")
        with self._placing, self._scorer.turn:  # weights that were donated before are deleted by this exchange
            served, core = served_now(self._assembly), self._assembly.core
            load = lambda: _placed(core, served, state_of(state, served.arrays), donate=donate)  # noqa: E731
            _exchange(self._loop, core, load, version=version, cache=cache, donate=donate)

    def update_weights_from_disk(self, path: str | Path, *, version: int, cache: str = "flush") -> None:
        """`update_weights` with a checkpoint folder of the served architecture, read in the served dtype while requests
        go on. Raises WeightsMismatchError where config.json is of another model, CheckpointError where the folder is
        damaged."""
        with self._placing, self._scorer.turn:
            served, core = served_now(self._assembly), self._assembly.core
            _exchange(self._loop, core, lambda: _loaded(core, served, path), version=version, cache=cache)

    def update_weight_version(self, version: int) -> None:
        """Name the served weights anew: `version` must rise. Rows written from now on bear it; running requests keep
        their pages, and no new request matches pages of the old one. Raises WeightsMismatchError."""
        core = self._assembly.core

        def rename() -> None:
            refuse_released(core, "update_weight_version")
            core.update_weights(None, version=version, cache="keep")

        with self._placing:  # whoever loads weights has been told that its version will do
            self._loop.run_drained(rename)

    def pause(self, *, mode: str) -> None:
        """Hold still until `resume`; requests that come in meanwhile queue. `mode` says what becomes of those there
        are: "wait" lets what has started finish, and returns when it has; "retract" sends it back to the queue with its
        tokens and rows, its pages free; "in_place" freezes it with its pages; "abort" ends every request with what it
        has. Raises InvalidRequestError."""
        known = [pause_mode.value for pause_mode in PauseMode]
        if mode not in known:
            text = f"mode={short_repr(mode)} is unknown; choose one of {', '.join(known)}"
            raise InvalidRequestError(text, param="mode")
        core, pause_mode = self._assembly.core, PauseMode(mode)
        self._loop.run_drained(lambda: core.pause(pause_mode))
        if pause_mode is PauseMode.WAIT:
            self._loop.wait_until_paused()

    def resume(self) -> None:
        """End a pause of any mode; without one nothing happens."""
        self._loop.run_between_steps(self._assembly.core.resume)

    @property
    def paused(self) -> str | None:
        """The mode of the pause that holds, or None."""
        pause_mode = self._assembly.core.pause_mode
        return None if pause_mode is None else pause_mode.value

    def stats(self) -> EngineStats:
        """How the engine is: requests that run, wait and have ended, steps, pages, rows. Answers at once, also while a
        step is stuck and after the engine has ended."""
        return engine_stats(self._assembly)

    def routing_stats(self) -> RoutingStats:
        """How often each expert was chosen since the engine started or `reset_routing_stats`: of every token that a
        step fed for a request, prompts and generated tokens apart. A token that came from the prefix cache was not fed
        and does not count. Raises CaptureDisabledError where nothing is recorded."""
        return self._loop.run_between_steps(self._assembly.core.capturer.routing_stats)

    def reset_routing_stats(self) -> RoutingStats:
        """Begin to count anew; returns what was counted so far. Raises CaptureDisabledError where nothing is
        recorded."""
        return self._loop.run_between_steps(lambda: self._assembly.core.capturer.routing_stats(reset=True))

    @overload
    def score(
        self,
        token_ids: Sequence[int],
        *,
        routed: RoutedExperts | None = None,
        return_routed_experts: bool | None = None,
    ) -> ScoreOutput: ...
    @overload
    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        routed: Sequence[RoutedExperts | None] | None = None,
        return_routed_experts: bool | None = None,
    ) -> list[ScoreOutput]: ...
    def score(
        self, token_ids: Any, *, routed: Any = None, return_routed_experts: bool | None = None
    ) -> ScoreOutput | list[ScoreOutput]:
        """Score sequences with the served weights: S - 1 logprobs (temperature 1) and S rows each. Rows of `routed`
        that are valid are executed, as a trainer would replay them; other tokens are routed live. One sequence of ids
        gives one ScoreOutput, several give a list. Runs beside the requests, paused or not, in KV pages of its own (for
        the longest sequence, or a step's tokens); a program is made when a shape is first met. Rows are given where the
        engine records them; asking for them (True) elsewhere raises CaptureDisabledError, as replay there does. Raises
        InvalidRequestError for ids that are none, PromptTooLongError, and RoutingAlignmentError for rows that do not
        fit, naming sample, row and layer. With experts= the host's run inside one program, as with host_backend="ffi"
        and by threads of their own, and none is deferred; where that cannot be had InvalidRequestError says why."""
        _check_can_score(self._assembly.core)
        refuse_released(self._assembly.core, "score")
        several = is_nested(token_ids)
        sequences = [_checked(ids, self._assembly) for ids in (token_ids if several else [token_ids])]
        records: Sequence[RoutedExperts | None] | None = None
        if routed is not None:
            records = list(routed) if several and isinstance(routed, Sequence) else [routed]
        _check_routes(self._assembly.capture, records, sequences, return_routed_experts)
        core = self._assembly.core

        def served() -> tuple[nnx.State[Any, Any], int]:
            refuse_released(core, "score")
            return core.runner.state, core.runner.weight_version

        outputs = self._scorer.run(sequences, records, lambda: self._loop.run_between_steps(served))
        return outputs if several else outputs[0]


def _check_routes(
    spec: CaptureSpec | None,
    records: Sequence[RoutedExperts | None] | None,
    sequences: Sequence[Int32[np.ndarray, " S"]],
    wanted: bool | None,
) -> None:
    param = "routed" if records is not None else "return_routed_experts"
    if spec is None and (wanted or records is not None):
        text = f"{param} is given, but this engine records none; build it with Engine(..., enable_return_routed_experts=True)"
        raise CaptureDisabledError(text, param=param)
    if records is None or spec is None:
        return
    if len(records) != len(sequences):
        raise RoutingAlignmentError(
            f"routed holds {len(records)} records for {len(sequences)} sequences; give one each, or None"
        )
    for sample, (record, ids) in enumerate(zip(records, sequences, strict=True)):
        if record is not None:
            check_record(record, spec, sample=sample, num_tokens=ids.size)


def _checked(ids: Any, assembly: EngineComponents) -> Int32[np.ndarray, " S"]:
    """Token ids of one sequence, of this model and within its context."""
    listed = isinstance(ids, np.ndarray | Sequence) and len(ids) > 0
    if not listed or not all(isinstance(part, int | np.integer) and not isinstance(part, bool) for part in ids):
        raise InvalidRequestError(
            f"token_ids={short_repr(ids)} must be at least one token id, or a list of such lists", param="token_ids"
        )
    vocab, context = assembly.vocab_size, assembly.context_length
    wrong = [token for token in ids if not 0 <= token < vocab]
    if wrong:
        text = f"token_ids holds the token id {short_repr(int(wrong[0]))}, outside 0..{vocab - 1}; use this model's ids"
        raise InvalidRequestError(text, param="token_ids")
    if len(ids) > context:
        raise PromptTooLongError(
            f"token_ids has {len(ids)} tokens, above the context of {context}; cut it", param="token_ids"
        )
    return np.asarray(ids, np.int32)


def _check_can_score(core: EngineCore) -> None:
    if (
        isinstance(core.runner, OffloadRunner)
        and core.runner.split.has_host
        and (reason := ffi_unavailable_reason(jax.default_backend()))
    ):
        raise InvalidRequestError(
            f"score with experts= runs the host's experts inside a program, and here {reason}", param="experts"
        )


def _placed(core: EngineCore, served: ServedModel, state: nnx.State[Any, Any], *, donate: bool) -> nnx.State[Any, Any]:
    """Whole arrays of the served model, each copied to where it is served; beside the steps."""
    runner = core.runner
    return (
        runner.model.placed(state, donate=donate)
        if isinstance(runner, OffloadRunner)
        else served.placed(state, donate=donate)
    )


def _loaded(core: EngineCore, served: ServedModel, path: str | Path) -> nnx.State[Any, Any]:
    """The same of a folder; what the host keeps in another number format is held in both for a moment, an array at a
    time."""
    runner = core.runner
    if not isinstance(runner, OffloadRunner):
        return load_state(path, served)
    return runner.model.placed(load_state(path, served, place=runner.model.device_of), donate=True)


def _exchange(
    loop: EngineThread,
    core: EngineCore,
    load: Callable[[], nnx.State[Any, Any]],
    *,
    version: int,
    cache: str,
    donate: bool = False,
) -> None:
    """Go on with the arrays that `load` gives, which lie where they are served."""
    if cache not in ("flush", "keep"):
        raise InvalidRequestError(f"cache={short_repr(cache)} is unknown; choose flush or keep", param="cache")
    core.runner.check_version(version)  # before a donated array is touched
    state = load()
    advise_hugepages(leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))  # here: beside the steps
    loop.run_drained(lambda: core.update_weights(state, version=version, cache=cache, donate=donate))
    if isinstance(core.runner, OffloadRunner):
        # walks through trees of weights leave cycles behind, which hold the old store: the largest thing there is
        gc.collect()
