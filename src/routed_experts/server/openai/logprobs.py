"""Logprobs in the forms of /v1: of completions, of chat, and of a prompt by token id, as vLLM writes them."""

import dataclasses
from collections.abc import Iterable, Sequence

from routed_experts.engine.requests.sequence_state import TokenLogprob, TopLogprobs
from routed_experts.engine.requests.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot express


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Which logprobs a call returns: of generated tokens, with `top` alternatives; of the prompt, with `prompt`
    alternatives (None: not returned). `as_ids`: tokens are written as token_id:N, from which the id can be read."""

    enabled: bool
    top: int
    prompt: int | None
    as_ids: bool
    echo: bool  # those of the prompt precede those of the generated tokens

    @property
    def num_requested(self) -> int:
        """The number of alternatives that the engine returns."""
        return max(self.top, self.prompt or 0)

    @property
    def start(self) -> int:
        """The first token of the prompt with a logprob; -1 without."""
        return 0 if self.echo or self.prompt is not None else -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One token with its logprob and the best alternatives, which may leave out the token itself. `is_known` False: the
    first token of a prompt, which has no logprob."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...]
    is_known: bool = True


def prompt_entries(num_top: int, pairs: Iterable[tuple[TokenLogprob, TopLogprobs]]) -> list[LogprobEntry]:
    """Return the logprobs of the prompt with their alternatives; none of a request that ended before its first
    token."""
    return [
        LogprobEntry(token=token, top=(top or ())[:num_top], is_known=index > 0)
        for index, (token, top) in enumerate(pairs)
    ]


def completion_logprobs(entries: Sequence[LogprobEntry], *, offset: int, as_ids: bool) -> tuple[dict[str, object], int]:
    """Return logprobs in the form of /v1/completions. `offset`: characters before these tokens; the second value is the
    number of characters after them. `as_ids`: tokens are written by their ids.

    Texts are those of single tokens; a token that is part of a character has a replacement character."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(_text(entry.token))
    fields: dict[str, object] = {
        "tokens": [_text(entry.token, as_ids=as_ids) for entry in entries],
        "token_logprobs": [_logprob(entry.token) if entry.is_known else None for entry in entries],
        "top_logprobs": [_top_by_text(entry, as_ids=as_ids) for entry in entries],
        "text_offset": offsets,
    }
    return fields, offset


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[LogprobEntry], *, as_ids: bool) -> dict[str, object]:
    """Return logprobs in the form of /v1/chat/completions; the `bytes` of all tokens join to the text in UTF-8.
    `as_ids`: tokens are written by their ids."""

    def to_json(token: TokenLogprob) -> dict[str, object]:
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token.token_id)
        return {"token": _text(token, as_ids=as_ids), "logprob": _logprob(token), "bytes": list(raw)}

    content = [{**to_json(entry.token), "top_logprobs": [to_json(token) for token in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def logprobs_by_id(entry: LogprobEntry) -> dict[str, object]:
    """Return the token and the alternatives by their ids, with logprob, rank and text; the token comes first."""
    ranks = {token.token_id: index + 1 for index, token in enumerate(entry.top)}
    by_id: dict[str, object] = {}
    for token in (entry.token, *entry.top):
        fields = {"logprob": _logprob(token), "rank": ranks.get(token.token_id), "decoded_token": token.text}
        by_id.setdefault(str(token.token_id), fields)
    return by_id


def _text(token: TokenLogprob, *, as_ids: bool = False) -> str:
    return f"token_id:{token.token_id}" if as_ids or token.text is None else token.text


def _logprob(token: TokenLogprob) -> float:
    return _LOWEST_LOGPROB if token.logprob is None else token.logprob


def _top_by_text(entry: LogprobEntry, *, as_ids: bool) -> dict[str, float] | None:
    """Return the token itself, which comes first as with vLLM, and the alternatives by their text; of equal texts the
    best. None without a logprob."""
    if not entry.is_known:
        return None
    by_text: dict[str, float] = {}
    for token in (entry.token, *entry.top):
        text, logprob = _text(token, as_ids=as_ids), _logprob(token)
        by_text[text] = max(logprob, by_text.get(text, logprob))
    return by_text
