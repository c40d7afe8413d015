"""ResponseParser: the text of one response to deltas of reasoning, content and calls.

The text of a family with `<think>` goes through two readers. The first takes the reasoning out, and hands the content
to the second, which takes the calls out:

    text -> _split_reasoning -> content -> calls of a format -> deltas

Reasoning begins where the prompt has opened it, or where the response begins with `<think>`. It ends at `</think>` or,
as some models do not close it, at the first call. The beginning of such a marker is no reasoning at the end of a text
that a limit cuts. Whitespace at either end of the reasoning is dropped, and so is whitespace between it and the
content."""

from collections.abc import Callable
from typing import Protocol

from routed_experts.parsing.deltas import Delta, DeltaWriter
from routed_experts.parsing.reader import Reader, Steps

THINK, THINK_END = "<think>", "</think>"


class ResponseParser(Protocol):
    """Parser of one response."""

    def feed(self, text: str) -> list[Delta]:
        """Return what more text adds."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return what the end of the text adds. `is_cut`: a limit has ended it, such as max_tokens."""
        ...

    @property
    def num_calls(self) -> int:
        """The calls that have started."""
        ...


class StreamParser:
    """A generator that reads text and writes deltas, as a ResponseParser."""

    def __init__(self, start: Callable[[Reader, DeltaWriter], Steps], writer: DeltaWriter) -> None:
        self._reader, self._writer = Reader(), writer
        self._steps = start(self._reader, writer)

    @property
    def num_calls(self) -> int:
        """The calls that have started."""
        return self._writer.num_calls

    def feed(self, text: str) -> list[Delta]:
        """Return what more text adds."""
        self.push(text)
        return self._writer.take()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return what the end of the text adds. `is_cut`: a limit has ended it, such as max_tokens."""
        self.close(is_cut=is_cut)
        self._writer.finish()
        return self._writer.take()

    def push(self, text: str) -> None:
        """Read more text."""
        self._reader.push(text)
        next(self._steps, None)

    def close(self, *, is_cut: bool) -> None:
        """Read to the end."""
        self._reader.close(is_cut=is_cut)
        for _ in self._steps:
            raise AssertionError("a parser waits for text after the end")


def split_reasoning(
    reader: Reader, writer: DeltaWriter, content: StreamParser, *, is_open: bool, call_markers: tuple[str, ...]
) -> Steps:
    """Read reasoning, and hand the rest to `content`. `is_open`: the prompt has begun the reasoning; `call_markers` end
    it, too."""
    reader.start_record("")
    yield from reader.skip_whitespace()
    has_marker = (yield from reader.read_marker([THINK])) is not None
    if not (is_open or has_marker):
        content.push(reader.record)
    else:
        yield from reader.skip_whitespace()
        whitespace = list[str]()

        def emit(text: str) -> None:
            end = len(text.rstrip())
            if end:
                writer.reasoning("".join((*whitespace, text[:end])))
                whitespace.clear()
            if end < len(text):
                whitespace.append(text[end:])

        markers = [THINK_END, *call_markers]
        marker = yield from reader.read_until(markers, emit, silent=markers)
        if marker == THINK_END:
            yield from reader.skip_whitespace()
        elif marker is not None:
            content.push(marker)
    yield from reader.read_until([], content.push)
    content.close(is_cut=reader.is_cut)


def verbatim(reader: Reader, writer: DeltaWriter) -> Steps:
    """Read content without calls."""
    yield from reader.read_until([], writer.raw_content)
