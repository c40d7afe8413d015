"""Parsers of generated text: reasoning, content and tool calls, in the formats of model families.

    create_parser(format, tools) -> ResponseParser: feed(text) -> deltas, finish() -> deltas

Joined deltas do not depend on how the text was split. A parser reads text alone: tokens, logprobs, rows and usage of a
request are the same with it and without it. Formats are named as in SGLang and vLLM; `detect_format` chooses one by the
chat template. The rules of each format are in the module that reads it."""

from routed_experts.parsing.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta
from routed_experts.parsing.formats import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ResponseFormat,
    create_forced_parser,
    create_parser,
    detect_format,
    resolve_format,
)
from routed_experts.parsing.response_parser import ResponseParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "ReasoningDelta",
    "ResponseFormat",
    "ResponseParser",
    "create_forced_parser",
    "create_parser",
    "detect_format",
    "resolve_format",
]
