"""Reader: text that arrives in pieces, read by a parser that is written as if all of it were there.

A parser is a generator. Where it needs text that has not arrived it yields, and continues with the next piece:

    name = yield from reader.read_name(">")

Each character is read once, or twice where a marker may begin with it."""

from collections.abc import Callable, Generator, Sequence

Steps = Generator[None, None, None]
MAX_NAME_CHARS = 256


class Reader:
    """The text that has arrived and is not read yet. `record` keeps what is read, for text that turns out to be no
    call. `is_cut`: the text has ended at a limit, which may be within a marker."""

    def __init__(self) -> None:
        self._text, self._position = "", 0
        self._is_closed = self.is_cut = False
        self._record: list[str] = []

    def push(self, text: str) -> None:
        """Add a piece."""
        self._text, self._position = self._text[self._position :] + text, 0

    def close(self, *, is_cut: bool) -> None:
        """End the text; `is_cut` as the attribute."""
        self._is_closed, self.is_cut = True, is_cut

    def start_record(self, text: str) -> None:
        """Forget what was read; `text` is the first of the new record."""
        self._record = [text]

    @property
    def record(self) -> str:
        """What was read since `start_record`."""
        return "".join(self._record)

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it; "" at the end."""
        while self._position >= len(self._text):
            if self._is_closed:
                return ""
            yield
        return self._text[self._position]

    def read(self) -> str:
        """Read the character that `peek` has returned."""
        character = self._text[self._position]
        self._position += 1
        self._record.append(character)
        return character

    def skip_whitespace(self) -> Generator[None, None, str]:
        """Read whitespace; returns the character after it, which is not read, or ""."""
        while (character := (yield from self.peek())).isspace():
            self.read()
        return character

    def read_name(self, end: str) -> Generator[None, None, str | None]:
        """Read a name up to one of the characters `end`, which is not read.

        Returns None for a character that no name has, for more than MAX_NAME_CHARS characters and for the end of the
        text."""
        name = list[str]()
        while (character := (yield from self.peek())) not in (*end, ""):
            if character in '\n<>{}"' or len(name) == MAX_NAME_CHARS:
                return None
            name.append(self.read())
        text = "".join(name).strip()
        return text if text and character else None

    def read_marker(self, markers: Sequence[str]) -> Generator[None, None, str | None]:
        """Read one of `markers`, none of which begins with another. Returns None if the text goes on otherwise."""
        while True:
            rest = self._text[self._position : self._position + max(map(len, markers))]
            for marker in markers:
                if rest.startswith(marker):
                    self._position += len(marker)
                    self._record.append(marker)
                    return marker
            if self._is_closed or not any(marker.startswith(rest) for marker in markers):
                return None
            yield

    def ends_within(self, markers: Sequence[str]) -> bool:
        """Whether the text ends within one of `markers` or just before it, where `read_marker` has returned None."""
        rest = self._text[self._position :]
        return self._is_closed and any(marker.startswith(rest) for marker in markers)

    def read_cut_marker(self, markers: Sequence[str]) -> bool:
        """Read the rest of a text that ends so. Returns whether it does."""
        if not self.ends_within(markers):
            return False
        self._position = len(self._text)
        return True

    def read_until(
        self, markers: Sequence[str], emit: Callable[[str], None], *, silent: Sequence[str] = ()
    ) -> Generator[None, None, str | None]:
        """Read up to the first of `markers`, which is read, too, and returned; None at the end of the text. Text before
        it is emitted as soon as no marker can begin in it. `silent`: those of which no beginning is emitted at the end
        of a text that is cut."""
        first_characters = {marker[0] for marker in markers}
        while True:
            starts = [at for character in first_characters if (at := self._text.find(character, self._position)) >= 0]
            if starts:  # most text has none
                matches = [(at, marker) for marker in markers if (at := self._text.find(marker, min(starts))) >= 0]
                if matches:
                    at, marker = min(matches)
                    self._emit_up_to(at, emit)
                    self._position += len(marker)
                    return marker
            possible = markers if not self._is_closed else silent if self.is_cut else ()
            held = self._held_from(possible) if starts else len(self._text)
            self._emit_up_to(held, emit)
            if self._is_closed:
                self._position = len(self._text)
                return None
            yield

    def _emit_up_to(self, end: int, emit: Callable[[str], None]) -> None:
        text, self._position = self._text[self._position : end], end
        if text:
            emit(text)

    def _held_from(self, markers: Sequence[str]) -> int:
        """Return where the longest end of the text starts that may begin a marker."""
        first = max(self._position, len(self._text) - max(map(len, markers), default=1) + 1)
        for start in range(first, len(self._text)):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return start
        return len(self._text)
