"""A text and its routing side by side: what the pictures show. Knows nothing of tokenizers or of how it is drawn.
Dims: S tokens of the sequence, M MoE layers, K experts per token."""

import codecs
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.routed_experts import RoutedExperts

_CONTROL_PICTURES = 0x2400


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedText:
    """One sequence: a piece of text for each of its S tokens, and the record of its rows. `cached_tokens` are those at
    its beginning that came from the prefix cache."""

    title: str
    pieces: tuple[str, ...]
    record: RoutedExperts
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.pieces) != self.record.num_tokens:
            raise RoutingAlignmentError(
                f"{self.title!r} has {len(self.pieces)} pieces of text and a record of {self.record.num_tokens} tokens; expected one a token"
            )

    def experts(self, token: int, column: int) -> tuple[int, ...]:
        """The K ids of a token in MoE layer `column`, best first; () where no row is known."""
        row = token - self.record.start
        if not 0 <= row < self.record.num_rows or not (self.record.valid is None or self.record.valid[row]):
            return ()
        return tuple(self.record.ids[row, column].tolist())


def pieces_of(token_bytes: Iterable[bytes]) -> tuple[str, ...]:
    """Text of each token. A character that several tokens spell belongs to the last of them; the others are empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(piece) for piece in token_bytes]
    rest = decoder.decode(b"", final=True)
    return (*pieces[:-1], pieces[-1] + rest) if pieces else ()


def printable(text: str) -> str:
    """Make visible what steers a terminal or hides: controls become their pictures (␛), the rest of the invisible
    U+FFFD. Spaces of any kind become plain ones; line feeds stay."""
    return "".join(_printable(character) for character in text)


def _printable(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    if ord(character) < 0x20:
        return chr(_CONTROL_PICTURES + ord(character))
    if unicodedata.category(character) == "Zs":
        return " "
    return "\u2421" if character == "\x7f" else "\ufffd"
