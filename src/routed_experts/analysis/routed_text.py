"""RoutedText: a text and its routing, token by token, as the figures show it.

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
    """One sequence: a piece of text for each of its S tokens, and the record of its rows. The first
    `cached_tokens` came from the prefix cache."""

    title: str
    pieces: tuple[str, ...]
    record: RoutedExperts
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.pieces) != self.record.num_tokens:
            raise RoutingAlignmentError(
                f"{self.title!r} has {len(self.pieces)} pieces of text and a record of {self.record.num_tokens} "
                "tokens; expected one a token"
            )

    def experts(self, token: int, column: int) -> tuple[int, ...]:
        """Return the K ids of a token in MoE layer `column`, best first; () where no row is known."""
        row = token - self.record.start
        if not 0 <= row < self.record.num_rows or not (self.record.valid is None or self.record.valid[row]):
            return ()
        return tuple(self.record.ids[row, column].tolist())


def token_texts(token_bytes: Iterable[bytes]) -> tuple[str, ...]:
    """Return the text of each token. A character of several tokens belongs to the last of them; the others are
    empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(piece) for piece in token_bytes]
    rest = decoder.decode(b"", final=True)
    return (*pieces[:-1], pieces[-1] + rest) if pieces else ()


def printable(text: str) -> str:
    """Replace control characters by their pictures (␛), other invisible ones by U+FFFD, and spaces of any kind by plain
    ones; line feeds stay."""
    return "".join(_printable(character) for character in text)


def _printable(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    if ord(character) < 0x20:
        return chr(_CONTROL_PICTURES + ord(character))
    if unicodedata.category(character) == "Zs":
        return " "
    return "\u2421" if character == "\x7f" else "\ufffd"
