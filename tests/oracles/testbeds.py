"""The tiny MoE as an engine core beside its NumPy oracle; built once a process, because compiled programs are shared.

A testbed has no state between tests: every drive has pages, store and queue of its own."""

import dataclasses
import functools
import tempfile

import numpy as np
from flax import nnx

from oracles.driver import Bench
from oracles.full_sequence import FullSequence
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.model_folder import ModelFolder
from support.tiny_checkpoint import VOCAB_SIZE, tiny_config, tiny_tensors

SIZES = dict(page_size=4, context_length=96, precompile_bs_paddings=(8,), precompile_token_paddings=(32,))


@dataclasses.dataclass(frozen=True)
class CoreTestbed:
    """A compiled core and the whole-sequence oracle of the same weights."""

    bench: Bench
    oracle: FullSequence
    config: dict

    def drive(self, **options):
        return self.bench.drive(**options)


def tiny_testbed(*, config=(), **args):
    """The tiny MoE; `config` are (key, value) pairs of config.json, `args` fields of ServerArgs beside or instead of
    SIZES."""
    return _testbed(tuple(config), tuple(sorted({**SIZES, **args}.items())))


@functools.cache
def _testbed(overrides, args):
    config = tiny_config(**dict(overrides))
    tensors = tiny_tensors(config)
    return CoreTestbed(Bench(build_model(config, tensors), **dict(args)), FullSequence(config, tensors), config)


def build_model(config, tensors):
    """These tensors as a module, by way of a checkpoint folder, as users load theirs."""
    with tempfile.TemporaryDirectory() as folder:
        opened = ModelFolder.open(
            save(folder, config, {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()})
        )
        return opened.load(opened.dtype("auto"))


def build_state(tensors):
    """Tensors of the tiny MoE as `update_weights` takes them."""
    return nnx.split(build_model(tiny_config(), tensors))[1]


@functools.cache
def other_oracle(seed):
    """A tiny MoE that routes otherwise."""
    return FullSequence(tiny_config(), tiny_tensors(tiny_config(), seed=seed))


@functools.cache
def other_weights(seed):
    """The weights of `other_oracle`."""
    return build_state(other_oracle(seed).tensors)


@functools.cache
def wide_margin_oracle():
    """A tiny MoE whose routers leave no doubt: the scores of two neighbours in rank are more than 1e-2 apart.

    The first E components of the stream are a permutation of E levels, one permutation a token. No layer writes to
    them, and router l reads nothing else, in an order of its own."""
    config = tiny_config()
    experts, rng, tensors = config["num_experts"], np.random.default_rng(5), tiny_tensors(config)
    codes = rng.permuted(np.tile(np.arange(experts) - (experts - 1) / 2, (config["vocab_size"], 1)), axis=1)
    for name, tensor in tensors.items():
        if name == "model.embed_tokens.weight":
            tensor[:, :experts] = codes / 2
        elif name.endswith((".o_proj.weight", ".down_proj.weight")):
            tensor[:experts] = 0
        elif name.endswith(".post_attention_layernorm.weight"):
            tensor[:experts] = 1
        elif name.endswith(".mlp.gate.weight"):
            tensor[:] = 0
            tensor[np.arange(experts), rng.permutation(experts)] = 2
    return FullSequence(config, tensors)


def random_prompt(rng, length):
    """Token ids."""
    return rng.integers(0, VOCAB_SIZE, size=length).astype(np.int32)
