"""A model whose routers prefer some experts in each of two domains of tokens, and prompts of these: for benchmarks that
want skew.

Random weights under Qwen3-30B-A3B's config at a few layers. Domains are halves of the vocabulary: a domain's embeddings
share a direction, along which each router scores its experts by normal noise times `skew`, and the head prefers the
domain that it sees. So what is captured is real routing, of skewed frequencies (0.4 is near what is published of
Qwen3-30B-A3B: the most used 30 % of the experts of a layer run 70 % of its slots)."""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import Prompts
from step import QWEN3_30B_A3B

from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.offload.offloaded_model import is_expert
from routed_experts.scheduling.schedule_batch import Req

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}


@contextlib.contextmanager
def skewed_checkpoint(args: argparse.Namespace) -> Iterator[tuple[dict[str, object], Path, FamilyDecoder]]:
    """The config of a skewed model, its folder and its weights; `args`: layers, dtype, skew and small. Engines of one
    process share their programs by a cache in the folder."""
    config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers} | (SMALL if args.small else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        (folder / "config.json").write_text(json.dumps(config))
        yield config, folder, skewed_model(folder, args.dtype, args.skew)


def skewed_model(folder: Path, dtype: str, skew: float) -> FamilyDecoder:
    """Random weights, experts on the host; a router's score of expert e is moved by its noise in that domain times
    skew."""
    host = jax.devices("cpu")[-1]
    opened = ModelFolder.open(folder, load_format="dummy")
    model = opened.load(jnp.dtype(dtype), device_for=lambda target: host if is_expert(target) else jax.devices()[0])
    assert isinstance(model, FamilyDecoder) and model.head is not None
    embed, head, router = model.embed, model.head, model.blocks[0][0]["router"]
    (vocabulary, dim), (num_layers, _, experts) = embed[...].shape, router[...].shape
    directions = np.stack([np.ones(dim), np.where(np.arange(dim) % 2, 1.0, -1.0)])  # [domains, D], at right angles
    of_token = jnp.asarray(directions[np.arange(vocabulary) // (vocabulary // 2)], embed[...].dtype)  # [V, D]
    embed[...] = embed[...] + of_token
    head[...] = head[...] + (of_token * (10 * 2**0.5 / dim)).T.astype(
        head[...].dtype
    )  # 10 for each token of the domain
    noise = (
        np.random.default_rng(11).standard_normal((num_layers, experts, 2)) * skew * 2**0.5 / dim
    )  # a normed token has 1 / sqrt 2
    along = np.einsum("led,dh->lhe", noise, directions)  # in each dim beside its own noise
    own = np.asarray(router[...], np.float64)  # its own share along the directions would be a popularity, too
    across = own - np.einsum("dh,lde->lhe", directions / dim, np.einsum("dh,lhe->lde", directions, own))
    router[...] = jnp.asarray(across + along, router[...].dtype)
    return model


@dataclasses.dataclass(kw_only=True)
class Domain:
    """Prompts of one half of the vocabulary that were never seen."""

    vocabulary: int
    number: int
    seed: int = 0

    def requests(self, batch: int, **how) -> list[Req]:
        self.seed += 2
        half = self.vocabulary // 2
        sources = [req.source for req in Prompts(self.seed + self.number, half).requests(batch, temperature=1.0, **how)]
        return [
            Req(dataclasses.replace(source, input_ids=source.input_ids + np.int32(self.number * half)))
            for source in sources
        ]


def build_domains(config: dict) -> tuple[Domain, Domain]:
    return tuple(Domain(vocabulary=int(config["vocab_size"]), number=number) for number in (0, 1))
