"""Deltas: what a parser adds to a response, and the writer that collects them.

Whitespace beside a call is no content: the writer holds whitespace at the end of content until it knows what follows. A
response without calls keeps all of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The start of call `index`, which has its `name`, or (name None) more of its arguments, the text of a JSON
    value."""

    index: int
    name: str | None
    arguments: str


Delta = ContentDelta | ReasoningDelta | CallDelta


@dataclass(slots=True)
class _Piece:
    kind: type[Delta]
    parts: list[str]
    index: int = 0
    name: str | None = None


class DeltaWriter:
    """Collects deltas; neighbours of one kind become one. `max_calls`: calls beyond it are left out."""

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._pieces: list[_Piece] = []
        self._whitespace: list[str] = []  # at the end of the content so far
        self._is_after_call = False  # no content since a call
        self._is_left_out = False  # the current call is beyond max_calls
        self.num_calls = 0

    def take(self) -> list[Delta]:
        """Return the deltas since the last call."""
        pieces, self._pieces = self._pieces, []
        deltas = list[Delta]()
        for piece in pieces:
            text = "".join(piece.parts)
            if piece.kind is CallDelta:
                deltas.append(CallDelta(piece.index, piece.name, text))
            else:
                deltas.append(ContentDelta(text) if piece.kind is ContentDelta else ReasoningDelta(text))
        return deltas

    def raw_content(self, text: str) -> None:
        """Add content with all its whitespace."""
        if text:
            self._add(ContentDelta, text)

    def content(self, text: str) -> None:
        """Add content; whitespace beside a call is dropped."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        end = len(text.rstrip())
        if end:
            self.raw_content("".join((*self._whitespace, text[:end])))
            self._whitespace.clear()
        if end < len(text):
            self._whitespace.append(text[end:])

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._add(ReasoningDelta, text)

    def start_call(self, name: str) -> None:
        """Start the next call."""
        self._whitespace.clear()
        self._is_after_call = True
        self._is_left_out = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._is_left_out:
            self._pieces.append(_Piece(CallDelta, [], self.num_calls, name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the current call."""
        if self._is_left_out or not text:
            return
        index = self.num_calls - 1
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.kind is CallDelta and last.index == index:
            last.parts.append(text)
        else:
            self._pieces.append(_Piece(CallDelta, [text], index))

    def finish(self) -> None:
        """Add whitespace that no call follows."""
        self.raw_content("".join(self._whitespace))
        self._whitespace.clear()

    def _add(self, kind: type[Delta], text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.kind is kind:
            last.parts.append(text)
        else:
            self._pieces.append(_Piece(kind, [text]))
