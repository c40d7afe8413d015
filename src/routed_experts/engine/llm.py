"""LLM: the offline engine in vLLM's words. Each prompt's routing comes with its output.

llm = LLM("path/to/model", enable_return_routed_experts=True)
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text, output.prompt_routed_experts.shape, output.outputs[0].routed_experts.shape)"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeGuard, TypeVar

from routed_experts.core.capture_spec import WeightsDType
from routed_experts.core.editable_sampling_params import EditableSamplingParams
from routed_experts.core.error_text import short_repr, suggestion
from routed_experts.core.errors import PARAM, ConfigError, InvalidRequestError, prompt_index, raise_as
from routed_experts.core.integers import to_int
from routed_experts.core.io_struct import TokenizedGenerateReqInput
from routed_experts.core.keywords import ENGINE_NAMES, REQUEST_NAMES, check_keywords, request_error
from routed_experts.core.peer_names import OTHER_NAMES
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import KVCacheDtype, Quantization, ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.engine.engine import Engine
from routed_experts.engine.requests.llm_prompts import LLMPrompt, Prompt, list_prompts
from routed_experts.engine.requests.outputs import RequestOutput, check_arrays, request_output
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.engine.requests.token_ids import is_nested

DEFAULT_MAX_TOKENS = 16
PromptParams = SamplingParams | Mapping[str, object]
Params = PromptParams | Sequence[PromptParams] | None
Messages = Sequence[Mapping[str, object]]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _unknown_argument(name: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"{name} is no parameter of LLM; {ENGINE_NAMES.suggest(name, known)}")


def _unknown_field(method: str, name: str, known: Sequence[str]) -> InvalidRequestError:
    text = f"{PARAM} is no parameter of {method}; {suggestion(name, known)}"
    if REQUEST_NAMES.own_name(name, ("extra_key",)) is not None:
        text = f'{PARAM} is no parameter of {method}; give generate {{"prompt": ..., "cache_salt": ...}}'
    return InvalidRequestError(text, param=name, code="unknown_field")


def _check_request_keywords(method: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    make_unknown = functools.partial(_unknown_field, method)
    return check_keywords(make_unknown, peers=REQUEST_NAMES, make_error=request_error, log_level=logging.DEBUG)


class LLM:
    """Serves one model in this process with `engine`. Leaving the `with`, or `shutdown`, ends it."""

    @check_keywords(_unknown_argument, peers=ENGINE_NAMES)
    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        quantization: Quantization = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        device: str = "auto",
        load_format: str = "auto",
        seed: int = 0,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_queued_reqs: int = 1024,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.8,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        moe_backend: str = "auto",
        logprobs_mode: Literal["processed", "raw"] = "processed",
        deterministic: bool = False,
        enable_return_routed_experts: bool = False,
        enable_return_routed_experts_weights: bool = False,
        routed_experts_weights_dtype: WeightsDType = "float32",
        skip_tokenizer_init: bool = False,
        speculative_config: Mapping[str, object] | None = None,
    ) -> None:
        """Build the engine. `max_num_seqs` requests run at once, `max_num_batched_tokens` are fed in a step;
        `speculative_config` drafts tokens, as {"method": "ngram", "num_speculative_tokens": 3} does. As with vLLM,
        `data_parallel_size` ranks have `tensor_parallel_size` devices each for attention, and the experts are on all
        of them. Other keywords of vLLM's LLM are translated, accepted without effect, or refused with what to use:
        docs/flags.md. Raises ConfigError, CheckpointError or CaptureUnsupportedError."""
        tensor_parallel_size = to_int("tensor_parallel_size", tensor_parallel_size, 1)
        data_parallel_size = to_int("data_parallel_size", data_parallel_size, 1)
        if not isinstance(enable_prefix_caching, bool):
            text = f"enable_prefix_caching={short_repr(enable_prefix_caching)} must be True or False"
            raise ConfigError(f"{text}; False turns the cache off")
        num_devices = tensor_parallel_size * data_parallel_size
        speculative = None
        if speculative_config is not None:
            speculative = SpeculativeConfig.from_vllm(speculative_config, tp_size=num_devices)
        usual = ServerArgs()
        with _named_as_given():
            self.engine = Engine(
                model,
                revision=revision,
                tokenizer_path=tokenizer,
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                device=device,
                load_format=load_format,
                random_seed=seed,
                tp_size=num_devices,
                dp_size=data_parallel_size,
                ep_size=num_devices if enable_expert_parallel else 1,
                context_length=max_model_len,
                page_size=block_size,
                max_queued_requests=max_num_queued_reqs,
                mem_fraction_static=gpu_memory_utilization,
                disable_radix_cache=not enable_prefix_caching,
                attention_backend=attention_backend,
                moe_backend=moe_backend,
                logprobs_mode=logprobs_mode,
                deterministic=deterministic,
                enable_return_routed_experts=enable_return_routed_experts,
                enable_return_routed_experts_weights=enable_return_routed_experts_weights,
                routed_experts_weights_dtype=routed_experts_weights_dtype,
                skip_tokenizer_init=skip_tokenizer_init,
                speculative=speculative,
                precompile_bs_paddings=_paddings("max_num_seqs", max_num_seqs, usual.batch_paddings),
                precompile_token_paddings=_token_paddings(max_num_batched_tokens, max_num_seqs, usual),
            )
        # Rows of format ref are not encoded: they are returned as arrays of this process.
        self._routing = RoutingDefaults(enabled=True, format="ref", refs=True)

    @_check_request_keywords("LLM.generate")
    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Generate for one prompt or many, in order, with one SamplingParams for all or one each; max_tokens is 16 if
        unset. A prompt is text, token ids, or a dict with `prompt` or `prompt_token_ids` and, if wanted, `cache_salt`:
        prompts of equal salts share cached prefixes and remembered answers.

        An engine that records routing returns it with every output, unless return_routed_experts is False. Raises
        InvalidRequestError, PromptTooLongError, CaptureDisabledError, RoutingIncompleteError or EngineDeadError."""
        self.engine.thread.check_not_forked()
        return self._generate(list_prompts(prompts), sampling_params, field="prompt")

    def _generate(self, prompts: Sequence[object], sampling_params: Params, *, field: str) -> list[RequestOutput]:
        """`generate` for a list of prompts, which errors name `field`."""
        params_list, has_own = _params_list(sampling_params, len(prompts)), _is_list(sampling_params)
        names = {"input_ids": field, "prompt": field, "extra_key": "cache_salt"}
        groups: list[list[TokenizedGenerateReqInput]] = []
        texts: list[str | None] = []
        for index, (given, own) in enumerate(zip(prompts, params_list, strict=True)):
            try:
                prompt = LLMPrompt.create(given)
                groups.append(self._process(prompt, own))
                texts.append(prompt.text)
            except InvalidRequestError as error:
                is_own = has_own or error.is_of_prompt or error.param == "extra_key"
                named = error.with_names(names)
                raise_as(error, named.at_prompt(index, field) if len(prompts) > 1 and is_own else named)
        sequences = [sequence for batch in self._submissions(groups) for sequence in self._run(batch)]
        outputs: list[RequestOutput] = []
        for text, group in zip(texts, groups, strict=True):
            choices, sequences = sequences[: len(group)], sequences[len(group) :]
            outputs.append(request_output(choices, text))
        return outputs

    @_check_request_keywords("LLM.chat")
    def chat(self, messages: Messages | Sequence[Messages], sampling_params: Params = None) -> list[RequestOutput]:
        """Answer one conversation or many, by the checkpoint's chat template. Raises as `generate` does."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "messages are given, but this engine has no tokenizer; give token ids to generate", param="messages"
            )
        conversations: Any = messages
        if not conversations:
            raise InvalidRequestError("messages is empty; give at least one", param="messages")
        is_one = isinstance(conversations, Sequence) and isinstance(conversations[0], Mapping)
        conversations = [conversations] if is_one or isinstance(conversations, Mapping) else conversations
        _check_conversations(conversations)
        texts = [tokenizer.apply_chat_template(conversation) for conversation in conversations]
        prompts = [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
        ]
        self.engine.thread.check_not_forked()
        return self._generate(prompts, sampling_params, field="messages")

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        routed: Sequence[RoutedExperts | None] | None = None,
        replay_weights: bool = False,
    ) -> list[ScoreOutput]:
        """Score sequences of token ids: S - 1 logprobs each and, where the engine records routing, S rows. Rows of
        `routed` are replayed, with `replay_weights` on their combine weights. Raises as `Engine.score` does."""
        if not is_nested(token_ids):
            text = f"token_ids={short_repr(token_ids)} must be a list of lists of token ids, one a sequence"
            raise InvalidRequestError(text, param="token_ids")
        return self.engine.score(token_ids, routed=routed, replay_weights=replay_weights)

    def get_default_sampling_params(self) -> EditableSamplingParams:
        """The sampling parameters of a request that names none: at most 16 tokens. Their fields may be set one by
        one."""
        return EditableSamplingParams(max_tokens=DEFAULT_MAX_TOKENS)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; pages of running requests stay."""
        self.engine.flush_cache()
        return True

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self.engine.shutdown()

    def __enter__(self) -> "LLM":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shut down."""
        self.shutdown()

    def _process(self, prompt: LLMPrompt, params: PromptParams) -> list[TokenizedGenerateReqInput]:
        """The requests of one prompt, one a choice."""
        return self.engine.input_processor.process(
            prompt.request(params), default_max_tokens=DEFAULT_MAX_TOKENS, routing=self._routing, cut_max_tokens=True
        )

    def _submissions(self, groups: list[list[TokenizedGenerateReqInput]]) -> Iterator[list[TokenizedGenerateReqInput]]:
        """The requests in batches that the queue can hold; those of one prompt stay together."""
        batch: list[TokenizedGenerateReqInput] = []
        for group in groups:
            if batch and len(batch) + len(group) > self.engine.server_args.max_queued_requests:
                yield batch
                batch = []
            batch += group
        yield batch

    def _run(self, requests: list[TokenizedGenerateReqInput]) -> Sequence[SequenceState]:
        call = self.engine.new_call(requests)
        for _ in call.outputs():
            continue
        return call.sequences


def _paddings(param: str, largest: int | None, usual: tuple[int, ...]) -> tuple[int, ...] | None:
    """Padded sizes up to `largest`: the usual ones below it, and itself. None without it."""
    if largest is None:
        return None
    largest = to_int(param, largest, 1)
    return (*(size for size in usual if size < largest), largest)


def _token_paddings(tokens: int | None, requests: int | None, usual: ServerArgs) -> tuple[int, ...] | None:
    """Padded sizes of steps of `tokens`, at least one token of each of `requests`; None for the usual ones."""
    usual_largest = usual.token_paddings[-1]
    if tokens is None and (requests or 0) <= usual_largest:
        return None
    to_int("max_num_batched_tokens", usual_largest if tokens is None else tokens, 1)
    limit = requests or usual.running_limit
    if tokens is not None and limit > tokens:
        text = (
            f"max_num_batched_tokens={tokens} is below max_num_seqs={limit}, and a step feeds a token of each request"
        )
        raise ConfigError(f"{text}; give max_num_batched_tokens of at least {limit}, or lower max_num_seqs")
    return _paddings("max_num_batched_tokens", max(tokens or usual_largest, requests or 0), usual.token_paddings)


@contextlib.contextmanager
def _named_as_given() -> Generator[None]:
    """Add the keyword of LLM to the error of a field of the engine that has another name here."""
    try:
        yield
    except ConfigError as error:
        name, keywords = str(error).partition("=")[0], inspect.signature(LLM).parameters
        word = next((other for other in OTHER_NAMES.get(name, ()) if other in keywords), None)
        if word is None or name in keywords or type(error) is not ConfigError:
            raise
        raise ConfigError(f"{word} of LLM is refused: {error}") from error


def _check_conversations(conversations: Any) -> None:
    """Raise InvalidRequestError for a conversation without messages, and for a message that has nothing to say."""
    if isinstance(conversations, str):
        text = f"{PARAM} is text, {short_repr(conversations)}; give a list of messages, or send the text to generate"
        raise InvalidRequestError(text, param="messages")
    if not isinstance(conversations, Sequence):
        raise InvalidRequestError(f"{PARAM}={short_repr(conversations)} must be a list of messages", param="messages")
    for index, conversation in enumerate(conversations):
        name = PARAM if len(conversations) == 1 else f"{PARAM}[{index}]"
        if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence) or not conversation:
            text = f"{name} is {short_repr(conversation)}; expected a list of at least one message"
            raise InvalidRequestError(f'{text}, such as {{"role": "user", "content": "text"}}', param="messages")
        for number, message in enumerate(conversation):
            is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not is_message or all(value is None for key, value in message.items() if key != "role"):
                text = f"{name}[{number}]={short_repr(message)} has no role or no content"
                raise InvalidRequestError(f'{text}; give {{"role": "user", "content": "text"}}', param="messages")


def _is_list(params: Params) -> TypeGuard[Sequence[PromptParams]]:
    """Whether these are sampling parameters for each prompt."""
    return isinstance(params, Sequence) and not isinstance(params, str)


def _params_list(params: Params, count: int) -> Sequence[PromptParams]:
    """The sampling parameters of each prompt, checked but for what depends on the prompt. Those in a mapping stay one:
    its names are those that an error names."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [_checked(params or {})] * count
    if not _is_list(params):
        text = f"{PARAM}={short_repr(params)} must be SamplingParams, or a list of them, one for each prompt"
        raise InvalidRequestError(text, param="sampling_params")
    if len(params) != count:
        text = f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each"
        raise InvalidRequestError(text, param="sampling_params")
    checked: list[PromptParams] = []
    for index, own in enumerate(params):
        with prompt_index(index if count > 1 else None, "prompt"):
            checked.append(_checked(own or {}))
    return checked


def _checked(params: PromptParams) -> PromptParams:
    check_arrays(params if isinstance(params, SamplingParams) else SamplingParams.from_dict(params))
    return params
