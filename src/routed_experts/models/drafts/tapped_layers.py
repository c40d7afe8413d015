"""Which layers of the target an EAGLE-3 head reads.

Config files list the same streams in two ways. Outputs: id i is the output of layer i; such lists begin with 1.
Boundaries: id i is the input of layer i, the output of layer i - 1, and the number of layers L is the output of the
last one. A wrong reading of the list leaves a head that runs and predicts nothing."""

import logging
from collections.abc import Sequence

from routed_experts.core.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_FIRST_OUTPUT = 1


def tapped_outputs(ids: Sequence[int], num_layers: int, *, where: str) -> tuple[int, ...]:
    """Layers, by their outputs, that the ids of a config name; without ids those that most heads are trained on, with a
    warning. `where`: the config, for errors. Raises CheckpointError where the target has no such layer."""
    if not ids:
        guessed = tuple(boundary - 1 for boundary in (2, num_layers // 2, num_layers - 3))
        if min(guessed) < 0:
            raise CheckpointError(
                f"{where} names no layers of the target, and its {num_layers} layers are too few to guess which; "
                "expected eagle_aux_hidden_state_layer_ids; add it, or set speculative_eagle_layers"
            )
        logger.warning(
            "%s names no layers of the target: guessed the outputs of layers %s of %d; a wrong guess shows as few "
            "accepted drafts; set speculative_eagle_layers to the layers that the head was trained on",
            where,
            ", ".join(map(str, guessed)),
            num_layers,
        )
        return guessed
    outputs = tuple(ids) if ids[0] == _FIRST_OUTPUT else tuple(boundary - 1 for boundary in ids)
    if not all(0 <= output < num_layers for output in outputs):
        meaning = "outputs of layers" if ids[0] == _FIRST_OUTPUT else "inputs of layers"
        raise CheckpointError(
            f"{where}: eagle_aux_hidden_state_layer_ids={list(ids)}, read as {meaning}, names layers that the target "
            f"of {num_layers} layers lacks; expected the head of this target; correct the file, or set "
            "speculative_eagle_layers"
        )
    return outputs


def chosen_outputs(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers that a user chose, by their outputs. Raises ConfigError where the target has no such layer."""
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise ConfigError(
            f"speculative_eagle_layers={list(layers)} must be layers of the target, from 0 to {num_layers - 1}; "
            "each is the layer whose output the head reads"
        )
    return tuple(layers)
