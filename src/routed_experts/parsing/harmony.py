"""The response format of GPT-OSS: messages with a channel and, for calls, a recipient.

    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|> arguments <|call|>
    <|start|>assistant<|channel|>final<|message|> content <|return|>

A message for a recipient is a call: `functions.` is left out of its name, and its text is the arguments, `{}` where it
has none. Of the others `analysis` is reasoning and every other channel content. A line break stands between two
messages of one kind. Headers are never content, also where the text ends within one. A response may begin with text
and without a header: it is content."""

import re
from collections.abc import Callable, Generator

from routed_experts.parsing.deltas import DeltaWriter
from routed_experts.parsing.reader import Reader, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([^\s<]+)")


def prompt_header(prompt: str) -> str | None:
    """Return the header of the message that a prompt has opened, for the model to continue; None if it is complete or
    has no message."""
    _, start, tail = prompt.rpartition(START)
    if not start or any(marker in tail for marker in (END, CALL, RETURN)):
        return None
    return tail


def harmony(
    reader: Reader, writer: DeltaWriter, prompt: str, *, with_calls: bool, with_reasoning: bool = True
) -> Steps:
    """Read the messages of a response to `prompt`. What is False is content."""
    header, message, _ = (prompt_header(prompt) or "").partition(MESSAGE)
    marker: str | None = message or None
    if marker is None:
        marker = yield from reader.read_marker([CHANNEL, START, MESSAGE, " to="])
        if marker is None:
            header, marker = "", MESSAGE  # text without a header
    content, reasoning = _Messages(writer.raw_content), _Messages(writer.reasoning)
    while marker is not None:
        if marker != MESSAGE:
            parts = [header, marker]
            if (yield from reader.read_until([MESSAGE], parts.append)) is None:
                return
            header = "".join(parts)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and with_calls:
            marker = yield from _arguments(reader, writer, recipient[1].removeprefix("functions."))
        else:
            is_analysis = recipient is None and _CHANNEL_NAME.findall(header)[-1:] == ["analysis"]
            messages = reasoning if is_analysis and with_reasoning else content
            messages.start()
            marker = yield from reader.read_until(_ENDS, messages.push)
        header = ""


def _arguments(reader: Reader, writer: DeltaWriter, name: str) -> Generator[None, None, str | None]:
    writer.start_call(name)
    if (yield from reader.skip_whitespace()) == "":
        writer.arguments("{}")
        return None
    parts = list[str]()

    def emit(text: str) -> None:
        parts[:] = ["text"]
        writer.arguments(text)

    marker = yield from reader.read_until(_ENDS, emit)
    if not parts:
        writer.arguments("{}")
    return marker


class _Messages:
    """The text of all messages of one kind."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self._has_text, self._separator = emit, False, ""

    def start(self) -> None:
        """Start the next message."""
        self._separator = "\n" if self._has_text else ""

    def push(self, text: str) -> None:
        """Add to the message."""
        self._emit(self._separator + text)
        self._has_text, self._separator = True, ""
