"""A model as the tensors of a Hugging Face checkpoint: the inverse of loading, by the same table of names."""

from collections import Counter
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.models.base.weight_source import StoredEntries, WeightSource


def hugging_face_tensors(
    model: nnx.Module, sources: Iterable[WeightSource], dtype: str = "bfloat16"
) -> dict[str, np.ndarray]:
    """Every tensor of the table as files hold it, on the host; `checkpoint.save` writes them. Arrays that a model keeps
    in float32 whatever its dtype (selection biases, decays; `ParamSpec.wide`) stay float32: rounded, they choose other
    experts. All others have `dtype`. Name it as `dtype` in config.json, or transformers' dtype="auto" takes that of the
    first tensor. Raises ValueError where the table does not fit the model's arrays."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}
    if any(leaf.get_metadata("quantized", False) for leaf in leaves.values()):
        raise ValueError("the model's matrices are codes; export the weights of the trainer, or of quantization='none'")
    arrays = {name: np.asarray(leaf[...]) for name, leaf in leaves.items()}
    tensors: dict[str, np.ndarray] = {}
    written: Counter[str] = Counter()  # entries, by tensor
    for source in sources:
        array = _placed(arrays[source.target], source)
        entries = source.stored or StoredEntries(name=source.name)
        if entries.name not in tensors:
            is_wide = leaves[source.target].get_metadata("wide", False)
            own_dtype = jnp.dtype(jnp.float32) if is_wide else jnp.dtype(dtype)
            tensors[entries.name] = np.zeros(entries.stored_shape(source.shape), own_dtype)
        entries.view(tensors[entries.name])[...] = array
        written[entries.name] += array.size
    for name, tensor in tensors.items():
        if written[name] != tensor.size:
            text = f"{name} has {tensor.size} entries, and the table fills {written[name]}; correct the table of names"
            raise ValueError(text)
    return tensors


def _placed(array: np.ndarray, source: WeightSource) -> np.ndarray:
    """The tensor of a row of the table, in the order of its axes there, from the array that it belongs to."""
    box = (slice(first, first + size) for first, size in zip(source.start, source.placed_shape, strict=True))
    part = array[tuple(box)]
    part = part.reshape(part.shape[len(source.index) :])
    part = np.swapaxes(part, -1, -2) if source.transpose else part
    if part.shape != source.shape:
        raise ValueError(f"{source.name} has shape {part.shape}, expected {source.shape}; correct the table of names")
    return part
