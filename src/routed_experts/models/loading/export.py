"""A model as the tensors of a Hugging Face checkpoint: loading by the model's table of names, turned round. Knows no
files."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.models.families.qwen3_moe import Qwen3Moe


def hugging_face_tensors(model: Qwen3Moe, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """Every tensor under its Hugging Face name, in `dtype`, on the host; `models.checkpoint.save` writes them. Raises
    ValueError where the table of names does not fit the arrays."""
    arrays = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    tensors: dict[str, np.ndarray] = {}
    for source in Qwen3Moe.weight_sources(model.config):
        piece = arrays[source.target][source.index] if source.index else arrays[source.target]
        width = source.shape[-2] if source.transpose else source.shape[-1]
        piece = piece[..., source.offset : source.offset + width]
        tensors[source.name] = np.ascontiguousarray(piece.T if source.transpose else piece).astype(jnp.dtype(dtype))
        if tensors[source.name].shape != source.shape:
            raise ValueError(
                f"{source.name} came out as {tensors[source.name].shape}, wanted {source.shape}; correct the table of names"
            )
    return tensors
