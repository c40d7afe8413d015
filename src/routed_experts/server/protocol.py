"""Request bodies of all routes as structs, from which the OpenAPI document is made. None means absent.

A struct checks the types of the JSON; values are checked where they are used. The module is long because all bodies are
in it: fields that routes share stand in common bases."""

from typing import Any

import msgspec


class RoutingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options for returned routed experts, on every route that generates."""

    routed_experts_start_len: int | list[int] | None = None
    routed_experts_prompt_start: int | None = None
    routed_experts_format: str | None = None
    routed_experts_layers: str | None = None
    routed_experts_stream: bool | None = None
    routed_experts_include_last: bool | None = None
    return_routed_experts_weights: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Usage in streams: in a last chunk of its own, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(RoutingFields, kw_only=True):
    """Fields that chat and text completions share. `logprob_token_ids`: the alternatives of each token are these ids
    and itself, instead of the best ones. `truncate_prompt_tokens` cuts a prompt to this length, -1 to what
    fits; `truncation_side` is left (the default: its end stays) or right."""

    return_routed_experts: bool | None = None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    speculative: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    rid: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    data_parallel_rank: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/completions. `prompt`: text, a list of texts, token ids, or a list of lists of them."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: bool | int | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None


class InvocationRequest(msgspec.Struct, kw_only=True):
    """POST /invocations: the body of /v1/chat/completions, with `messages`, or of /v1/completions, with `prompt`."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[str | int | list[int]] | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function of a call. `arguments`: JSON as text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an earlier message of the assistant."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message; content is text or a list of text parts. `reasoning` is vLLM's name of `reasoning_content`. Further
    keys are dropped."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call. `parameters`: JSON Schema of its arguments. Further keys are dropped."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; `type` is function."""

    type: str = "function"
    function: Function


class NamedFunction(msgspec.Struct, kw_only=True):
    """The name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """A tool that the model is to call."""

    type: str = "function"
    function: NamedFunction


class Prediction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer that the caller expects. `type` is content; the content is text or a list of text parts."""

    type: str
    content: str | list[dict[str, Any]]


class ChatRequest(OpenAIRequest, kw_only=True):
    """POST /v1/chat/completions. `separate_reasoning` false leaves reasoning in the content; `include_reasoning` false
    leaves it out."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function that the model may call. Further keys are dropped."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesReasoning(msgspec.Struct, kw_only=True):
    """How much the model reasons. Further keys are dropped."""

    effort: str | None = None


class ResponsesText(msgspec.Struct, kw_only=True):
    """The form of the text, such as {"type": "json_schema", "name", "schema"}. Further keys are dropped."""

    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses, without state: `input` is text, or the items of the whole conversation."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    speculative: bool | None = None
    top_logprobs: int | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    stream: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool of /v1/messages. Further keys are dropped."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """`type`: auto, any, tool (with `name`) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(msgspec.Struct, kw_only=True):
    """`type`: enabled, adaptive or disabled. Further keys are dropped."""

    type: str


class MessagesOutput(msgspec.Struct, kw_only=True):
    """The form of the text, such as {"type": "json_schema", "schema"}. Further keys are dropped."""

    format: dict[str, Any] | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One message; content is text or a list of blocks."""

    role: str
    content: str | list[dict[str, Any]]


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages, in Anthropic's form."""

    max_tokens: int | None = None
    output_config: MessagesOutput | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    speculative: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: str | dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class GenerateRequest(RoutingFields, kw_only=True):
    """POST /generate, in SGLang's form. Fields that may be lists have one value a prompt then."""

    return_routed_experts: bool | list[bool] | None = None
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    max_new_tokens: int | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    prediction: str | list[int] | None = None


class TokensRequest(RoutingFields, kw_only=True):
    """POST /inference/v1/generate, in vLLM's form: the token ids of one prompt. `sampling_params` has vLLM's names."""

    token_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    return_routed_experts: bool | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    return_token_ids: bool | None = None
    output_mode: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, a list of prompts, or messages that the chat template renders. With `tool_choice` none,
    it renders them without the tools."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize: the ids of one text, or a list of lists of them."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_request: one call by its id, or all."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /pause_generation. `mode`: abort (the default), retract, in_place or wait."""

    mode: str | None = None


class ContinueRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /continue_generation: no fields."""


class VllmPauseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /pause, whose fields may also be query parameters. `mode`: abort (the default), wait or keep."""

    mode: str | None = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None


class UpdateFromFolderRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights: `weight_dir` is a folder below --weights-root."""

    weight_dir: str | None = None
    weight_version: int | str | None = None
    flush_cache: bool | None = None
    update_info: dict[str, Any] | None = None


class ResetPrefixCacheRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /reset_prefix_cache, whose field may also be a query parameter."""

    reset_running_requests: bool | None = None


class AbortRequestsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests: these ids, or without any all."""

    request_ids: list[str] | None = None


class MemoryRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /release_memory_occupation and /resume_memory_occupation. `tags`: kv_cache, weights or both; null: both, or
    all that is released."""

    tags: list[str] | None = None


class SleepRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /sleep, whose fields may also be query parameters. `level`: 1 (the default) or 2; `mode`: keep (the
    default), abort or wait; `tags`: kv_cache, weights or both, instead of those of the level."""

    level: int | str | None = None
    mode: str | None = None
    tags: list[str] | None = None


class WakeUpRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /wake_up, whose field may also be a query parameter."""

    tags: list[str] | None = None


class RememberRolloutsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /remember_rollouts: an answer to a prompt, as a draft of later ones. `seed` and `choice` (its index among n)
    are those of the requests that follow it from the start; without a seed those of temperature 0. Unknown fields are
    refused: one of them may have meant the namespace."""

    prompt_ids: list[int]
    output_ids: list[int]
    seed: int | None = None
    choice: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class UpdateWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights_from_disk. `model_path` is below --weights-root; `weight_version` is any text of at most 256
    characters, or an integer; without it the label stays. `flush_cache` false lets running requests keep their
    pages; `abort_all_requests` ends them first."""

    model_path: str
    weight_version: int | str | None = None
    flush_cache: bool | None = None
    load_format: str | None = None
    abort_all_requests: bool | None = None
    is_async: bool | None = None


class UpdateWeightVersionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weight_version. `new_version` is any text of at most 256 characters, or an integer; also the served
    one. Running requests are aborted first unless `abort_all_requests` is false."""

    new_version: int | str
    abort_all_requests: bool | None = None


class ScoreRequest(RoutingFields, kw_only=True):
    """POST /v1/score. `token_ids`: one sequence or several. `routed_experts`: rows to replay, each a meta_info (or a
    choice) of a response with its `routed_experts_info`; one for one sequence, else a list. null: routed live.
    `replay_weights`: on the combine weights of these rows, too.

    SGLang's form has `query`, `items` and `label_token_ids` instead: how probable each label is after the query and an
    item. Query and items are all text or all ids; `item_first` puts the item before the query."""

    token_ids: list[int | list[int]] | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    routed_experts: dict[str, Any] | list[dict[str, Any] | None] | None = None
    replay_weights: bool | None = None
    return_routed_experts: bool | None = None
    model: str | None = None
    request_id: str | None = None


class ErrorDetail(msgspec.Struct, kw_only=True):
    """One error: its text, its kind and the field that caused it."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every error."""

    error: ErrorDetail
