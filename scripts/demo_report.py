"""What the demo model learned: held-out loss by domain, how its experts are used, and samples. Dims: B sequences, S
tokens of a sequence, M MoE layers, K experts per token, E experts, V vocabulary, T tokens in all."""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import demo_tokenizer
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt
from tokenizers import Tokenizer

from routed_experts.models.base.interface import Decoder
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import forward

LENGTH, BATCH = 512, 4
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 7 plus 8?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a Python function that reverses a list.<|im_end|>\n<|im_start|>assistant\n",
    "CHAPTER 7. The",
    "The whale",
    "Mr. President, the state of our",
    "ROSALIND: ",
    "def first(items):\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusText:
    """One document of corpus.jsonl."""

    domain: str
    held_out: bool
    text: str


def read(path: Path) -> list[CorpusText]:
    """Read corpus.jsonl."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [CorpusText(domain=row["domain"], held_out=row["split"] == "validation", text=row["text"]) for row in rows]


def encode(tokenizer: Tokenizer, text: str) -> Int[np.ndarray, " S"]:
    """Token ids of one document, ended by the end-of-text token."""
    return np.array([*tokenizer.encode(text).ids, tokenizer.token_to_id(demo_tokenizer.END_OF_TEXT)], np.int32)


def entropy(load: Float[np.ndarray, "... E"]) -> Float[np.ndarray, "..."]:
    """-sum p ln p / ln E: 1 when all experts are used alike, 0 when one does everything."""
    share = load / load.sum(axis=-1, keepdims=True)
    return -np.sum(np.where(share > 0, share * np.log(np.maximum(share, 1e-30)), 0.0), axis=-1) / np.log(load.shape[-1])


def mutual_information(labels: Int[np.ndarray, " T"], ids: UInt[np.ndarray, "T K"], num_experts: int) -> float:
    """I(label; expert) in nats of a random slot, from counts (an over-estimate on few tokens: compare with shuffled
    labels)."""
    joint = np.zeros((int(labels.max()) + 1, num_experts))
    np.add.at(joint, (np.repeat(labels, ids.shape[1]), ids.reshape(-1)), 1.0)
    joint /= joint.sum()
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    return float(np.sum(joint[joint > 0] * np.log(joint[joint > 0] / apart[joint > 0])))


def score(
    model: Decoder, streams: dict[str, Int[np.ndarray, " S"]]
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each domain: its input tokens [T], the loss of the next token [T], and the executed ids [T M K]."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: nnx.State, tokens: Int[Array, "B S1"]) -> tuple[Float[Array, "B S"], UInt[Array, "B S M K"]]:
        out = forward(nnx.merge(graph, state), tokens[:, :-1], return_routed=True)
        assert out.ids is not None
        chosen = jnp.take_along_axis(jax.nn.log_softmax(out.logits), tokens[:, 1:, None], axis=-1)[..., 0]
        return -chosen, out.ids

    scored = {}
    for domain, stream in streams.items():
        rows = [stream[start : start + LENGTH + 1] for start in range(0, len(stream) - LENGTH, LENGTH)]
        rows = rows[: len(rows) // BATCH * BATCH]
        parts = [run(state, jnp.asarray(np.stack(rows[i : i + BATCH]))) for i in range(0, len(rows), BATCH)]
        tokens = np.concatenate([row[:-1] for row in rows])
        losses = np.concatenate([np.asarray(loss).reshape(-1) for loss, _ in parts])
        scored[domain] = (
            tokens,
            losses,
            np.concatenate([np.asarray(ids).reshape(-1, *ids.shape[2:]) for _, ids in parts]),
        )
    return scored


def sampler(model: Decoder, length: int = 256) -> Callable[[list[int], float, int], list[int]]:
    """Plain sampling by whole forwards over a padded row: slow and simple, with no cache."""
    graph, state = nnx.split(model)

    @jax.jit
    def next_logits(state: nnx.State, tokens: Int[Array, "1 S"], last: Int[Array, ""]) -> Float[Array, " V"]:
        return forward(nnx.merge(graph, state), tokens).logits[0, last]

    def sample(prompt: list[int], temperature: float, seed: int) -> list[int]:
        rng, tokens = np.random.default_rng(seed), list(prompt)
        while len(tokens) < min(length, len(prompt) + 90):
            padded = np.zeros((1, length), np.int32)
            padded[0, : len(tokens)] = tokens
            logits = np.asarray(next_logits(state, jnp.asarray(padded), jnp.int32(len(tokens) - 1)), np.float64)
            chance = np.exp((logits - logits.max()) / temperature)
            tokens.append(int(rng.choice(len(chance), p=chance / chance.sum())))
            if tokens[-1] >= demo_tokenizer.VOCAB_SIZE - len(demo_tokenizer.SPECIALS):
                break
        return tokens[len(prompt) :]

    return sample


def report(folder: Path, held_out: Iterable[CorpusText]) -> None:
    """Print the tables of docs/demo-model.md and one sample a prompt, from the written folder (bfloat16 weights,
    float32 arithmetic)."""
    model, tokenizer = (
        ModelFolder.open(folder).load(jnp.dtype("float32")),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    spec = model.config.capture_spec
    assert spec is not None, folder
    grouped: dict[str, list[CorpusText]] = defaultdict(list)
    for document in held_out:
        grouped[document.domain].append(document)
    streams = {domain: np.concatenate([encode(tokenizer, d.text) for d in group]) for domain, group in grouped.items()}
    scored = score(model, streams)
    for domain, (tokens, losses, _) in scored.items():
        num_bytes = len(tokenizer.decode(tokens.tolist(), skip_special_tokens=False).encode())
        bits = losses.sum() / np.log(2) / num_bytes
        print(f"{domain:8s} {len(tokens):7,d} tokens  loss {losses.mean():.3f} nats a token  {bits:.3f} bits a byte")
    tokens, losses, ids = (np.concatenate([part[i] for part in scored.values()]) for i in range(3))
    domains = np.concatenate([np.full(len(part[0]), i) for i, part in enumerate(scored.values())])
    print(f"all      {len(tokens):7,d} tokens  loss {losses.mean():.3f} nats a token")
    print("layer  entropy of load  max load / mean  least used  I(token; expert)  shuffled  I(domain; expert)")
    experts, rng = spec.num_experts, np.random.default_rng(0)
    for column, layer in enumerate(spec.layer_ids):
        picked = ids[:, column]
        load = np.bincount(picked.reshape(-1), minlength=experts).astype(float)
        about, chance = (
            mutual_information(tokens, picked, experts),
            mutual_information(rng.permutation(tokens), picked, experts),
        )
        print(
            f"{layer:5d}  {entropy(load):15.4f}  {load.max() / load.mean():15.2f}  {load.min() / load.mean():10.2f}  "
            f"{about:16.3f}  {chance:8.3f}  {mutual_information(domains, picked, experts):17.3f}"
        )
    sample = sampler(model)
    for number, prompt in enumerate(PROMPTS):
        print(f"--- {prompt!r}\n{tokenizer.decode(sample(tokenizer.encode(prompt).ids, 0.7, number))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("demo-output/corpus"), help="folder of corpus.jsonl")
    parser.add_argument("--model", type=Path, default=Path("src/routed_experts/demo_model"), help="folder to report on")
    options = parser.parse_args()
    held_out = [document for document in read(options.corpus / "corpus.jsonl") if document.held_out]
    report(options.model, held_out)


if __name__ == "__main__":
    main()
