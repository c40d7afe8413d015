"""The peers' test files that are run, by the folder of the checkout that a user has. Those of trainers are ours: they
call the functions of the checkout that talk to a server."""

VLLM = "tests/entrypoints/"
SGLANG = "test/registered/"
SGL_JAX = "test/srt/"
OURS = "trainers/"  # in this folder
# Files of a peer that ask for text, chat and token ids, or call an engine: what they are, and parts of their paths.
# The other files of vLLM are on shutdown, metrics, pauses and its offline class, those of SGLang on control.
CORE: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm": (
        "completion, chat, tokenize, token routes",
        ("/openai/", "/tokenize/", "/token_in_token_out/"),
    ),
    "sglang": ("server, endpoint, request length", ("/core/", "/openai_server/")),
    "sglang-jax": ("HTTP, Engine", ("/",)),
}
SUITES: dict[str, tuple[str, ...]] = {
    "vllm": (
        VLLM + "openai/completion/test_completion.py",
        VLLM + "openai/completion/test_token_in_token_out.py",
        VLLM + "openai/completion/test_prompt_validation.py",
        VLLM + "openai/completion/test_completion_text_offset.py",
        VLLM + "openai/chat_completion/test_chat.py",
        VLLM + "openai/chat_completion/test_chat_echo.py",
        VLLM + "openai/chat_completion/test_chat_completion.py",
        VLLM + "openai/chat_completion/test_root_path.py",
        VLLM + "openai/chat_completion/test_enable_force_include_usage.py",
        VLLM + "openai/chat_completion/test_chat_logit_bias_validation.py",
        VLLM + "openai/chat_completion/test_logprob_token_ids.py",
        VLLM + "openai/test_return_token_ids.py",
        VLLM + "openai/test_return_tokens_as_ids.py",
        VLLM + "openai/test_stop_token_ids.py",
        VLLM + "openai/test_chunked_prompt.py",
        VLLM + "openai/models/test_models.py",
        VLLM + "serve/tokenize/test_tokenization.py",
        VLLM + "serve/instrumentator/test_basic.py",
        VLLM + "serve/instrumentator/test_metrics.py",
        VLLM + "scale_out/token_in_token_out/test_serving_tokens.py",
        VLLM + "launchers/test_shutdown.py",
        VLLM + "llm/test_generate.py",
        VLLM + "llm/test_chat.py",
        VLLM + "llm/test_prompt_validation.py",
        VLLM + "rl/return_routed_experts/test_openai_api.py",
        VLLM + "rl/return_routed_experts/test_scale_out_api.py",
        VLLM + "rl/state_transitions/test_pause_resume.py",
    ),
    "sglang": (
        SGLANG + "core/test_srt_endpoint.py",
        SGLANG + "openai_server/basic/test_openai_server.py",
        SGLANG + "openai_server/validation/test_request_length_validation.py",
        SGLANG + "openai_server/validation/test_matched_stop.py",
        SGLANG + "openai_server/validation/test_large_max_new_tokens.py",
        SGLANG + "tokenizer/test_skip_tokenizer_init.py",
        SGLANG + "rl/test_return_routed_experts.py",
        SGLANG + "scheduler/test_scheduler_control.py",
        "test/manual/openai_server/features/test_cache_report.py",
        "test/manual/openai_server/features/test_continuous_usage_stats.py",
        "test/manual/test_weight_version.py",
    ),
    "sglang-jax": (
        SGL_JAX + "test_features.py",
        SGL_JAX + "test_penalty.py",
        SGL_JAX + "test_server_pause_continue.py",
        SGL_JAX + "openai_server/basic/test_openai_server.py",
        SGL_JAX + "openai_server/validation/test_openai_server_params_validation.py",
        SGL_JAX + "test_srt_engine.py",
        SGL_JAX + "test_engine_determine_generation.py",
        SGL_JAX + "test_engine_flush_cache.py",
        SGL_JAX + "test_engine_pause_continue.py",
        SGL_JAX + "test_logprobs.py",
        SGL_JAX + "rl/test_return_routed_experts.py",
    ),
    "slime": (OURS + "slime_client.py",),
    "miles": (OURS + "miles_client.py",),
    "skyrl": (OURS + "skyrl_client.py",),
    "prime-rl": (OURS + "prime_rl_client.py",),
    "megatron-lm": (OURS + "megatron_arrays.py",),
    "verl": (OURS + "verl_arrays.py",),
    "nemo-rl": (OURS + "nemo_rl_arrays.py",),
    "maxtext": (OURS + "maxtext_arrays.py",),
}
