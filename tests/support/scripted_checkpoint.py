"""A tiny MoE that writes given texts: the way to drive parsers of responses through a real engine, end to end.

Its attention and experts add nothing, so that the next token depends on the last one alone: each piece of a script is a
token of its own, and the head maps it to the piece after it. Its router runs as any other, so rows are recorded. The
prompt ends with the token that names a script."""

import json
import random

import numpy as np
from tokenizers import AddedToken, Tokenizer

from routed_experts.models.loading.checkpoint import save
from support.tiny_checkpoint import EOS_ID, tiny_config, tiny_tensors, write_tiny_tokenizer

_SCALE = 8.0  # of the right logit over those of other tokens


def write_scripted_checkpoint(path, scripts, template, *, special=(), seed=0, **overrides):
    """Write the checkpoint. `scripts`: texts by the name that a prompt ends with, such as `<calls>`; `special`: parts
    of them that are special tokens, each at most once in all scripts."""
    folder = write_tiny_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(seed)
    chains, used = {}, set(tokenizer.get_vocab())
    for name, text in scripts.items():
        chains[name] = [name, *_cut(text, special, used, rng)]
    for chain in chains.values():
        name, *pieces = chain
        tokenizer.add_special_tokens([AddedToken(name, special=True)])
        for piece in pieces:
            add = tokenizer.add_special_tokens if piece in special else tokenizer.add_tokens
            add([AddedToken(piece, special=piece in special, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    config = tiny_config(vocab_size=vocab_size, **overrides)
    tensors = tiny_tensors(config, seed=seed)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = np.zeros_like(tensors[name])
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["model.norm.weight"] = np.ones_like(tensors["model.norm.weight"])
    head = np.zeros_like(tensors["lm_head.weight"])
    for chain in chains.values():
        ids = [tokenizer.token_to_id(piece) for piece in chain]
        assert None not in ids, chain
        for token_id, next_id in zip(ids, [*ids[1:], EOS_ID], strict=True):
            row = embeddings[token_id]
            head[next_id] += _SCALE * row / np.linalg.norm(row)
    tensors["lm_head.weight"] = head
    return save(path, config | {"torch_dtype": "float32"}, tensors)


def _cut(text, special, used, rng):
    """Cut a text into pieces of which none was used before, and add them to `used`."""
    for _ in range(1000):
        pieces = _try_to_cut(text, special, used, rng)
        if pieces is not None:
            used.update(pieces)
            return pieces
    raise AssertionError(f"no pieces of their own for {text!r}")


def _try_to_cut(text, special, used, rng):
    pieces = []
    while text:
        marker = next((marker for marker in special if text.startswith(marker)), None)
        ends = [at for marker in special if (at := text.find(marker)) > 0]
        longest = min([*ends, len(text), 24])
        # A piece of letters outside ASCII needs a space: without one a byte-level tokenizer may read them as bytes.
        lengths = [n for n in range(1, longest + 1) if text[:n].isascii() or " " in text[:n]]
        lengths = [n for n in lengths if text[:n] not in used and text[:n] not in pieces]
        if marker is None and not lengths:
            return None
        pieces.append(marker or text[: rng.choice([n for n in lengths if n > 2] or lengths)])
        text = text[len(pieces[-1]) :]
    return pieces if len(set(pieces)) == len(pieces) and used.isdisjoint(pieces) else None
