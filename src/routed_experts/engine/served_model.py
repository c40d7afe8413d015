"""The model that an engine serves: as its folder describes it, and as it lies on one device or is dealt out to several.
Knows nothing of steps or pools."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from routed_experts.core.server_args import ServerArgs
from routed_experts.models.cuts import Split
from routed_experts.models.interface import Decoder, DecoderConfig
from routed_experts.models.registry import ModelFolder
from routed_experts.models.shards import Shards


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`config` and `arrays` (names, shapes and dtypes) are of the whole model; `graphdef` and `part` are what one device runs: the same,
    where there is but one (`shards` None)."""

    config: DecoderConfig
    arrays: nnx.State[Any, Any]  # of ShapeDtypeStruct
    graphdef: nnx.GraphDef[Any]
    part: DecoderConfig
    shards: Shards | None

    @staticmethod
    def of(
        config: DecoderConfig, graphdef: nnx.GraphDef[Any], arrays: nnx.State[Any, Any], shards: Shards | None
    ) -> "ServedModel":
        """Deal out a model."""
        if shards is None:
            return ServedModel(config=config, arrays=arrays, graphdef=graphdef, part=config, shards=None)
        module: Any = nnx.merge(graphdef, arrays)
        module.config = config.part(shards.split)
        return ServedModel(config=config, arrays=arrays, graphdef=nnx.split(module)[0], part=module.config, shards=shards)

    @property
    def held(self) -> nnx.State[Any, Any]:
        """Shapes of what one device holds."""
        return self.arrays if self.shards is None else self.shards.part_of(self.arrays)

    def placed(self, state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
        """Whole arrays of this model, to each device its part; on one device as they are."""
        return state if self.shards is None else self.shards.place(state)


def shards_of(args: ServerArgs, config: DecoderConfig) -> Shards | None:
    """How a model is dealt out, None: not at all. Raises ConfigError where it cannot be shared so."""
    return Shards.of(config, Split(args.tp_size, whole_experts=args.ep_size > 1))


def load_model(
    source: ModelFolder | Decoder, config: DecoderConfig, shards: Shards | None, *, dtype: str, progress: Callable[[int, int], None] | None
) -> tuple[ServedModel, nnx.State[Any, Any]]:
    """The model and its arrays where they are served; a folder's go there straight, to each device its part. Raises what
    `ModelFolder.load` raises."""
    if not isinstance(source, ModelFolder):
        graphdef, state = nnx.split(source)
        served = ServedModel.of(config, graphdef, shapes_of(state), shards)
        return served, served.placed(state)
    computed = source.dtype(dtype)
    graphdef, state = nnx.split(source.load(computed, progress=progress, shards=shards))
    arrays = shapes_of(state) if shards is None else source.shapes(computed)
    return ServedModel.of(config, graphdef, arrays, shards), state


def shapes_of(state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """Names, shapes and dtypes of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
