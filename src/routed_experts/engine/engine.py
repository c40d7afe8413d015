"""Engine: the door for Python. Text in, text and routed experts out. Knows nothing of HTTP.

with Engine("path/to/model", enable_return_routed_experts=True) as engine:
    out = engine.generate("Once upon a time", return_routed_experts=True)"""

import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendRegistry
from routed_experts.engine.build.builder import Phase, PhaseClock, build_engine
from routed_experts.engine.control.engine_control import EngineControl
from routed_experts.engine.requests.async_generation import AsyncGeneration
from routed_experts.engine.requests.generation import GenerationCall
from routed_experts.engine.requests.input_processor import InputProcessor, RequestLimits, is_nested
from routed_experts.engine.requests.outputs import RequestOutput
from routed_experts.engine.requests.streaming import check_kind, stream_outputs
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.execution.compilation_cache import enable_compilation_cache
from routed_experts.execution.compile_count import CompileCount
from routed_experts.models.base.config_reader import eos_token_ids_of
from routed_experts.models.base.interface import Decoder
from routed_experts.models.loading.model_source import with_local_model

Result = dict[str, object] | list[dict[str, object]]


class Engine(EngineControl):
    """Serves one model. Every method may be called from any thread; leaving the `with` shuts it down.

    Keywords are the fields of ServerArgs. `model=` serves a module instead of a folder (its tokenizer from
    tokenizer_path); `load_format="dummy"` gives a folder's config random weights; `experts` keeps some experts on the
    host (ExpertOffloadConfig), `placement` says on which of `ep_size` devices their instances are (a plan, its file, or a
    PlacementConfig with how it is served); `self_check` plays captured rows back before the engine is ready; `on_phase`
    is told of each phase of start-up, `on_load` of (bytes loaded, bytes in all). Raises ConfigError, CheckpointError,
    PlacementError or CaptureUnsupportedError."""

    def __init__(
        self,
        model_path: str | None = None,
        *,
        model: Decoder | None = None,
        registry: BackendRegistry = DEFAULT_BACKENDS,
        on_phase: Callable[[Phase], None] | None = None,
        on_load: Callable[[int, int], None] | None = None,
        load_format: str = "auto",
        experts: ExpertOffloadConfig | None = None,
        placement: ExpertPlacement | PlacementConfig | str | os.PathLike[str] | None = None,
        self_check: bool = False,
        **server_args: Any,
    ) -> None:
        self.server_args = _args_of(model_path, server_args)
        args = with_local_model(self.server_args, weights=load_format != "dummy")
        clock = PhaseClock(on_phase)
        self._tokenizer = _tokenizer_of(args)
        eos_token_ids = frozenset[int]() if args.model_path is None else eos_token_ids_of(Path(args.model_path))
        enable_compilation_cache()
        how: dict[str, Any] = {"registry": registry, "clock": clock, "load_format": load_format, "on_load": on_load}
        how |= {"experts": experts, "placement": PlacementConfig.create(placement), "self_check": self_check}
        self.compiles = CompileCount()
        try:
            assembly = build_engine(args, model=model, **how)
        except BaseException:
            self.compiles.close()
            raise
        super().__init__(args, assembly)
        self.phases = tuple(clock.phases)
        limits = RequestLimits(
            context_length=self._assembly.context_length,
            pool_tokens=(self._assembly.plan.pool.num_pages - 1) * args.page_size,
            vocab_size=self._assembly.vocab_size,
            capture=self._assembly.capture is not None,
            eos_token_ids=eos_token_ids,
            max_requests=args.max_queued_requests,
        )
        self._door = InputProcessor(limits, self._tokenizer, random_seed=args.random_seed)
        self.compiles.start_serving()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, object] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **said: Any,
    ) -> Result | Iterator[dict[str, object]]:
        """Generate for one prompt (a dict) or many (a list of dicts, in order; n > 1 gives n a prompt).

        Each dict holds `text`, `output_ids` and `meta_info`. Keywords are the fields of GenerateReqInput:
        max_new_tokens, rid, extra_key, return_logprob, logprob_start_len, top_logprobs_num, return_routed_experts,
        routed_experts_start_len (alias routed_experts_prompt_start), routed_experts_format ("int32" or "npy"),
        routed_experts_layers ("all" or "moe"). With return_routed_experts, meta_info holds `routed_experts` for the S-1
        tokens that were fed (int32 [S-1, layers, top_k], dense layers -1): read it with
        `extract_routed_experts_from_meta_info`. With `stream` it gives an iterator of cumulative dicts; closing it
        aborts. Raises InvalidRequestError, CaptureDisabledError, PromptTooLongError, QueueFullError,
        RoutingIncompleteError or EngineDeadError."""
        call = self._call(prompt, sampling_params, input_ids, stream, said)
        return call.stream(self._loop) if stream else call.run(self._loop)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Mapping[str, object] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **said: Any,
    ) -> Result | AsyncIterator[dict[str, object]]:
        """`generate` for an event loop; cancelling the task aborts."""
        call = self._call(prompt, sampling_params, input_ids, stream, said)
        return call.stream_async(self._loop) if stream else await call.run_async(self._loop)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, output_kind: str = "delta"
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt, text or token ids, as RequestOutputs of the running event loop. `output_kind`:
        "delta" gives what the choice that has news has added, "cumulative" all that it has told, "final" one output of
        all choices at the end. Rows, if `params` ask for them, come with the end of their choice. Closing the iterator
        or cancelling its task aborts. Raises InvalidRequestError and its kin at once, others from the iterator."""
        check_kind(output_kind)
        if params is not None and params.routed_experts_format is not None:
            text = f"routed_experts_format={short_repr(params.routed_experts_format)} is for the wire; here rows are arrays: leave it out"
            raise InvalidRequestError(text, param="routed_experts_format", code="ref_unavailable")
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        said = GenerateReqInput(text=text, input_ids=ids, sampling_params=params, stream=output_kind != "final")
        requests, mode, capture = self._door.admit(said), self.server_args.logprobs_mode, self._assembly.capture

        def open_call() -> AsyncGeneration:
            call = GenerationCall(requests, self._tokenizer, single=False, logprobs_mode=mode, capture=capture)
            return AsyncGeneration(call, self._loop, max_backlog=sys.maxsize)

        return stream_outputs(open_call, text, kind=output_kind)

    def abort(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """End requests with what they have: that of `rid` (with all its choices and prompts), or all. Returns how
        many."""
        if (rid is None) != abort_all:
            raise InvalidRequestError(
                f"rid={short_repr(rid)} with abort_all={abort_all}; give one of them", param="rid"
            )
        core = self._assembly.core

        def end() -> int:
            live = [req for one in core.ledger.live() if (req := core.ledger.find(one)) is not None]
            return sum(
                core.abort(req.rid)
                for req in live
                if abort_all or rid in (req.rid, req.source.group.rpartition("-")[0])
            )

        return self._loop.call(end)

    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns the pages freed. Pages of running requests stay theirs."""
        return self._loop.call(self._assembly.core.flush_cache)

    def check_integrity(self) -> list[Violation]:
        """Check pages, prefix cache, rows and request counts; empty when all hold."""
        return self._loop.call(self._assembly.core.check_integrity)

    def get_server_info(self) -> dict[str, object]:
        """Configuration, memory plan, start-up phases and counters."""
        core = self._assembly.core
        return {
            **dataclasses.asdict(self.server_args),
            "context_length": self._assembly.context_length,
            "memory_plan": self.memory_plan,
            "prefix_cache": self._assembly.prefix_cache,
            "phases": {phase.name: phase.seconds for phase in self.phases},
            "requests_accepted": core.ledger.accepted,
            "requests_finished": dict(core.ledger.finished),
            "weight_version": str(core.runner.weight_version),
        }

    @property
    def memory_plan(self) -> list[str]:
        """What was allocated and why, a purpose a line: weights, KV pages, capture on the device and on the host."""
        return self._assembly.plan.lines()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None with skip_tokenizer_init."""
        return self._tokenizer

    def shutdown(self) -> None:
        """Abort what runs, tell its callers, end the engine thread. Idempotent."""
        self._loop.stop()
        if self._assembly.rebalancer is not None:
            self._assembly.rebalancer.close()
        self.compiles.close()

    def __enter__(self) -> "Engine":
        """Give the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _call(
        self,
        prompt: str | Sequence[str] | None,
        sampling_params: SamplingParams | Mapping[str, object] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        stream: bool,
        said: dict[str, Any],
    ) -> GenerationCall:
        if "text" in said:
            raise InvalidRequestError(
                "text is no parameter of generate; did you mean prompt?", param="text", code="unknown_field"
            )
        request = request_of(text=prompt, sampling_params=sampling_params, input_ids=input_ids, stream=stream, **said)
        requests = self._door.admit(request)
        single = len(requests) == 1 and (
            isinstance(prompt, str) or (input_ids is not None and not is_nested(input_ids))
        )
        mode, capture = self.server_args.logprobs_mode, self._assembly.capture
        return GenerationCall(requests, self._tokenizer, single=single, logprobs_mode=mode, capture=capture)


def request_of(**said: Any) -> GenerateReqInput:
    """A GenerateReqInput from keywords; None is absent, and an unknown one is refused with the nearest name."""
    alias = said.pop("routed_experts_prompt_start", None)
    if alias is not None:
        start = said.get("routed_experts_start_len")
        if start is not None and start != alias:
            text = f"routed_experts_prompt_start={short_repr(alias)} and routed_experts_start_len={short_repr(start)} differ; give one"
            raise InvalidRequestError(text, param="routed_experts_start_len", code="conflicting_parameters")
        said["routed_experts_start_len"] = alias
    known = [field.name for field in dataclasses.fields(GenerateReqInput)]
    unknown = [name for name in said if name not in known]
    if unknown:
        text = f"{unknown[0]} is no parameter of generate; {suggestion(unknown[0], known)}"
        raise InvalidRequestError(text, param=unknown[0], code="unknown_field")
    return GenerateReqInput(**{name: value for name, value in said.items() if value is not None})


def _args_of(model_path: str | None, said: dict[str, Any]) -> ServerArgs:
    known = [field.name for field in dataclasses.fields(ServerArgs)]
    unknown = [name for name in said if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]} is no parameter of Engine; {suggestion(unknown[0], known)}")
    paddings = ("precompile_bs_paddings", "precompile_token_paddings")
    fields: dict[str, Any] = {"model_path": model_path} | said
    fields |= {name: tuple(fields[name]) for name in paddings if isinstance(fields.get(name), list)}
    fields |= {
        name: str(fields[name])
        for name in ("model_path", "tokenizer_path")
        if isinstance(fields.get(name), os.PathLike)
    }
    return ServerArgs(**fields)


def _tokenizer_of(args: ServerArgs) -> Tokenizer | None:
    folder = args.tokenizer_path or args.model_path
    if args.skip_tokenizer_init or folder is None:
        return None
    if args.tokenizer_path is None and not os.path.exists(os.path.join(folder, "config.json")):
        return None  # no checkpoint at all: `build_engine` says so, which helps more than a missing tokenizer.json
    return Tokenizer.from_directory(folder)
