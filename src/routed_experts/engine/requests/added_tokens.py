"""Tokens that a checkpoint's other files add to its tokenizer.json: each is one token wherever a text spells it out.

transformers adds them when it loads a tokenizer, in this order: those of `added_tokens_decoder` whose flags
tokenizer.json does not have, the named special tokens, and other special tokens. A token of the vocabulary keeps its
id; a new one gets the next id."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.config_reader import read_json_object

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_OTHERS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_tokenizer_settings(folder: Path) -> dict[str, object]:
    """Return tokenizer_config.json, with the special tokens of special_tokens_map.json where it lists no added tokens;
    empty without files. Raises CheckpointError for a file that is no JSON object."""
    file, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    settings = read_json_object(file) if file.exists() else {}
    if "added_tokens_decoder" not in settings and older.exists():
        settings |= {name: token for name, token in read_json_object(older).items() if name in (*_NAMED, *_OTHERS)}
    return settings


def add_tokens(backend: Any, settings: Mapping[str, object], file: Path, *, make: Any) -> None:
    """Add the tokens of `settings` to a tokenizer of the library `tokenizers`; `make` is its AddedToken, and `file` is
    named in errors. Raises CheckpointError for tokens of another form, and for an eos_token that is in no file: no
    sequence would end with it."""
    present = {_flags(token) for token in backend.get_added_tokens_decoder().values()}
    added = [token for token in _listed(settings, file, make) if _flags(token) not in present]
    texts = {token.content for token in (*backend.get_added_tokens_decoder().values(), *added)}
    eos = _token(settings.get("eos_token"), make, special=True)
    if eos is not None and eos.content not in texts and backend.token_to_id(eos.content) is None:
        raise CheckpointError(f"{file}: eos_token {eos.content!r} is not in tokenizer.json; correct the name")
    for token in _special(settings, make):
        if token.content not in texts:
            texts.add(token.content)
            added.append(token)
    named = {token.content for token in _special(_only_named(settings), make)}
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


def _special(settings: Mapping[str, object], make: Any) -> Iterator[Any]:
    """The named special tokens, those of a model's own names such as image_token too, then the others."""
    entries = [settings.get(name) for name in _NAMED]
    entries += [entry for name, entry in settings.items() if name.endswith("_token") and name not in _NAMED]
    for name in _OTHERS:
        others = settings.get(name)
        entries += others.values() if isinstance(others, dict) else others if isinstance(others, list) else ()
    for entry in entries:
        if (token := _token(entry, make, special=True)) is not None:
            yield token


def _only_named(settings: Mapping[str, object]) -> Mapping[str, object]:
    return {name: entry for name, entry in settings.items() if name not in _OTHERS}


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
