"""Tokens that a checkpoint's other files add to its tokenizer.json: each is one token wherever a text spells it out.

transformers adds them when it loads a tokenizer. First come those of `added_tokens_decoder` whose flags tokenizer.json
does not have, then the named special tokens, then the other special tokens. A token of the vocabulary keeps its id; a
new one gets the next id."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.config_reader import read_json_object

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_tokenizer_settings(folder: Path) -> dict[str, object]:
    """Return tokenizer_config.json; where it lists no added tokens, with those of special_tokens_map.json and
    added_tokens.json. Empty without files. Raises CheckpointError for a file that is no JSON object."""
    settings, older, ids = (
        read_json_object(file) if (file := folder / f"{name}.json").exists() else {}
        for name in ("tokenizer_config", "special_tokens_map", "added_tokens")
    )
    if "added_tokens_decoder" in settings:
        return settings
    first, more = (each.get("extra_special_tokens") for each in (settings, older))
    settings |= older
    if isinstance(first, list) and isinstance(more, list):
        settings["extra_special_tokens"] = [*first, *(token for token in more if token not in first)]
    if ids:
        special = {_content(entry) for entry in _special_entries(settings)}
        settings["added_tokens_decoder"] = {
            str(number): {"content": text, "normalized": text not in special, "special": text in special}
            for text, number in ids.items()
        }
    return settings


def add_tokens(backend: Any, settings: Mapping[str, object], file: Path, *, make: Any) -> None:
    """Add the tokens of `settings` to a tokenizer of the library `tokenizers`; `make` is its AddedToken, and `file` is
    named in errors. Raises CheckpointError for tokens of another form, and for an eos_token that no other setting and
    not tokenizer.json has: no sequence would end with it."""
    present = {_flags(token) for token in backend.get_added_tokens_decoder().values()}
    added = [token for token in _listed(settings, file, make) if _flags(token) not in present]
    texts = {token.content for token in (*backend.get_added_tokens_decoder().values(), *added)}
    eos = _content(settings.get("eos_token"))
    others = {_content(entry) for entry in _special_entries({**settings, "eos_token": None})}
    if eos is not None and eos not in texts | others and backend.token_to_id(eos) is None:
        raise CheckpointError(f"{file}: eos_token {eos!r} is not in tokenizer.json; correct the name")
    for entry in _special_entries(settings):
        token = _token(entry, make, special=True)
        if token is not None and token.content not in texts:
            texts.add(token.content)
            added.append(token)
    named = {_content(entry) for entry in _named_entries(settings)}
    for token in added:
        token.special = token.special or token.content in named
    if added:
        backend.add_tokens(added)


def _listed(settings: Mapping[str, object], file: Path, make: Any) -> Iterator[Any]:
    """The tokens of `added_tokens_decoder`, by id."""
    listed = settings.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        text = f"{file}: added_tokens_decoder={short_repr(listed)} must be an object of tokens by id; correct it"
        raise CheckpointError(text)
    for _, described in sorted(listed.items(), key=lambda item: int(item[0])):
        token = _token(described, make, special=False) if isinstance(described, dict) else None
        if token is None:
            text = f"{file}: added_tokens_decoder holds {short_repr(described)}, which is no token; correct it"
            raise CheckpointError(text)
        yield token


def _named_entries(settings: Mapping[str, object]) -> list[object]:
    """The named special tokens: those of every tokenizer, then those of a model's own names, such as image_token."""
    extra = settings.get("extra_special_tokens")
    own = {name: entry for name, entry in settings.items() if name.endswith("_token") and name not in _NAMED}
    if isinstance(extra, dict):
        own |= extra
    return [*(settings.get(name) for name in _NAMED), *own.values()]


def _special_entries(settings: Mapping[str, object]) -> list[object]:
    """The named special tokens, then the others."""
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    return [*_named_entries(settings), *(others if isinstance(others, list) else ())]


def _content(entry: object) -> str | None:
    """The text of a token in either form: a text, or an object with its flags."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _token(entry: object, make: Any, *, special: bool) -> Any | None:
    """The token of either form, a text or an object with its flags; None for anything else."""
    if isinstance(entry, str):
        return make(entry, special=special)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
    return make(entry["content"], **(flags | ({"special": True} if special else {})))


def _flags(token: Any) -> tuple[object, ...]:
    return (token.content, *(getattr(token, name) for name in _FLAGS))
