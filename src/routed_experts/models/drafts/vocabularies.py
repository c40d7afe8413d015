"""The check that a draft model of its own speaks the vocabulary of its target.

Where both folders have a tokenizer.json, each id that both files name must be the same token. Else the sizes must be
equal up to padding: a multiple of a power of two, at most 1,024, above the smaller one."""

from pathlib import Path

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.config_reader import read_json_object

MAX_PADDING = 1024
_FILE = "tokenizer.json"


def check_vocabularies(draft: Path, target: Path | None, *, draft_size: int, target_size: int) -> None:
    """Raise CheckpointError where ids mean other tokens to the draft model. `target`: the folder of the target, if it
    has one; the sizes are those of the configs, padding included."""
    sizes = f"vocab_size={draft_size} of {draft}, and {target_size} of the model"
    if target is not None and all((folder / _FILE).is_file() for folder in (draft, target)):
        own, others = read_tokens(draft / _FILE), read_tokens(target / _FILE)
        common = sorted(own.keys() & others.keys())
        differing = [index for index in common if own[index] != others[index]]
        if differing or not common:
            first = f": {differing[0]} is {own[differing[0]]!r} and {others[differing[0]]!r}" if differing else ""
            raise CheckpointError(
                f"{draft / _FILE} and {target / _FILE} are of two vocabularies: {len(differing)} of {len(common)} ids "
                f"that both have differ{first} ({sizes}); expected a draft model of the same vocabulary"
            )
        return
    if not _is_padded(*sorted((draft_size, target_size))):
        raise CheckpointError(
            f"the draft model is of another vocabulary: {sizes}; expected equal sizes, or equal but for padding to a "
            f"power of two up to {MAX_PADDING}; use a draft model of the same vocabulary"
        )


def read_tokens(file: Path) -> dict[int, str]:
    """The token of each id, as a tokenizer.json has them. Raises CheckpointError."""
    values = read_json_object(file)
    model, added = values.get("model"), values.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[int, str] = {}
    if isinstance(vocabulary, dict):
        tokens = {index: str(token) for token, index in vocabulary.items() if isinstance(index, int)}
    elif isinstance(vocabulary, list):  # Unigram: (token, score) in the order of ids
        tokens = {index: str(entry[0]) for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    if not tokens or not isinstance(added, list):
        raise CheckpointError(
            f"{file} has no model.vocab; expected a tokenizer of the tokenizers library; copy it again"
        )
    for entry in added:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            tokens[entry["id"]] = str(entry.get("content"))
    return tokens


def _is_padded(smaller: int, larger: int) -> bool:
    """Whether the larger size is the smaller one, rounded up to a multiple of a power of two."""
    multiples = [1 << bits for bits in range(MAX_PADDING.bit_length())]
    return any(-(-smaller // multiple) * multiple == larger for multiple in multiples)
