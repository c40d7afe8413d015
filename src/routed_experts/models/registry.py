"""How a checkpoint folder becomes a model. Knows nothing of engines, and of architectures what models/families.py lists.

An architecture that is not listed there is refused with the list of those that are."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from routed_experts.core.errors import ConfigError
from routed_experts.models.checkpoint import Checkpoint, WeightSource, check
from routed_experts.models.config_reader import ConfigReader, architecture_of, read_config
from routed_experts.models.dummy_weights import dummy_model
from routed_experts.models.families import FAMILIES, Family
from routed_experts.models.family_config import FamilyConfig
from routed_experts.models.fused_experts import fuse_experts
from routed_experts.models.interface import Decoder
from routed_experts.models.weight_loader import load

LOAD_FORMATS = ("auto", "dummy")
# Tensors that checkpoints carry although they follow from the config, or repeat another (a tied head).
_SURPLUS = ("*rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checkpoint whose config has been read and whose tensors have been checked; no weight is loaded yet. Without `checkpoint`
    the weights are to be random ones (load_format "dummy"), and config.json is all that the folder needs."""

    path: Path
    family: Family
    config: Any
    checkpoint: Checkpoint | None
    sources: tuple[WeightSource, ...]

    @staticmethod
    def open(path: str | Path, *, load_format: str = "auto") -> "ModelFolder":
        """Read config.json and, unless `load_format` is "dummy", the tensors' headers. Raises CheckpointError naming everything that
        does not fit, and ConfigError for another format."""
        if load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format={load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}")
        values = read_config(path, architectures={name: family.tolerated for name, family in FAMILIES.items()})
        family = FAMILIES[architecture_of(values)]
        config = family.read_config(ConfigReader(values, Path(path) / "config.json"))
        if load_format == "dummy":
            return ModelFolder(path=Path(path), family=family, config=config, checkpoint=None, sources=())
        checkpoint = family.open(path)
        sources = tuple(fuse_experts(family.weight_sources(config), checkpoint.names()))
        surplus = (*_SURPLUS, *(config.surplus if isinstance(config, FamilyConfig) else ()))
        check(sources, checkpoint, ignore=(*surplus, "*lm_head.weight") if config.tie_embeddings else surplus)
        return ModelFolder(path=Path(path), family=family, config=config, checkpoint=checkpoint, sources=sources)

    def dtype(self, wanted: str) -> jnp.dtype:
        """The compute dtype: `wanted`, or with "auto" the most common dtype of the checkpoint's tensors (bfloat16 without them)."""
        if wanted != "auto":
            return jnp.dtype(wanted)
        if self.checkpoint is None:
            return jnp.dtype("bfloat16")
        names = [dtype for _, dtype in self.checkpoint.names().values()]
        return jnp.dtype(max(set(names), key=names.count))

    def load(self, dtype: jnp.dtype, *, progress: Callable[[int, int], None] | None = None) -> Decoder:
        """Load every tensor to the device and give the model; `progress(bytes done, bytes in all)`."""
        if self.checkpoint is None:
            return dummy_model(lambda: self.family.build(self.config, rngs=nnx.Rngs(0), dtype=dtype))
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self.family.build(self.config, rngs=nnx.Rngs(0), dtype=dtype)))
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        targets = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flat.items()}
        arrays = load(self.checkpoint, self.sources, targets, progress=progress)
        filled = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
        return nnx.merge(graphdef, nnx.from_flat_state(filled))
