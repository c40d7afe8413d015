"""LLM: the offline engine in vLLM's words. Each prompt's routing comes with its answer. Knows nothing of HTTP.

llm = LLM("path/to/model", enable_return_routed_experts=True)
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text, output.prompt_routed_experts.shape, output.outputs[0].routed_experts.shape)"""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.engine.engine import Engine
from routed_experts.engine.requests.generation import GenerationCall
from routed_experts.engine.requests.input_processor import is_nested
from routed_experts.engine.requests.outputs import RequestOutput, request_output
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.sequence_state import SequenceState

DEFAULT_MAX_TOKENS = 16
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, object]]


class LLM:
    """Serves one model in this process. `engine` is what it is made of; leaving the `with`, or `shutdown`, ends it.

    `max_num_seqs` requests run at once, `max_num_batched_tokens` are fed in a step. Code that a checkpoint brings along
    is never run: trust_remote_code=True is refused. Raises ConfigError, CheckpointError or CaptureUnsupportedError."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        seed: int = 0,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.8,
        enable_prefix_caching: bool = True,
        enable_return_routed_experts: bool = False,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        if trust_remote_code:
            raise ConfigError("trust_remote_code=True is refused: code of a checkpoint is never run; leave it out")
        self.engine = Engine(
            model,
            tokenizer_path=tokenizer,
            dtype=dtype,
            random_seed=seed,
            tp_size=tensor_parallel_size,
            ep_size=tensor_parallel_size if enable_expert_parallel else 1,
            context_length=max_model_len,
            mem_fraction_static=gpu_memory_utilization,
            disable_radix_cache=not enable_prefix_caching,
            enable_return_routed_experts=enable_return_routed_experts,
            skip_tokenizer_init=skip_tokenizer_init,
            **_paddings("max_num_seqs", "precompile_bs_paddings", ServerArgs().batch_paddings, max_num_seqs),
            **_paddings(
                "max_num_batched_tokens",
                "precompile_token_paddings",
                ServerArgs().token_paddings,
                max_num_batched_tokens,
            ),
        )
        self._routing = RoutingDefaults(asked=True, format="ref", refs=True)  # the arrays are here: nothing is encoded

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Generate for one prompt or many, in order; one SamplingParams for all or one each. 16 tokens unless they say.

        Routing comes with every answer of an engine that records it, unless return_routed_experts is False. Raises
        InvalidRequestError, PromptTooLongError, CaptureDisabledError, RoutingIncompleteError or EngineDeadError."""
        listed = _listed(prompts)
        wanted = _params_of(sampling_params, len(listed))
        groups = [self._admit(prompt, params) for prompt, params in zip(listed, wanted, strict=True)]
        answers = [answer for some in self._bunches(groups) for answer in self._run(some)]
        outputs: list[RequestOutput] = []
        for prompt, group in zip(listed, groups, strict=True):
            mine, answers = answers[: len(group)], answers[len(group) :]
            outputs.append(request_output(mine, _text_of(prompt)))
        return outputs

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None) -> list[RequestOutput]:
        """Answer one conversation or many, by the checkpoint's chat template. Raises as `generate` does."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "messages came, but this engine has no tokenizer; give token ids to generate", param="messages"
            )
        conversations: Any = messages
        if not conversations:
            raise InvalidRequestError("messages is empty; give at least one", param="messages")
        several = not isinstance(conversations[0], Mapping)
        texts = [tokenizer.apply_chat_template(one) for one in (conversations if several else [conversations])]
        prompts = [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
        ]
        return self.generate(prompts, sampling_params)

    def score(
        self, token_ids: Sequence[Sequence[int]], *, routed: Sequence[RoutedExperts | None] | None = None
    ) -> list[ScoreOutput]:
        """Score sequences of token ids, each S - 1 logprobs and, where the engine records, S rows; rows of `routed` are
        replayed. Raises as `Engine.score` does."""
        if not is_nested(token_ids):
            text = f"token_ids={short_repr(token_ids)} must be a list of lists of token ids, one a sequence"
            raise InvalidRequestError(text, param="token_ids")
        return self.engine.score(token_ids, routed=routed)

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self.engine.shutdown()

    def __enter__(self) -> "LLM":
        """Give itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _admit(self, prompt: Prompt, params: SamplingParams) -> list[TokenizedGenerateReqInput]:
        """The requests of one prompt, one a choice."""
        if params.routed_experts_format is not None:
            text = f"routed_experts_format={short_repr(params.routed_experts_format)} is for the wire; here rows are arrays: leave it out"
            raise InvalidRequestError(text, param="routed_experts_format", code="ref_unavailable")
        ids = (
            prompt.get("prompt_token_ids")
            if isinstance(prompt, Mapping)
            else None
            if isinstance(prompt, str)
            else prompt
        )
        said = GenerateReqInput(
            text=None if ids is not None else _text_of(prompt), input_ids=ids, sampling_params=params
        )
        return self.engine._door.admit(said, default_max_tokens=DEFAULT_MAX_TOKENS, routing=self._routing)

    def _bunches(self, groups: list[list[TokenizedGenerateReqInput]]) -> Iterator[list[TokenizedGenerateReqInput]]:
        """Requests in bunches that the queue can hold."""
        bunch: list[TokenizedGenerateReqInput] = []
        for group in groups:
            if bunch and len(bunch) + len(group) > self.engine.server_args.max_queued_requests:
                yield bunch
                bunch = []
            bunch += group
        yield bunch

    def _run(self, requests: list[TokenizedGenerateReqInput]) -> Sequence[SequenceState]:
        mode = self.engine.server_args.logprobs_mode
        call = GenerationCall(
            requests, self.engine.tokenizer, single=False, logprobs_mode=mode, capture=self.engine._assembly.capture
        )
        for _ in call.stream(self.engine._loop):
            continue
        return call.answers


def _paddings(param: str, name: str, usual: tuple[int, ...], largest: int | None) -> dict[str, Any]:
    """Padded sizes up to `largest`: the usual ones below it, and itself."""
    if largest is None:
        return {}
    if isinstance(largest, bool) or not isinstance(largest, int) or largest < 1:
        raise ConfigError(f"{param}={largest!r} must be an integer of at least 1")
    return {name: (*(size for size in usual if size < largest), largest)}


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list."""
    given: Any = prompts
    one = isinstance(given, str | Mapping) or (len(given) > 0 and all(isinstance(part, int) for part in given))
    listed: list[Prompt] = [given] if one else list(given)
    if not listed:
        raise InvalidRequestError("prompts is empty; give at least one", param="prompts")
    return listed


def _params_of(params: Params, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        text = f"{len(params)} SamplingParams came for {count} prompts; give one for all, or one each"
        raise InvalidRequestError(text, param="sampling_params")
    return params


def _text_of(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
