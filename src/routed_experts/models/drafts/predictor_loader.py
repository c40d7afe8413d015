"""Loads a Predictor from the folder of its target: the table of names, its checks, and the arrays."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
from flax import nnx

from routed_experts.core.errors import ConfigError
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.base.weight_format import placed
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.family_config import FamilyConfig, PredictorSpec
from routed_experts.models.drafts.predictor import ARRAYS, Predictor
from routed_experts.models.loading.checkpoint import Checkpoint, check
from routed_experts.models.loading.dummy_weights import dummy_model
from routed_experts.models.loading.fused_experts import fuse_experts
from routed_experts.models.loading.weight_loader import load_module

_UNUSED = ("*rotary_emb.inv_freq",)  # a tensor that follows from the config
_LISTED = 4  # names in an error
_OFFER = "choose speculative_algorithm NGRAM"


def predictor_sources(
    config: FamilyConfig, names: Collection[str], num_modules: int | None = None
) -> tuple[WeightSource, ...]:
    """The table of names of the first `num_modules` modules, None for all. `names`: of the checkpoint's tensors, which
    show how its experts are stored."""
    spec = _served(config)
    spec = spec if num_modules is None else dataclasses.replace(spec, num_modules=num_modules)
    return tuple(fuse_experts(spec.sources(config, ARRAYS), names))


def num_served_modules(config: FamilyConfig, num_drafts: int) -> int:
    """Modules that chains of `num_drafts` run: one for each draft where there are as many, else the first alone."""
    count = _served(config).num_modules
    return num_drafts if num_drafts <= count else 1


def check_predictor(config: FamilyConfig, checkpoint: Checkpoint | None) -> None:
    """Check all modules against the checkpoint; None, of random weights: the config alone. Raises ConfigError where
    there is no module of a kind that is served, and CheckpointError naming every missing, unexpected and misshapen
    tensor."""
    spec = _served(config)
    if checkpoint is None:
        return
    names = checkpoint.names()
    sources = predictor_sources(config, names)
    if not any(source.name in names for source in sources):
        expected = list(dict.fromkeys(source.name for source in sources))
        raise ConfigError(
            f"{checkpoint.path} has no layer that predicts further tokens: of {', '.join(expected[:_LISTED])} and "
            f"{len(expected) - _LISTED} more tensors, none is there; {_OFFER}, or copy the tensors from the published "
            "files"
        )
    check(sources, checkpoint, ignore=(*_UNUSED, *spec.named(*spec.ignored)), among=spec.named(spec.tensors))


def load_predictor(
    config: FamilyConfig,
    checkpoint: Checkpoint | None,
    dtype: jnp.dtype,
    *,
    num_drafts: int = 1,
    progress: Callable[[int, int], None] | None = None,
    device_for: Callable[[str], Any] = lambda target: None,
    shards: ModelSharding | None = None,
) -> Predictor:
    """Load the modules that chains of `num_drafts` run; `check_predictor` comes first. Without a checkpoint their
    weights are random. `device_for`, `progress` and `shards` as in ModelFolder.load."""
    check_predictor(config, checkpoint)
    num_modules = num_served_modules(config, num_drafts)
    make = functools.partial(Predictor, config, dtype=dtype, num_modules=num_modules)
    if checkpoint is None:
        put_array = (lambda _, array: placed(array)) if shards is None else shards.put_array
        return dummy_model(lambda: make(rngs=nnx.Rngs(0)), device_for=device_for, put_array=put_array)
    sources = predictor_sources(config, checkpoint.names(), num_modules)
    return load_module(
        lambda: make(rngs=nnx.Rngs(0)),
        [(checkpoint, sources)],
        progress=progress,
        device_for=device_for,
        shards=shards,
    )


def _served(config: FamilyConfig) -> PredictorSpec:
    """How the modules compute. Raises ConfigError where there are none that are served."""
    spec = config.predictor
    if spec is None:
        looked_for = f"{config.stem}layers.{config.num_layers}.eh_proj.weight, mtp.fc.weight or *.mtp_linear_proj.*"
        counted = f"counts {config.num_predicting} of them" if config.num_predicting else "counts none"
        raise ConfigError(
            f"this model has no layers that predict further tokens of a kind that is served ({looked_for}): its family "
            f"has none, or its config.json {counted}; {_OFFER}"
        )
    if spec.refused:
        raise ConfigError(f"the layers that predict further tokens have {spec.refused}; {_OFFER}")
    return spec
