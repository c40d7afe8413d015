"""Training through the grid of quantised rollouts: the numbers of an engine with `quantization="fp8_block"`, with the
gradients of the plain ones. Rollout and trainer then multiply by the same weights."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from routed_experts.core.errors import InvalidRequestError
from routed_experts.layers.quantized import E4M3, through_grid
from routed_experts.models.decoder.code_selection import CodeSupport, select_codes
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig


def quantised(state: nnx.State[Any, Any], config: FamilyConfig) -> nnx.State[Any, Any]:
    """The state of a FamilyDecoder of this config, whose matrices hold the numbers that an engine serves after
    `update_weights(state)`. Call it inside the loss: gradients pass to `state` as they are (straight-through), and the
    result is not stored. The numbers of a float32 state are exact; those of bfloat16 are rounded once more.

        graphdef, state = nnx.split(model)
        def loss(state):
            return ... replay.forward(nnx.merge(graphdef, replay.quantised(state, model.config)), batch)

    Raises InvalidRequestError for a state that is not of this config."""
    coded = select_codes(config, {}, (), CodeSupport(formats=frozenset({E4M3}), quantizes=True)).coded_arrays
    leaves: Mapping[str, tuple[tuple[Any, ...], Any]] = {
        ".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)
    }
    missing = [name for name in coded if name not in leaves]
    if missing:
        raise InvalidRequestError(
            f"state has no {missing[0]}; give the state of a {FamilyDecoder.__name__} with this config", param="state"
        )
    return nnx.from_flat_state(
        [
            (path, leaf.replace(through_grid(leaf[...], coded[name].segments)) if name in coded else leaf)
            for name, (path, leaf) in leaves.items()
        ]
    )
