"""Which names a body may hold: ours, those that others send and that change nothing here, and none that is a typo.
Knows no values of our own fields. null is absent, whatever its name."""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from routed_experts.core.error_text import nearest_name, short_repr
from routed_experts.server.errors import ApiError
from routed_experts.server.limits import MAX_NAMED_FIELDS, MAX_UNKNOWN_NAMES

# Names that change the answer elsewhere and that nobody here obeys: refused unless they say nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "best_of": (1,),
        "use_beam_search": (False,),
        "chat_template": (),
        "continue_final_message": (False,),
        "prompt_embeds": (),
        "input_embeds": (),
        "prompt_logprobs": (),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "return_tokens_as_token_ids": (False,),
        "return_hidden_states": (False,),
        "token_ids_logprob": ([],),
        "image_data": ([], ""),
        "audio_data": ([], ""),
        "video_data": ([], ""),
        "image_url": (),
        "modalities": (["text"], []),
        "audio": (),
        "lora_path": ("", []),
        "lora_request": (),
        "custom_logit_processor": ("",),
        "logits_processors": ([],),
        "session_params": ({},),
        "documents": ([],),
        "web_search_options": (),
        "prediction": (),
        "structured_outputs": (),
        "json_schema": ("",),
        "regex": ("",),
        "ebnf": ("",),
        "stop_regex": ([], ""),
        "structural_tag": ("",),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "kv_transfer_params": (),
    }
)
# Names that clients of others send as a matter of course; without effect, and never taken for a typo.
IGNORED = frozenset(
    "user store metadata parallel_tool_calls service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity "
    "reasoning_effort reasoning priority spaces_between_special_tokens length_penalty early_stopping custom_params return_logprobs_text "
    "logprobs_mode log_metrics include_reasoning separate_reasoning stream_reasoning mm_processor_kwargs modalities_config background "
    "data_parallel_rank bootstrap_host bootstrap_port bootstrap_room return_bytes stream_interval repetition_detection no_logs "
    "chat_template_content_format return_prompt_token_ids return_meta_info".split()
)
_RESERVED = ("routed_", "return_rout")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def screen(said: Mapping[str, object], known: Collection[str], *, strict: bool) -> tuple[dict[str, object], list[str]]:
    """Split a body into the fields that we know and the names that have no effect. Raises ApiError (400) for a name
    that is a typo, that is reserved, or whose value would have to change the answer; with `strict` for every name that
    we do not know."""
    kept = {name: value for name, value in said.items() if value is not None and name in known}
    ignored: list[str] = []
    others = {name: value for name, value in said.items() if value is not None and name not in known}
    if len(others) > MAX_UNKNOWN_NAMES:
        text = f"{len(others)} names of the body are none of this route's, above the limit of {MAX_UNKNOWN_NAMES}; leave them out"
        raise ApiError(text, status=400, code="too_many_fields")
    for name, value in others.items():
        if name in UNSUPPORTED:
            if not any(type(value) is type(harmless) and value == harmless for harmless in UNSUPPORTED[name]):
                text = f"{name}={short_repr(value)} is not supported by this server; leave it out"
                raise ApiError(text, status=400, code="unsupported_parameter", param=name)
        elif strict or name not in IGNORED:
            _check_unknown(name, known, strict=strict)
        ignored.append(name)
    return kept, ignored


def ignored_params_header(ignored: Collection[str]) -> dict[str, str]:
    """The response header that names what had no effect."""
    names = [name for name in ignored if _NAME.fullmatch(name)][:MAX_NAMED_FIELDS]
    return {"X-Ignored-Params": ", ".join(names)} if names else {}


def _check_unknown(name: str, known: Collection[str], *, strict: bool) -> None:
    near = nearest_name(name, known)
    if strict or near is not None or name.startswith(_RESERVED):
        fix = f"did you mean {near}?" if near else "leave it out"
        raise ApiError(
            f"{short_repr(name)} is no parameter of this route; {fix}",
            status=400,
            code="unknown_field",
            param=name[:64],
        )
