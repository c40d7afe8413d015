"""A model as the tensors of a Hugging Face checkpoint: the inverse of loading, by the same table of names."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.models.base.weight_source import WeightSource


def hugging_face_tensors(
    model: nnx.Module, sources: Iterable[WeightSource], dtype: str = "bfloat16"
) -> dict[str, np.ndarray]:
    """Every tensor of the table under its name there, in `dtype`, on the host; `checkpoint.save` writes them. Experts
    of GPT-OSS and Qwen3-VL-MoE, whose checkpoints loading reads through other tensors (virtual_tensors.py), are those
    tensors: [E, O, I], and of GPT-OSS gate and up apart. Raises ValueError where the table does not fit the model's
    arrays."""
    leaves = nnx.to_flat_state(nnx.state(model))
    if any(leaf.get_metadata("quantized", False) for _, leaf in leaves):
        raise ValueError("the model's matrices are codes; export the weights of the trainer, or of quantization='none'")
    arrays = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}
    tensors: dict[str, np.ndarray] = {}
    for source in sources:
        box = (slice(first, first + size) for first, size in zip(source.start, source.placed_shape, strict=True))
        array = arrays[source.target][tuple(box)]
        array = array.reshape(array.shape[len(source.index) :])
        array = np.swapaxes(array, -1, -2) if source.transpose else array
        tensors[source.name] = np.ascontiguousarray(array).astype(jnp.dtype(dtype))
        if tensors[source.name].shape != source.shape:
            raise ValueError(
                f"{source.name} has shape {tensors[source.name].shape}, expected {source.shape}; correct the table "
                "of names"
            )
    return tensors
