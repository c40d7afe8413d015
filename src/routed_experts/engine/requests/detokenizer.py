"""Incremental detokenization of one sequence: text deltas that are final, cut at the first stop string.

The text of an output continues that of its prompt, whose last token is the context of the first one: a decoder may
strip the space before the first word of a text. Joined deltas equal what the one-shot decode of all tokens adds to that
of the prompt, cut at the stop string that completes first (of those that complete together, the longest). Exceptions: a
prompt that ends within a character, which the output does not complete, and a prompt with text before its last
_PROMPT_TOKENS tokens but none in them, after which the output begins a text. An unfinished character is held back, and
so is text that may begin a stop string. Work grows linearly with tokens and characters in all cases: an automaton,
because searches of the standard library read the held text again for every token. Dims: S tokens of the prompt.

    tokens -> text that can no longer change -> text that no stop string can claim -> deltas
              (_ByteLevelText or _WindowText)   (_StopMatcher)

A run of raw bytes can change until it ends. Stop strings are looked for in its complete characters all the same: a
sequence that ends at one of them ends the run, whose text is then final."""

import codecs
import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.requests.tokenizer import Tokenizer

_PROMPT_TOKENS = 5  # at the end of a prompt, searched for one with text, as SGLang has it


class IncrementalDetokenizer:
    """The detokenizer of one sequence. After a stop string, or `finish`, it returns no more text. `prompt_ids` precede
    the tokens: their text is not returned, and no stop string matches in it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] | Int[np.ndarray, " S"] = (),
        skip_special_tokens: bool = True,
        visible_special_ids: frozenset[int] = frozenset(),
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if "" in stop:
            raise InvalidRequestError(
                "stop holds an empty string; each needs at least one character; leave it out", param="stop"
            )
        self._text: _ByteLevelText | _WindowText
        if tokenizer.byte_level:
            self._text = _ByteLevelText(tokenizer, skip_special_tokens, visible_special_ids)
        else:
            self._text = _WindowText(tokenizer, skip_special_tokens, visible_special_ids, prompt_ids)
        self._matcher = _StopMatcher(stop)
        self._include_stop_str, self._min_tokens = include_stop_str, min_tokens
        self._held = ""  # final, but possibly the beginning of a stop string
        self._ahead: list[str] = []  # what the matcher has read of the run of raw bytes that waits
        self._state_before = self._matcher.state  # of the matcher, before the run
        self._finished = False
        self.stopped: str | None = None  # the stop string that was met
        self.num_tokens = 0  # consumed, the one that completed the stop string included

    @property
    def work(self) -> int:
        """Elementary steps so far: characters compared and tokens decoded."""
        return self._matcher.work + self._text.work

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens, return the text that is now final; tokens after a stop string are ignored."""
        if self._matcher.is_empty and not self._finished:  # no stop string: all tokens at once
            self.num_tokens += len(token_ids)
            return self._text.feed(token_ids)
        deltas: list[str] = []
        for token_id in token_ids:
            if self._finished:
                break
            self.num_tokens += 1
            deltas.append(self._scan(self._text.feed([token_id])))
            if not self._finished:
                deltas.append(self._scan_ahead())
        return "".join(deltas)

    def finish(self, *, search: bool = True) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD. With `search` it may still complete a stop
        string."""
        if self._finished:
            return ""
        text = self._text.flush()
        if search:
            delta = self._scan(text)
        else:
            delta, self._held = self._held + text, ""
        if not self._finished:
            delta, self._held, self._finished = delta + self._held, "", True
        return delta

    def fork(self) -> "IncrementalDetokenizer":
        """Return an independent copy."""
        other = copy.copy(self)
        other._text, other._matcher, other._ahead = self._text.fork(), copy.copy(self._matcher), list(self._ahead)
        return other

    def _scan(self, text: str) -> str:
        """Take final text, which begins with that of the run that waited; returns what no stop string can claim."""
        if not text:
            return ""
        ahead, unread = "".join(self._ahead), text
        self._ahead.clear()
        if text.startswith(ahead):
            unread = text[len(ahead) :]
        else:  # the run has become invalid
            self._matcher.state = self._state_before
        match = self._match(unread)
        pending = self._held + text
        if match is not None:
            return self._cut(pending, len(unread), match)
        end = len(pending) - self._matcher.depth
        self._held = pending[end:]
        return pending[:end]

    def _scan_ahead(self) -> str:
        """Read what the newest token has completed of the run that waits; returns text if a stop string ends it."""
        unread = self._text.read_ahead()
        if not unread:
            return ""
        if not self._ahead:
            self._state_before = self._matcher.state
        self._ahead.append(unread)
        match = self._match(unread)
        return "" if match is None else self._cut(self._held + self._text.flush(), len(unread), match)

    def _match(self, unread: str) -> tuple[str, int] | None:
        """Feed the matcher; text that becomes final, or complete, before min_tokens is not searched."""
        return None if self.num_tokens < self._min_tokens else self._matcher.feed(unread)

    def _cut(self, pending: str, num_unread: int, match: tuple[str, int]) -> str:
        """Finish at a stop string in the last `num_unread` characters; returns the text before its end or its
        beginning."""
        self.stopped, consumed = match
        self._held, self._finished = "", True
        return pending[: len(pending) - num_unread + consumed - (0 if self._include_stop_str else len(self.stopped))]


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    depth: int
    following: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None  # the longest proper suffix of this node's text that begins a stop string too
    match: str | None = None  # the longest stop string that ends here


class _StopMatcher:
    """Finds the stop string that completes first (Aho and Corasick 1975): one pass, each character read once."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._root = _Node(0)
        self.work = 0
        for string in stop:
            node = self._root
            for character in string:
                node = node.following.setdefault(character, _Node(node.depth + 1))
            node.match = string
        self.state = self._root  # may be set to an earlier one
        waiting = deque([self._root])
        while waiting:
            node = waiting.popleft()
            for character, child in node.following.items():
                child.fallback = self._next(node.fallback, character) if node.fallback else self._root
                child.match = child.match or child.fallback.match
                waiting.append(child)

    @property
    def is_empty(self) -> bool:
        """Whether there is no stop string."""
        return not self._root.following

    @property
    def depth(self) -> int:
        """Number of last characters that may begin a stop string."""
        return self.state.depth

    def feed(self, text: str) -> tuple[str, int] | None:
        """Read on; returns the stop string that completes, and how many characters of `text` were read."""
        if self.is_empty:
            return None
        for index, character in enumerate(text):
            self.state = self._next(self.state, character)
            if self.state.match is not None:
                return self.state.match, index + 1
        return None

    def _next(self, node: _Node, character: str) -> _Node:
        self.work += 1
        while character not in node.following and node.fallback is not None:
            self.work += 1
            node = node.fallback
        return node.following.get(character, node)


class _ByteLevelText:
    """Byte-level BPE: a token is bytes, which become text as soon as a character is complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, visible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip, self._visible = skip_special_tokens, visible
        self._rest = b""  # of an unfinished character
        self.work = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        self.work += len(token_ids)
        tokenizer, skip = self._tokenizer, self._skip
        new = [tokenizer.token_bytes(token) for token in token_ids if not (skip and self._is_hidden(token))]
        encoded = b"".join((self._rest, *new))
        text, consumed = codecs.utf_8_decode(encoded, "replace", False)
        self._rest = encoded[consumed:]
        return text

    def read_ahead(self) -> str:
        return ""  # complete characters are final

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")

    def _is_hidden(self, token_id: int) -> bool:
        return self._tokenizer.is_special(token_id) and token_id not in self._visible

    def fork(self) -> "_ByteLevelText":
        return copy.copy(self)


class _WindowText:
    """Decoders whose text depends on the token before (a leading space) or, for raw bytes, on the whole run of them.

    One token of context is kept, at first one of the prompt. Raw bytes wait for the token after their run: one invalid
    byte turns all of them into U+FFFD. From that byte on the run is final."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        visible: frozenset[int],
        prompt_ids: Sequence[int] | Int[np.ndarray, " S"],
    ) -> None:
        self._tokenizer = tokenizer
        self._skip, self._visible = skip_special_tokens, visible
        self._context = self._prompt_context(prompt_ids)
        self._waiting: list[int] = []
        self._rest = b""  # of an unfinished character of the run
        self._is_broken = False  # the run has an invalid byte
        self._num_ahead = 0  # tokens of the run that were read ahead
        self._ahead_context = self._context  # those of its last character
        self.work = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def _feed_one(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        if not self._tokenizer.is_byte(token_id):
            self._waiting.append(token_id)
            return self.flush()
        if self._is_broken:
            self._context = [token_id]
            self.work += 1
            return "\ufffd"
        self._waiting.append(token_id)
        encoded = self._rest + self._tokenizer.token_bytes(token_id)
        try:
            _, consumed = codecs.utf_8_decode(encoded, "strict", False)
        except UnicodeDecodeError:
            return self._flush_broken()
        self._rest = encoded[consumed:]
        # Two bytes of a surrogate are no error to the codec yet, but no third one makes them a character.
        return self._flush_broken() if self._rest[:1] == b"\xed" and self._rest[1:2] >= b"\xa0" else ""

    def _flush_broken(self) -> str:
        text = self.flush()
        self._is_broken = True
        return text

    def read_ahead(self) -> str:
        """Return the characters that have become complete in the run that waits since the last call, as they are if it
        ends with them: the context is the last one."""
        unread = self._waiting[self._num_ahead :]
        if not unread or self._rest:
            return ""
        text = self._text_after(self._ahead_context, unread)
        self._num_ahead, self._ahead_context = len(self._waiting), unread
        return text

    def flush(self) -> str:
        text = self._text_after(self._context, self._waiting) if self._waiting else ""
        self._context = self._ahead_context = self._waiting[-1:] or self._context
        self._waiting, self._rest, self._is_broken, self._num_ahead = [], b"", False, 0
        return text

    def _text_after(self, context: list[int], token_ids: list[int]) -> str:
        before, both = self._decode(context), self._decode(context + token_ids)
        assert both.startswith(before), (context, token_ids, before, both)
        return both[len(before) :]

    def _prompt_context(self, prompt_ids: Sequence[int] | Int[np.ndarray, " S"]) -> list[int]:
        """The last token of the prompt that has text, near the end of the prompt. For a raw byte, which would join the
        first bytes of the output, any token with text: the output does not begin a text."""
        for token_id in map(int, prompt_ids[: -_PROMPT_TOKENS - 1 : -1]):
            if self._has_text(token_id):
                context = self._tokenizer.text_token_id if self._tokenizer.is_byte(token_id) else token_id
                return [] if context is None else [context]
        return []

    def _has_text(self, token_id: int) -> bool:
        """Whether a token is in the vocabulary and is shown."""
        is_hidden = self._skip and self._tokenizer.is_special(token_id) and token_id not in self._visible
        return not is_hidden and bool(self._tokenizer.token_string(token_id))

    def fork(self) -> "_WindowText":
        other = copy.copy(self)
        other._waiting = list(self._waiting)  # the other lists are replaced, never changed
        return other

    def _decode(self, token_ids: list[int]) -> str:
        self.work += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip and not self._visible)
