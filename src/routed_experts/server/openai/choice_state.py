"""Choices: what news of one sequence becomes in OpenAI's forms: text, logprobs, finish reason. Knows no HTTP.

Token texts are those of single tokens; `bytes` join to the text in UTF-8 where a token is part of a character."""

import dataclasses
import math
from collections.abc import Sequence

from routed_experts.core.io_struct import StrOut, FinishReason, Logprobs, TokenizedGenerateReqInput
from routed_experts.engine.requests.tokenizer import Tokenizer

_LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, its logprob (None: the first of a prompt) and the best alternatives (logprob, id), the token itself
    not always among."""

    token_id: int
    value: float | None
    top: tuple[tuple[float, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one event adds to a choice."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class Choice:
    """One sequence of a call. `echo`: the prompt's text, which comes first. `prompt_only`: the one token that the
    engine had to generate is left out (max_tokens 0)."""

    def __init__(self, index: int, request: TokenizedGenerateReqInput, *, echo: str | None, prompt_only: bool) -> None:
        self.index, self.request, self.prompt_only = index, request, prompt_only
        self._echo = echo
        self.pieces: list[Piece] = []
        self.cached_tokens, self.completion_tokens = 0, 0
        self.finish: FinishReason | None = None
        self.weight_version, self.exact = 0, True

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.input_ids.size)

    def take(self, news: StrOut) -> Piece:
        """Take in news; what it adds."""
        out = news.out
        told = (
            ()
            if self.prompt_only
            else _joined(out.new_token_ids, out.output_logprobs)
            if self.request.return_logprob
            else ()
        )
        text, ids = ("", ()) if self.prompt_only else (news.text, out.new_token_ids)
        if self._echo is not None:
            text, self._echo = self._echo + text, None
            if out.input_logprobs is not None:
                told = (*_joined(self.request.input_ids.tolist(), out.input_logprobs), *told)
        self.cached_tokens, self.weight_version, self.exact = out.cached_tokens, out.weight_version, out.exact
        self.completion_tokens += len(ids)
        self.finish = out.finish_reason
        if self.prompt_only and self.finish is not None and self.finish.type == "stop":
            self.finish = FinishReason(type="length", length=0)
        piece = Piece(text=text, token_ids=ids, logprobs=told)
        self.pieces.append(piece)
        return piece

    def whole(self) -> Piece:
        """All pieces as one."""
        return Piece(
            text="".join(piece.text for piece in self.pieces),
            token_ids=tuple(token for piece in self.pieces for token in piece.token_ids),
            logprobs=tuple(told for piece in self.pieces for told in piece.logprobs),
        )

    def ending(self) -> dict[str, object]:
        """`finish_reason` and `stop_reason` (the stop string, or the stop id that the request named); and `exact` where
        it is false."""
        finish = self.finish
        assert finish is not None, self.request.rid
        named = isinstance(finish.matched, str) or finish.matched in self.request.sampling.stop_token_ids
        told: dict[str, object] = {"finish_reason": finish.type, "stop_reason": finish.matched if named else None}
        return told if self.exact else {**told, "exact": False}


def completion_logprobs(tokenizer: Tokenizer | None, told: Sequence[TokenLogprob], *, offset: int) -> dict[str, object]:
    """The form of /v1/completions; `offset`: characters of text before the first of these tokens."""
    texts = [_text(tokenizer, one.token_id) for one in told]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_number(one.value) for one in told],
        "top_logprobs": [_top_by_text(tokenizer, one) for one in told],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer | None, told: Sequence[TokenLogprob]) -> dict[str, object]:
    """The form of /v1/chat/completions."""

    def entry(value: float | None, token_id: int) -> dict[str, object]:
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
        return {"token": _text(tokenizer, token_id), "logprob": _number(value), "bytes": list(raw)}

    content = [
        {**entry(one.value, one.token_id), "top_logprobs": [entry(value, token_id) for value, token_id in one.top]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def usage_of(choices: Sequence[Choice]) -> dict[str, object]:
    """Tokens of a call; a prompt counts once, however many choices it has."""
    first = [choice for choice in choices if choice.request.choice == 0]
    prompt = sum(choice.prompt_len for choice in first)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in first)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _joined(token_ids: Sequence[int], told: Logprobs) -> tuple[TokenLogprob, ...]:
    tops = told.top or (None,) * len(told.values)
    return tuple(
        TokenLogprob(token, value, top or ()) for token, value, top in zip(token_ids, told.values, tops, strict=True)
    )


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)


def _number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else _LOWEST


def _top_by_text(tokenizer: Tokenizer | None, one: TokenLogprob) -> dict[str, float | None] | None:
    """Alternatives by their text, the token itself among them; None where there is no logprob at all."""
    if one.value is None:
        return None
    found: dict[str, float | None] = {}
    for value, token_id in (*one.top, (one.value, one.token_id)):
        found.setdefault(_text(tokenizer, token_id), _number(value))
    return found
