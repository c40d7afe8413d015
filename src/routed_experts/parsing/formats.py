"""Names of parsers, as in SGLang and vLLM, and the choice of them by the chat template.

A template shows the format: it writes the calls of earlier messages as the model is to write its own. Architectures do
not, as one has several: Qwen3-MoE has models of Qwen3 and of Qwen3-Coder, DeepseekV3 those of V3, R1 and V3.1."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from routed_experts.core.error_text import suggestion
from routed_experts.core.errors import ConfigError
from routed_experts.parsing import harmony as harmony_format
from routed_experts.parsing.call_formats import CALL_BEGIN, CALL_FORMATS, CALLS_BEGIN, Tools, listed_calls, named_call
from routed_experts.parsing.deltas import DeltaWriter
from routed_experts.parsing.reader import Reader, Steps
from routed_experts.parsing.response_parser import (
    THINK,
    THINK_END,
    ResponseParser,
    StreamParser,
    split_reasoning,
    verbatim,
)

HARMONY = "harmony"
# The names of --tool-call-parser, and their formats.
TOOL_CALL_PARSERS: Mapping[str, str] = MappingProxyType(
    {
        "hermes": "json",
        "qwen": "json",
        "qwen25": "json",
        "qwen3_coder": "xml",
        "qwen3_xml": "xml",
        "glm45": "glm",
        "glm": "glm",
        "glm47": "glm",
        "deepseekv3": "deepseek-v3",
        "deepseek_v3": "deepseek-v3",
        "deepseekv31": "deepseek-v31",
        "deepseek_v31": "deepseek-v31",
        "gpt-oss": HARMONY,
        "openai": HARMONY,
    }
)
# The names of --reasoning-parser. `forced`: the response begins with reasoning although nothing opens it.
REASONING_PARSERS: Mapping[str, str] = MappingProxyType(
    {
        "qwen3": "think",
        "qwen3-thinking": "forced",
        "glm45": "think",
        "deepseek-v3": "think",
        "deepseek_v3": "think",
        "deepseek-r1": "forced",
        "deepseek_r1": "forced",
        "gpt-oss": HARMONY,
        "openai_gptoss": HARMONY,
    }
)
OFF, AUTO = "none", "auto"
_CALL_MARKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "json": ("<tool_call>",),
        "xml": ("<tool_call>",),
        "glm": ("<tool_call>",),
        "deepseek-v3": (CALLS_BEGIN,),
        "deepseek-v31": (CALLS_BEGIN,),
    }
)
_MARKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "json": ("<tool_call>", "</tool_call>"),
        "xml": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
        "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "deepseek-v3": (CALLS_BEGIN, "<｜tool▁calls▁end｜>", CALL_BEGIN, "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        "deepseek-v31": (CALLS_BEGIN, "<｜tool▁calls▁end｜>", CALL_BEGIN, "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        HARMONY: harmony_format.MARKERS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """What the text of a model holds. `tool_calls`: a value of TOOL_CALL_PARSERS; `reasoning`: one of
    REASONING_PARSERS; None: it is content. `has_headers`: the text has headers of GPT-OSS, also where both are
    content."""

    tool_calls: str | None = None
    reasoning: str | None = None
    has_headers: bool = False

    @property
    def is_harmony(self) -> bool:
        """Whether the text is messages of GPT-OSS, whose headers are never content."""
        return self.has_headers or HARMONY in (self.tool_calls, self.reasoning)

    def without_forced_reasoning(self) -> "ResponseFormat":
        """Return the format of a response whose reasoning, if there is any, begins with its marker."""
        return replace(self, reasoning="think") if self.reasoning == "forced" else self

    def without_reasoning(self) -> "ResponseFormat":
        """Return the format with reasoning as content."""
        return ResponseFormat(tool_calls=self.tool_calls, has_headers=self.is_harmony)

    @property
    def markers(self) -> frozenset[str]:
        """Texts that a parser must see. A special token among them stays in the text."""
        names = (self.tool_calls, self.reasoning, HARMONY if self.is_harmony else None)
        markers = {marker for name in names if name is not None for marker in _MARKERS.get(name, ())}
        return frozenset(markers | ({THINK, THINK_END} if self.reasoning in ("think", "forced") else set()))


def detect_format(template: str | None) -> ResponseFormat:
    """Return the format that a chat template shows."""
    text = template or ""
    if harmony_format.CHANNEL in text and harmony_format.MESSAGE in text:
        return ResponseFormat(tool_calls=HARMONY, reasoning=HARMONY)
    calls: str | None = None
    if CALL_BEGIN in text:
        calls = "deepseek-v3" if "```json" in text else "deepseek-v31"
    elif "<arg_key>" in text:
        calls = "glm"
    elif "<function=" in text and "<parameter=" in text:
        calls = "xml"
    elif "<tool_call>" in text:
        calls = "json"
    return ResponseFormat(tool_calls=calls, reasoning="think" if THINK_END in text else None)


def resolve_format(
    template: str | None, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ResponseFormat:
    """Return the format by names of parsers: `auto` is that of the template, `none` no parser. Raises ConfigError for
    an unknown name, and for GPT-OSS beside another format if both are named."""
    detected = detect_format(template)
    calls = _format("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS, detected.tool_calls)
    reasoning = _format("reasoning_parser", reasoning_parser, REASONING_PARSERS, detected.reasoning)
    if calls is not None and reasoning is not None and (calls == HARMONY) != (reasoning == HARMONY):
        if AUTO in (tool_call_parser, reasoning_parser):  # the one that was named decides
            return ResponseFormat(tool_calls=calls) if reasoning_parser == AUTO else ResponseFormat(reasoning=reasoning)
        raise ConfigError(
            f"tool_call_parser={tool_call_parser!r} and reasoning_parser={reasoning_parser!r} read different texts; "
            "GPT-OSS has one format for both, so set both to gpt-oss, or one of them to none"
        )
    return ResponseFormat(tool_calls=calls, reasoning=reasoning)


def create_parser(
    response_format: ResponseFormat,
    *,
    prompt: str,
    continued: str | None = None,
    tools: Tools | None,
    max_calls: int | None = None,
) -> ResponseParser | None:
    """Create the parser of one response; None where all of it is content.

    `prompt`: the text that the response continues, of which the end is read; `continued`: the part of it that is the
    beginning of the response; `tools`: schemas of parameters by the name
    of the tool, None for a response whose calls are content; `max_calls`: further calls are left out."""
    writer = DeltaWriter(max_calls)
    calls = None if tools is None else response_format.tool_calls
    if response_format.is_harmony:
        kinds = {"with_calls": calls is not None, "with_reasoning": response_format.reasoning is not None}
        return StreamParser(functools.partial(harmony_format.harmony, prompt=prompt, **kinds), writer)
    if calls is None and response_format.reasoning is None:
        return None

    def start(reader: Reader, writer: DeltaWriter) -> Steps:
        return verbatim(reader, writer) if calls is None else CALL_FORMATS[calls](reader, writer, tools or {})

    content = StreamParser(start, writer)
    if response_format.reasoning is None:
        return content
    is_open = _opens_reasoning(prompt, continued, forced=response_format.reasoning == "forced")
    call_markers = _CALL_MARKERS.get(calls or "", ())

    def split(reader: Reader, writer: DeltaWriter) -> Steps:
        return split_reasoning(reader, writer, content, is_open=is_open, call_markers=call_markers)

    return StreamParser(split, writer)


def _opens_reasoning(prompt: str, continued: str | None, *, forced: bool) -> bool:
    """Whether the first text of a response is reasoning."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return True
    if continued is None:
        return forced and not end.endswith(THINK_END)
    return continued.rfind(THINK) > continued.rfind(THINK_END) or (forced and THINK_END not in continued)


def create_forced_parser(name: str | None, *, max_calls: int | None = None) -> ResponseParser:
    """Create the parser of a response that a grammar has made calls: the arguments of the tool `name`, or, without a
    name, a list of calls."""

    def start(reader: Reader, writer: DeltaWriter) -> Steps:
        return listed_calls(reader, writer) if name is None else named_call(reader, writer, name)

    return StreamParser(start, DeltaWriter(max_calls))


def _format(param: str, name: str, names: Mapping[str, str], detected: str | None) -> str | None:
    if name == AUTO:
        return detected
    if name == OFF:
        return None
    if name not in names:
        known = [AUTO, OFF, *names]
        fix = suggestion(name, known, otherwise=f"known are {', '.join(known)}")
        raise ConfigError(f"{param}={name!r} is no parser; {fix}")
    return names[name]
