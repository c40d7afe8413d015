"""Engine: the Python entrance. Text or token ids in, text and routed experts out.

with Engine("path/to/model", enable_return_routed_experts=True) as engine:
    out = engine.generate("Once upon a time", return_routed_experts=True)

The module is long because each keyword is written out where it is taken: of the engine, of `generate`, of
`async_generate`. What the methods do is in engine/control/ and engine/requests/."""

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from jaxtyping import Float64

from routed_experts.core.capture_spec import WeightsDType
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.editable_sampling_params import EditableSamplingParams
from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import PARAM, ConfigError, InvalidRequestError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.keywords import ENGINE_NAMES, REQUEST_NAMES, check_keywords, request_error
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.sampling_params import SamplingParams, may_compile
from routed_experts.core.server_args import KVCacheDtype, Quantization, ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.core.weight_version import INITIAL_LABEL, WeightVersion, int_as_text
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendRegistry
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.build.group_start import join_group
from routed_experts.engine.build.startup_phases import Phase, PhaseClock
from routed_experts.engine.control.admission_control import AdmissionControl
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.control.internal_state import internal_state
from routed_experts.engine.control.memory_control import MEMORY_TAGS, MemoryControl
from routed_experts.engine.control.placement_control import PlacementControl
from routed_experts.engine.control.rollout_control import RolloutControl
from routed_experts.engine.control.score import ScoreOutput, Scorer
from routed_experts.engine.control.score_control import ScoreControl
from routed_experts.engine.control.stats import EngineStats, PlacementStats, engine_stats
from routed_experts.engine.control.weight_control import WeightControl
from routed_experts.engine.control.weights import Weights
from routed_experts.engine.group.process_group import LeadingGroup
from routed_experts.engine.loop.engine_thread import EngineThread
from routed_experts.engine.requests.generation import AsyncGeneration, GenerationCall
from routed_experts.engine.requests.input_processor import InputProcessor, RequestLimits
from routed_experts.engine.requests.outputs import RequestOutput, check_stream, stream_outputs
from routed_experts.engine.requests.sglang_output import sglang_output
from routed_experts.engine.requests.token_ids import is_nested
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.execution.compilation_cache import enable_compilation_cache
from routed_experts.execution.compile_count import CompileCount
from routed_experts.models.base.config_reader import read_eos_token_ids
from routed_experts.models.base.interface import Decoder
from routed_experts.models.loading.model_source import with_local_model

Prompt = str | Sequence[str]
TokenIds = Sequence[int] | Sequence[Sequence[int]]
Params = SamplingParams | Mapping[str, object]
ParamsList = Sequence[Params]  # one a prompt
Result = dict[str, object] | list[dict[str, object]]


def _unknown_argument(name: str, known: Sequence[str]) -> ConfigError:
    of_drafts = name.removeprefix("speculative_") if name.startswith("speculative_") else ""
    if of_drafts in {field.name for field in dataclasses.fields(SpeculativeConfig)}:
        fix = f"give it as {of_drafts} of speculative=SpeculativeConfig(...)"
    else:
        fix = ENGINE_NAMES.suggest(name, known)
    return ConfigError(f"{name} is no parameter of Engine; {fix}")


def _unknown_field(name: str, known: Sequence[str]) -> InvalidRequestError:
    nearest = "did you mean prompt?" if name == "text" else suggestion(name, known)
    return InvalidRequestError(f"{PARAM} is no parameter of generate; {nearest}", param=name, code="unknown_field")


class Engine:
    """Serves one model. Every method may be called from any thread; leaving the `with` shuts it down. In a process that
    was forked from the engine's, methods that need the engine thread raise EngineDeadError at once.

    Parts, for the other entrances and for tests: `components` (what the engine is built of), `thread` (runs functions
    between two steps), `scorer`, `input_processor`."""

    @check_keywords(_unknown_argument, peers=ENGINE_NAMES)
    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        *,
        model: Decoder | None = None,
        registry: BackendRegistry = DEFAULT_BACKENDS,
        on_phase: Callable[[Phase], None] | None = None,
        on_load: Callable[[int, int], None] | None = None,
        load_format: str = "auto",
        experts: ExpertOffloadConfig | None = None,
        placement: ExpertPlacement | PlacementConfig | str | os.PathLike[str] | None = None,
        speculative: SpeculativeConfig | None = None,
        speculative_algorithm: str | None = None,
        speculative_draft_model_path: str | os.PathLike[str] | None = None,
        speculative_num_steps: int | None = None,
        speculative_eagle_topk: int | None = None,
        speculative_num_draft_tokens: int | None = None,
        speculative_ngram_min_match_window_size: int | None = None,
        speculative_ngram_max_match_window_size: int | None = None,
        speculative_eagle_layers: Sequence[int] | None = None,
        speculative_scope: str | None = None,
        speculative_remember: bool | None = None,
        speculative_store_bytes: int | None = None,
        speculative_adaptive: bool | None = None,
        dist: DistConfig | LeadingGroup | None = None,
        nnodes: int = 1,
        node_rank: int = 0,
        dist_init_addr: str | None = None,
        dist_timeout: float | None = None,
        watchdog_timeout: float | None = None,
        self_check: bool = False,
        seed_stream: str | None = None,
        revision: str | None = None,
        tokenizer_path: str | os.PathLike[str] | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        quantization: Quantization = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        device: str = "auto",
        random_seed: int = 0,
        context_length: int | None = None,
        tp_size: int = 1,
        ep_size: int = 1,
        dp_size: int = 1,
        page_size: int = 16,
        mem_fraction_static: float = 0.8,
        max_total_tokens: int | None = None,
        max_running_requests: int | None = None,
        max_queued_requests: int = 1024,
        chunked_prefill_size: int | None = None,
        max_prefill_tokens: int | None = None,
        precompile_bs_paddings: Sequence[int] | None = None,
        precompile_token_paddings: Sequence[int] | None = None,
        disable_radix_cache: bool = False,
        attention_backend: str = "auto",
        moe_backend: str = "auto",
        enable_return_routed_experts: bool = False,
        enable_return_routed_experts_weights: bool = False,
        routed_experts_weights_dtype: WeightsDType = "float32",
        logprobs_mode: Literal["processed", "raw"] = "processed",
        deterministic: bool = False,
        skip_tokenizer_init: bool = False,
        weight_version: str | int = INITIAL_LABEL,
    ) -> None:
        """Build the engine: load, plan memory, allocate and compile.

        `model` serves a module instead of the folder `model_path` (its tokenizer from `tokenizer_path`).
        `load_format="dummy"` gives a folder's config random weights. `experts` keeps some experts on the host.
        `placement` distributes expert instances over `ep_size` devices: a plan, its file, or a PlacementConfig.
        `speculative` drafts tokens, which changes speed alone: a SpeculativeConfig, or its fields by SGLang's names.
        `dist`, or its fields `nnodes`, `node_rank`, `dist_init_addr`, `dist_timeout` and `watchdog_timeout`, make this
        process the first of several, which share the model's devices: the others call `follow`. Only this one schedules
        and reads rows. When one of them is lost, waiting requests raise PeerLostError and this process ends with exit
        code 3.

        Keywords of SGLang's, vLLM's and sgl-jax's engines that are not here are translated, accepted without effect,
        or refused with what to use: docs/flags.md.

        `self_check` replays captured rows before the engine is ready. `seed_stream` is a name for the seeds of requests
        that bring none: engines of one `random_seed` draw different samples under different names. `on_phase` receives
        each phase of start-up, `on_load` (bytes loaded, bytes in all). The other keywords are the fields of ServerArgs,
        described there. Raises ConfigError, CheckpointError, PlacementError, CaptureUnsupportedError or
        PeerLostError."""
        self.server_args = ServerArgs(
            model_path=_path_text(model_path),
            revision=revision,
            tokenizer_path=_path_text(tokenizer_path),
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            random_seed=random_seed,
            context_length=context_length,
            tp_size=tp_size,
            ep_size=ep_size,
            dp_size=dp_size,
            page_size=page_size,
            mem_fraction_static=mem_fraction_static,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            chunked_prefill_size=chunked_prefill_size,
            max_prefill_tokens=max_prefill_tokens,
            precompile_bs_paddings=_list_as_tuple(precompile_bs_paddings),
            precompile_token_paddings=_list_as_tuple(precompile_token_paddings),
            disable_radix_cache=disable_radix_cache,
            attention_backend=attention_backend,
            moe_backend=moe_backend,
            enable_return_routed_experts=enable_return_routed_experts,
            enable_return_routed_experts_weights=enable_return_routed_experts_weights,
            routed_experts_weights_dtype=routed_experts_weights_dtype,
            logprobs_mode=logprobs_mode,
            deterministic=deterministic,
            skip_tokenizer_init=skip_tokenizer_init,
            weight_version=int_as_text(weight_version),
        )
        flat = {
            "algorithm": speculative_algorithm,
            "draft_model_path": _path_text(speculative_draft_model_path),
            "num_steps": speculative_num_steps,
            "eagle_topk": speculative_eagle_topk,
            "num_draft_tokens": speculative_num_draft_tokens,
            "ngram_min_match_window_size": speculative_ngram_min_match_window_size,
            "ngram_max_match_window_size": speculative_ngram_max_match_window_size,
            "eagle_layers": _list_as_tuple(speculative_eagle_layers),
            "scope": speculative_scope,
            "remember": speculative_remember,
            "store_bytes": speculative_store_bytes,
            "adaptive": speculative_adaptive,
        }
        speculative = SpeculativeConfig.create(speculative, flat)
        plan = PlacementConfig.create(placement)
        flat_dist = {
            "nnodes": nnodes,
            "node_rank": node_rank,
            "dist_init_addr": dist_init_addr,
            "dist_timeout": dist_timeout,
            "watchdog_timeout": watchdog_timeout,
        }
        dist = _dist_config(dist, flat_dist)
        if isinstance(dist, DistConfig):
            _check_rank(dist)
        args = with_local_model(self.server_args, weights=load_format != "dummy")
        clock = PhaseClock(on_phase)
        group = dist if isinstance(dist, LeadingGroup) else None
        if isinstance(dist, DistConfig) and dist.is_group:
            joined = join_group(
                args,
                dist,
                model=model,
                experts=experts,
                placement=plan,
                speculative=speculative,
                load_format=load_format,
            )
            assert isinstance(joined, LeadingGroup), "of rank 0"
            group = joined
            clock.done("rendezvous", f"{dist.nnodes} processes")
        self._tokenizer = _load_tokenizer(args)
        eos_token_ids = frozenset[int]() if args.model_path is None else read_eos_token_ids(Path(args.model_path))
        if self._tokenizer is not None:
            eos_token_ids |= self._tokenizer.eos_token_ids
        enable_compilation_cache()
        self.compiles = CompileCount()
        try:
            components = build_engine(
                args,
                model=model,
                registry=registry,
                clock=clock,
                load_format=load_format,
                on_load=on_load,
                experts=experts,
                placement=plan,
                speculative=speculative,
                self_check=self_check,
                group=group,
            )
        except BaseException as error:
            self.compiles.close()
            if group is not None:
                group.fail(error)
            raise
        self.components, self.phases = components, tuple(clock.phases)
        self.thread = EngineThread(components.core, explain=None if group is None else group.explain)
        if group is not None:
            group.set_on_lost(self.thread.kill)
        self.scorer = Scorer(args, components.buckets, components.core.runner, self.thread.run_between_steps)
        context = EngineContext(components=components, thread=self.thread, scorer=self.scorer)
        self._admission = AdmissionControl(context)
        self._weights, self._memory = WeightControl(context), MemoryControl(context, self._admission)
        self._scores, self._placement = ScoreControl(context), PlacementControl(context)
        limits = RequestLimits(
            context_length=components.context_length,
            longest_context=components.served.config.context_length,
            pool_tokens=components.kv_tokens,
            vocab_size=components.vocab_size,
            capture=components.capture,
            eos_token_ids=eos_token_ids,
            max_requests=args.max_queued_requests,
            num_ranks=args.dp_size,
            no_given_ids=_no_given_ids(args, speculates=speculative is not None, group=group),
            no_grammar=None if group is None else "its followers sample before the mask of a step is known",
        )
        self.input_processor = InputProcessor(
            limits,
            self._tokenizer,
            random_seed=args.random_seed,
            seed_stream=seed_stream,
            before_grammar=components.core.runner.compile_masked,
            before_given_ids=components.core.runner.compile_given,
        )
        self._rollouts = RolloutControl(context, self.input_processor)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.compiles.start_serving()

    @check_keywords(_unknown_field, peers=REQUEST_NAMES, make_error=request_error, log_level=logging.DEBUG)
    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params | ParamsList | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: bool | None = False,
        max_new_tokens: int | None = None,
        rid: str | Sequence[str] | None = None,
        extra_key: str | Sequence[str | None] | None = None,
        return_logprob: bool | Sequence[bool] | None = False,
        logprob_start_len: int | Sequence[int] | None = -1,
        top_logprobs_num: int | Sequence[int] | None = 0,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
        prediction: str | Sequence[int] | None = None,
        data_parallel_rank: int | None = None,
        return_routed_experts: bool | Sequence[bool] | None = None,
        return_routed_experts_weights: bool | None = None,
        routed_experts_start_len: int | Sequence[int] | None = None,
        routed_experts_prompt_start: int | None = None,
        routed_experts_format: str | None = None,
        routed_experts_layers: str | None = None,
        routed_experts_stream: bool | None = None,
        routed_experts_include_last: bool | None = None,
    ) -> Result | Iterator[dict[str, object]]:
        """Generate for one prompt (returns a dict) or many (a list of dicts, in order; n > 1 gives n a prompt). What
        may be a sequence then has one value a prompt. Equal prompts with the same seed have the same answer.

        Each dict holds `text`, `output_ids` and `meta_info`. With `stream` it returns an iterator of cumulative dicts;
        closing it aborts. With `return_routed_experts`, meta_info holds `routed_experts` for the S-1 tokens that were
        fed (int32 [S-1, layers, top_k], dense layers -1): read it with `extract_routed_experts_from_meta_info`.
        With `return_routed_experts_weights` it has `routed_experts_weights` too, what the output of each of these
        experts was multiplied by [S-1, MoE layers, top_k]: `record_from_meta_info` reads both.
        `routed_experts_start_len` (alias routed_experts_prompt_start) skips rows of the prompt;
        `routed_experts_format` is "int32", "npy", "packed" or "list", `routed_experts_layers` "all" or "moe".
        `prediction` is the expected answer to one prompt, text or token ids: an engine that speculates takes drafts
        from it.
        `token_ids_logprob`: up to 32 ids (one list, or one a prompt) whose logprobs meta_info has beside each token's
        own, with `return_logprob`: the model's, at temperature 1 and without penalties.
        `data_parallel_rank` chooses the data rank of an engine with several; meta_info tells it as `dp_rank`.

        Raises InvalidRequestError, CaptureDisabledError, PromptTooLongError, QueueFullError, RoutingIncompleteError or
        EngineDeadError."""
        self.thread.check_not_forked()
        request = GenerateReqInput(
            text=prompt,
            input_ids=input_ids,
            sampling_params=sampling_params,
            max_new_tokens=max_new_tokens,
            rid=rid,
            extra_key=extra_key,
            stream=stream,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            prediction=prediction,
            data_parallel_rank=data_parallel_rank,
            return_routed_experts=return_routed_experts,
            return_routed_experts_weights=return_routed_experts_weights,
            routed_experts_start_len=routed_experts_start_len,
            routed_experts_prompt_start=routed_experts_prompt_start,
            routed_experts_format=routed_experts_format,
            routed_experts_layers=routed_experts_layers,
            routed_experts_stream=routed_experts_stream,
            routed_experts_include_last=routed_experts_include_last,
        )
        call = self.new_call(self.input_processor.process(request))
        squeeze = _is_single(request, call)
        if stream:
            return (_snapshot(call, index, squeeze=squeeze) for index, _ in call.outputs())
        for _ in call.outputs():
            continue
        return _result(call, squeeze=squeeze)

    @check_keywords(_unknown_field, peers=REQUEST_NAMES, make_error=request_error, log_level=logging.DEBUG)
    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Params | ParamsList | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: bool | None = False,
        max_new_tokens: int | None = None,
        rid: str | Sequence[str] | None = None,
        extra_key: str | Sequence[str | None] | None = None,
        return_logprob: bool | Sequence[bool] | None = False,
        logprob_start_len: int | Sequence[int] | None = -1,
        top_logprobs_num: int | Sequence[int] | None = 0,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
        prediction: str | Sequence[int] | None = None,
        data_parallel_rank: int | None = None,
        return_routed_experts: bool | Sequence[bool] | None = None,
        return_routed_experts_weights: bool | None = None,
        routed_experts_start_len: int | Sequence[int] | None = None,
        routed_experts_prompt_start: int | None = None,
        routed_experts_format: str | None = None,
        routed_experts_layers: str | None = None,
        routed_experts_stream: bool | None = None,
        routed_experts_include_last: bool | None = None,
    ) -> Result | AsyncIterator[dict[str, object]]:
        """`generate` for an event loop; cancelling the task aborts."""
        self.thread.check_not_forked()
        request = GenerateReqInput(
            text=prompt,
            input_ids=input_ids,
            sampling_params=sampling_params,
            max_new_tokens=max_new_tokens,
            rid=rid,
            extra_key=extra_key,
            stream=stream,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            prediction=prediction,
            data_parallel_rank=data_parallel_rank,
            return_routed_experts=return_routed_experts,
            return_routed_experts_weights=return_routed_experts_weights,
            routed_experts_start_len=routed_experts_start_len,
            routed_experts_prompt_start=routed_experts_prompt_start,
            routed_experts_format=routed_experts_format,
            routed_experts_layers=routed_experts_layers,
            routed_experts_stream=routed_experts_stream,
            routed_experts_include_last=routed_experts_include_last,
        )
        if may_compile(sampling_params, token_ids_logprob):  # which may take long
            requests = await asyncio.to_thread(self.input_processor.process, request)
        else:
            requests = self.input_processor.process(request)
        call = self.new_call(requests)
        squeeze = _is_single(request, call)
        generation = AsyncGeneration(call, self.thread, max_backlog=sys.maxsize)
        if stream:
            return _stream(call, generation, squeeze=squeeze)
        await generation.run()
        return _result(call, squeeze=squeeze)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, output_kind: str = "delta"
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt, text or token ids, as RequestOutputs of the running event loop.

        `output_kind`: "delta" yields what one choice has gained, "cumulative" all that it has, "final" one output of
        all choices at the end. Rows, if `params` request them, come with the end of their choice. Closing the iterator
        or cancelling its task aborts. Raises InvalidRequestError or a subclass at once (in a forked process
        EngineDeadError), other errors from the iterator."""
        self.thread.check_not_forked()
        check_stream(params, output_kind)
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        request = GenerateReqInput(text=text, input_ids=ids, sampling_params=params, stream=output_kind != "final")
        requests = self.input_processor.process(request)

        def new_generation() -> AsyncGeneration:
            return AsyncGeneration(self.new_call(requests), self.thread, max_backlog=sys.maxsize)

        return stream_outputs(new_generation, text, kind=output_kind)

    def abort(self, rid: str | None = None, *, abort_all: bool = False) -> int:
        """End requests with what they have: the request of id `rid`, or all of the call or prompt of that id; or all
        requests. Returns how many. Raises InvalidRequestError for neither or both, and EngineDeadError."""
        self.thread.check_not_forked()
        if (rid is None) != abort_all:
            text = f"{PARAM}={short_repr(rid)} with abort_all={abort_all}; give one of them"
            raise InvalidRequestError(text, param="rid")
        core = self.components.core

        def end() -> int:
            live = [req for live in core.request_table.live() if (req := core.request_table.find(live)) is not None]
            return sum(core.abort(req.rid) for req in live if abort_all or rid in (req.rid, req.source.call_id))

        return self.thread.run_between_steps(end)

    @overload
    def score(
        self,
        token_ids: Sequence[int],
        *,
        routed: RoutedExperts | None = None,
        replay_weights: bool = False,
        return_routed_experts: bool | None = None,
    ) -> ScoreOutput: ...
    @overload
    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        routed: Sequence[RoutedExperts | None] | None = None,
        replay_weights: bool = False,
        return_routed_experts: bool | None = None,
    ) -> list[ScoreOutput]: ...
    def score(
        self,
        token_ids: TokenIds,
        *,
        routed: RoutedExperts | Sequence[RoutedExperts | None] | None = None,
        replay_weights: bool = False,
        return_routed_experts: bool | None = None,
    ) -> ScoreOutput | list[ScoreOutput]:
        """Score sequences with the served weights: S - 1 logprobs (temperature 1) and S rows each. One sequence of ids
        gives one ScoreOutput, several give a list.

        Valid rows of `routed` are executed, as a trainer would replay them; other tokens are routed live. With
        `replay_weights` the experts run on the combine weights of the records, too, in place of the router's. It runs
        beside the requests, paused or not, in KV pages of its own (for the longest sequence, or a step's tokens). A
        program is compiled when a shape is first met. Rows are returned where the engine records them, with combine
        weights where it records these; `return_routed_experts=False` returns none. To request them (True) or to replay
        where none are recorded raises CaptureDisabledError.
        Raises InvalidRequestError for ids that are none, PromptTooLongError, and RoutingAlignmentError for rows that do
        not fit, naming sample, row and layer. With experts= the host's experts run on threads of the score's own, and
        none is deferred."""
        self.thread.check_not_forked()
        outputs = self._scores.score(
            token_ids, routed=routed, replay_weights=replay_weights, return_routed_experts=return_routed_experts
        )
        return outputs if is_nested(token_ids) else outputs[0]

    def update_weights(
        self,
        state: Weights,
        *,
        version: str | int | None = None,
        cache: str = "flush",
        donate: bool = False,
        copy: bool = False,
    ) -> WeightVersion:
        """Run later steps with other weights of the same tree, shapes and dtypes; nothing is compiled.

        `state` is an nnx.State, a module, or (nested or dotted) names to arrays. Arrays that are already where the
        served ones are, are taken without a copy, so do not donate them afterwards. `version` is the label of the new
        weights: any text of at most 256 characters, or an integer, which may repeat or go back; None keeps the label.
        The count of updates rises by one. Running requests prefill again with `cache="flush"` and keep their pages with
        "keep". Written rows stay, and their `version_spans` have the counts of the weights that made them. No new
        request matches old pages. Raises WeightsMismatchError naming the first arrays that differ, InvalidRequestError
        for a label that is none; then nothing has changed. Raises UpdateInProgressError during another update. Returns
        the label and the count of the update.

        With `donate=True` the engine owns the arrays from now on, also if the caller still refers to them: one that was
        copied to where it is served is deleted at once, and one that is served is deleted when other weights replace it
        or `release_memory_occupation` gives it up. So after a swap the devices hold one copy of the weights. During it
        they hold the old and the new, unless the old were released before. It waits for a score that is under way.

        With `copy=True` the engine serves copies, cast to the served dtypes, and the arrays stay the caller's: the push
        of a trainer that goes on training them. On an accelerator one program copies, casts and looks for NaN; it is
        compiled at the first push.

        With experts= the host holds the old and the new store during it, the accelerator one table: residents are
        written into it between two steps, one after another. A copy that fails leaves the old weights served, under the
        old label and count."""
        self.thread.check_not_forked()
        return self._weights.update(state, version=version, cache=cache, donate=donate, copy=copy)

    def update_weights_from_disk(
        self, path: str | Path, *, version: str | int | None = None, cache: str = "flush"
    ) -> WeightVersion:
        """`update_weights` with a checkpoint folder of the served architecture, read in the served dtype while requests
        go on. Raises WeightsMismatchError where config.json describes another model, CheckpointError where the folder
        is damaged, InvalidRequestError where `path` is neither str nor Path, UpdateInProgressError during another
        update. Returns as `update_weights`."""
        self.thread.check_not_forked()
        return self._weights.update_from_disk(path, version=version, cache=cache)

    def prepare_weights(
        self, path: str | Path, *, version: str | int | None = None, update_count: int | None = None
    ) -> None:
        """First half of `update_weights_from_disk`: load and check a checkpoint beside the served weights, while
        requests go on. The device holds both then. Until `commit_weights` or `drop_weights`, operations that move,
        release or replace weights raise InvalidRequestError. `version` as for `update_weights`. `update_count`: the
        count that the update gets, above the served one, where several engines share one; None: the next. Raises
        what `update_weights_from_disk` does; then nothing is prepared."""
        self.thread.check_not_forked()
        self._weights.prepare(path, version=version, update_count=update_count)

    def commit_weights(self, version: str | int | None = None, *, cache: str = "flush") -> WeightVersion:
        """Second half: swap to the prepared weights between two steps. `cache` and result as for `update_weights`.
        Raises InvalidRequestError where no weights of this label (None: of any) are prepared."""
        self.thread.check_not_forked()
        return self._weights.commit(version=version, cache=cache)

    def drop_weights(self) -> None:
        """Free the prepared weights; the served ones stay. Without any nothing happens."""
        self.thread.check_not_forked()
        self._weights.drop()

    @property
    def prepared_version(self) -> str | None:
        """The label of the prepared weights, or None."""
        return self._weights.prepared_version

    def update_weight_version(self, version: str | int, *, update_count: int | None = None) -> WeightVersion:
        """Give the served weights another label, or the same one again. It counts as an update: rows written from now
        on have the next count. Running requests keep their pages, and no new request matches pages of the old count.
        `update_count` as for `prepare_weights`. Returns the label and the count. Raises InvalidRequestError."""
        self.thread.check_not_forked()
        return self._weights.update_version(version, update_count=update_count)

    def get_weight_version(self) -> WeightVersion:
        """The label of the served weights, and how many updates of weights or label there have been."""
        return self.components.core.weight_version

    def release_memory_occupation(self, tags: Sequence[str] | None = MEMORY_TAGS, *, running: str = "retract") -> None:
        """Free the KV pool ("kv_cache"), the engine's hold on its weights ("weights"), or both (also: None), between
        two steps.

        `running`: requests that run return to the queue ("retract"), or end with what they have, as do those that wait
        ("abort"), or finish first, and none starts meanwhile ("wait"). What is left, and what comes, waits until all is
        taken back. A pause stays, and what it holds is not waited for. Arrays of weights that the caller holds too stay
        the caller's. To release again changes nothing. Raises InvalidRequestError for other tags, and on an engine with
        experts=."""
        self.thread.check_not_forked()
        self._memory.release(MEMORY_TAGS if tags is None else tags, running)

    def resume_memory_occupation(self, state: Weights | None = None, *, version: str | int | None = None) -> None:
        """Allocate all that was released, with an empty pool, and continue with the queue.

        Released weights come from `state` under the label `version`, both as `update_weights` takes them, or have come
        by `update_weights` meanwhile. Without a release nothing happens. Raises InvalidRequestError where weights are
        missing, or a `version` has no `state`; WeightsMismatchError as `update_weights`. Then all stays released."""
        self.thread.check_not_forked()
        self._memory.resume(state, version)

    @property
    def released(self) -> tuple[str, ...]:
        """What is released: tags of `release_memory_occupation`."""
        return self._memory.released

    def pause(self, *, mode: str) -> None:
        """Hold requests back until `resume`; requests that arrive meanwhile queue.

        `mode`: "wait" lets started requests finish, and returns when they have; "retract" returns them to the queue
        with their tokens and rows, and frees their pages; "in_place" freezes them with their pages; "abort" ends every
        request with what it has. While memory is released nothing runs, so "wait" returns at once, and what has started
        ends once the memory is back. Raises InvalidRequestError."""
        self.thread.check_not_forked()
        self._admission.pause(mode)

    def resume(self) -> None:
        """End a pause of any mode; without one nothing happens."""
        self.thread.check_not_forked()
        self._admission.resume()

    @property
    def paused(self) -> str | None:
        """The mode of the current pause, or None."""
        return self._admission.paused

    def pause_generation(self, mode: str = "retract") -> None:
        """`pause`, by the name and with the default of sgl-jax's Engine."""
        self.pause(mode=mode)

    def continue_generation(self) -> None:
        """`resume`, by the name of sgl-jax's Engine."""
        self.resume()

    def abort_request(self, rid: str | None = None, abort_all: bool = False) -> int:
        """`abort`, by the name of SGLang's and sgl-jax's Engine; an id that is not running is no error."""
        return self.abort(None if abort_all else rid, abort_all=abort_all)

    async def async_pause_generation(self, mode: str = "retract") -> None:
        """`pause_generation` for an event loop, which goes on meanwhile."""
        await asyncio.to_thread(self.pause_generation, mode)

    async def async_continue_generation(self) -> None:
        """`continue_generation` for an event loop."""
        await asyncio.to_thread(self.continue_generation)

    async def async_flush_cache(self) -> int:
        """`flush_cache` for an event loop."""
        return await asyncio.to_thread(self.flush_cache)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """An event loop for scripts without one, which is made when it is first read, as sgl-jax's Engine has one:
        `engine.loop.run_until_complete(engine.async_generate(...))`. `shutdown` closes it."""
        if self._event_loop is None:
            self._event_loop = asyncio.new_event_loop()
        return self._event_loop

    async def async_get_server_info(self) -> dict[str, object]:
        """`get_server_info` for an event loop."""
        return await asyncio.to_thread(self.get_server_info)

    def hold_admission(self) -> None:
        """Hold new requests and scores back until `open_admission`; started ones run on, a pause stays. For an update
        of several engines: between hold and open no request starts. To hold again changes nothing."""
        self.thread.check_not_forked()
        self._admission.hold()

    def open_admission(self) -> None:
        """End a hold; a pause stays. Without a hold nothing happens."""
        self.thread.check_not_forked()
        self._admission.open()

    @property
    def admission_held(self) -> bool:
        """Whether admission is held."""
        return self._admission.held

    def apply_placement(self, placement: ExpertPlacement) -> int:
        """Move the experts to where the placement has them, a MoE layer between two steps, while requests go on;
        returns how many instances came from another device. Ids and outputs do not change, up to the order of sums, and
        nothing is compiled. Raises PlacementError for a placement of another model or other sizes, and
        InvalidRequestError on an engine that was built without placement=."""
        self.thread.check_not_forked()
        return self._placement.apply(placement)

    def set_capacity_factor(self, factor: Fraction | float | str) -> None:
        """Set the capacity of the instances in later steps to this factor of the mean load; nothing is compiled.
        `factor` as in PlacementConfig. Raises ConfigError, and InvalidRequestError on an engine that was built without
        PlacementConfig(mode="reroute")."""
        self.thread.check_not_forked()
        self._placement.set_capacity_factor(factor)

    def placement_stats(self) -> PlacementStats:
        """Moves and balance of placed experts since the start. Raises InvalidRequestError on an engine without
        placement=."""
        return self._placement.stats()

    def apply_residency(self, residency: ResidencyMap) -> int:
        """Make other experts resident on the accelerator, between two steps, and return how many were copied there. Ids
        and outputs do not change, up to the order of sums, and nothing is compiled. Raises PlacementError for a map of
        another model or another number of residents, and InvalidRequestError on an engine without
        experts=ExpertOffloadConfig(...)."""
        self.thread.check_not_forked()
        return self._placement.apply_residency(residency)

    def residency(self) -> tuple[ResidencyMap, Float64[np.ndarray, " M"]]:
        """Which experts are resident, and for each MoE layer the share of all slots so far that residents ran
        (resident_hit_ratio; NaN before the first step). Raises InvalidRequestError on an engine without
        experts=ExpertOffloadConfig(...)."""
        self.thread.check_not_forked()
        return self._placement.residency()

    def stats(self) -> EngineStats:
        """Counts of this moment: running, waiting and ended requests, steps, pages, rows. Answers at once, also while a
        step is stuck and after the engine has ended."""
        return engine_stats(self.components)

    def routing_stats(self) -> RoutingStats:
        """How often each expert was chosen since the start or `reset_routing_stats`, in prompts and in generated
        tokens: of every token that a step fed for a request. A token from the prefix cache was not fed and does not
        count. Raises CaptureDisabledError where nothing is recorded."""
        self.thread.check_not_forked()
        return self.thread.run_between_steps(self.components.core.routing_stats)

    def reset_routing_stats(self) -> RoutingStats:
        """Reset the counts; returns the counts so far. Raises CaptureDisabledError where nothing is recorded."""
        self.thread.check_not_forked()
        return self.thread.run_between_steps(lambda: self.components.core.routing_stats(reset=True))

    def flush_cache(self, *, drafts: bool = False, retract: bool = False) -> int:
        """Drop all cached prefixes; returns the pages freed. Running requests keep their pages. `drafts`: drop also the
        answers that are remembered as drafts. `retract`: running requests return to the queue with their tokens and
        rows, and prefill again; a pause stays, and holds them."""
        self.thread.check_not_forked()
        core, thread = self.components.core, self.thread
        run = thread.run_drained if retract else thread.run_between_steps
        return run(lambda: core.flush_cache(drafts=drafts, retract=retract))

    def remember_rollouts(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        seed: int | None = None,
        choice: int = 0,
        extra_key: str | None = None,
    ) -> None:
        """Take an answer to a prompt as a draft of later ones, for requests of the same `extra_key`.

        A request with this prompt, `seed` and `choice` (its index among n) follows it from the start; `seed` None: one
        of temperature 0. Other requests with this prompt, with SUFFIX those with any prompt, copy it where it fits.
        Raises InvalidRequestError for bad ids, and for an engine without speculative_scope="namespace"."""
        self.thread.check_not_forked()
        self._rollouts.remember(prompt_ids, output_ids, seed=seed, choice=choice, extra_key=extra_key)

    def check_integrity(self) -> list[Violation]:
        """Check pages, prefix cache, rows and request counts; empty when all hold."""
        self.thread.check_not_forked()
        return self.thread.run_between_steps(self.components.core.check_integrity)

    def get_server_info(self) -> dict[str, object]:
        """Configuration, memory plan, start-up phases, counters, and what happens at this moment in the words of SGLang
        and sgl-jax (`internal_states`)."""
        core = self.components.core
        return {
            **dataclasses.asdict(self.server_args),
            "precompile_bs_paddings": self.server_args.batch_paddings,
            "precompile_token_paddings": self.server_args.token_paddings,
            "context_length": self.components.context_length,
            "memory_plan": self.memory_plan,
            "prefix_cache": self.components.prefix_cache,
            "phases": {phase.name: phase.seconds for phase in self.phases},
            "requests_accepted": core.request_table.accepted,
            "requests_finished": dict(core.request_table.finished),
            "weight_version": core.weight_version.label,
            "update_count": core.weight_version.update_count,
            "internal_states": [
                internal_state(self.components, page_size=self.server_args.page_size, is_paused=self.paused is not None)
            ],
            **({} if self.components.group is None else self.components.group.info()),
        }

    def get_model_info(self) -> dict[str, object]:
        """What is served, in the words of SGLang's Engine."""
        return {
            "model_path": self.server_args.model_path,
            "tokenizer_path": self.server_args.tokenizer_path or self.server_args.model_path,
            "is_generation": True,
            **self.components.core.weight_version.to_json(),
            "vocab_size": self.components.vocab_size,
            "context_length": self.components.context_length,
        }

    def get_default_sampling_params(self) -> EditableSamplingParams:
        """Sampling parameters with nothing set, whose fields may be set one by one. What stays unset is neutral:
        temperature 1.0, and nothing is cut off. A checkpoint's generation_config.json changes only which tokens end an
        answer."""
        return EditableSamplingParams()

    @property
    def memory_plan(self) -> list[str]:
        """What was allocated and why, a purpose a line: weights, KV pages, capture on the device and on the host."""
        return self.components.plan.lines()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None with skip_tokenizer_init."""
        return self._tokenizer

    def new_call(self, requests: Sequence[TokenizedGenerateReqInput]) -> GenerationCall:
        """A call of validated requests, not submitted yet."""
        mode, capture = self.server_args.logprobs_mode, self.components.capture
        return GenerationCall(
            requests,
            self.thread,
            self._tokenizer,
            logprobs_mode=mode,
            capture=capture,
            num_compiled=self.compiles.latest_serving,
        )

    def shutdown(self) -> None:
        """Abort all requests and end the engine thread. Idempotent. Does nothing in a process that was forked from the
        engine's."""
        if self.thread.is_forked:
            return
        self.thread.stop()
        if self.components.rebalancer is not None:
            self.components.rebalancer.close()
        if self.components.group is not None:
            self.components.group.close()
        self.compiles.close()
        if self._event_loop is not None and not self._event_loop.is_running():
            self._event_loop.close()

    def __enter__(self) -> "Engine":
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()


async def _stream(
    call: GenerationCall, generation: AsyncGeneration, *, squeeze: bool
) -> AsyncIterator[dict[str, object]]:
    """Run a call of the running event loop; yields each sequence as it grows. Leaving early aborts."""
    try:
        await generation.submit()
        async for index, _ in generation.outputs():
            yield _snapshot(call, index, squeeze=squeeze)
    finally:
        generation.abort()


def _is_single(request: GenerateReqInput, call: GenerationCall) -> bool:
    """Whether the result is one dict and no list: one prompt, not in a list, and n = 1."""
    is_one_prompt = isinstance(request.text, str) or (
        request.input_ids is not None and not is_nested(request.input_ids)
    )
    return is_one_prompt and len(call.sequences) == 1


def _result(call: GenerationCall, *, squeeze: bool) -> Result:
    results = [sglang_output(sequence) for sequence in call.sequences]
    return results[0] if squeeze else results


def _snapshot(call: GenerationCall, index: int, *, squeeze: bool) -> dict[str, object]:
    """A sequence as it is now; `index` names it where the call has several."""
    snapshot = sglang_output(call.sequences[index])
    return snapshot if squeeze else {**snapshot, "index": index}


def _path_text(path: str | os.PathLike[str] | None) -> str | None:
    return str(path) if isinstance(path, os.PathLike) else path


def _list_as_tuple(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Padded sizes as ServerArgs takes them; it refuses what is no list and no tuple."""
    value: Any = sizes
    return tuple(value) if isinstance(value, list) else value


def _dist_config(dist: DistConfig | LeadingGroup | None, fields: Mapping[str, Any]) -> DistConfig | LeadingGroup | None:
    """The process group from one of two: a config or group, or its fields. Raises ConfigError for both."""
    if fields["nnodes"] == 1 and fields["node_rank"] == 0:
        return dist
    if dist is not None:
        raise ConfigError("dist and nnodes or node_rank say the same in two ways; give one of them")
    return DistConfig.create(fields)


def _check_rank(dist: DistConfig) -> None:
    """Raise ConfigError in a process that is to follow."""
    if not dist.is_leader:
        text = f"node_rank={dist.node_rank}: an Engine is process 0 of its group, and this process follows"
        how = "with dist=DistConfig(nnodes=..., node_rank=..., dist_init_addr=...) and the other arguments as they are"
        raise ConfigError(f"{text}; call routed_experts.follow(...) {how}")


def _no_given_ids(args: ServerArgs, *, speculates: bool, group: LeadingGroup | None) -> str | None:
    """Why logprobs of ids that a request names are not served; None where they are."""
    if speculates:
        return "it speculates, and a step has several tokens of a request"
    if group is not None or args.dp_size > 1:
        return "it has several processes or data ranks"
    return None


def _load_tokenizer(args: ServerArgs) -> Tokenizer | None:
    folder = args.tokenizer_path or args.model_path
    if args.skip_tokenizer_init or folder is None:
        return None
    if args.tokenizer_path is None and not os.path.exists(os.path.join(folder, "config.json")):
        return None  # no checkpoint at all: `build_engine` names that, which helps more than a missing tokenizer.json
    return Tokenizer.from_directory(folder)
