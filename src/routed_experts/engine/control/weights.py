"""New weights in any form that a trainer has them, as the state that is served. Knows nothing of steps or versions.

A form is an nnx.State, an nnx.Module of the same class, or nested (or dotted) mappings of arrays such as
nnx.to_pure_dict gives."""

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import WeightsMismatchError
from routed_experts.engine.control.served_model import ServedModel
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.replica_maps import with_replica_maps
from routed_experts.models.model_folder import ModelFolder

Weights = nnx.State[Any, Any] | nnx.Module | Mapping[str, Any]
_SHOWN = 4


def state_of(new: Weights, served: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """The served state's tree with the arrays of `new`, which are checked by name, shape and dtype and not copied.
    Raises WeightsMismatchError naming the first paths that differ, or
    those that hold NaN or infinity."""
    given = dict(_leaves(new))
    wanted = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(served)}
    told = {name: (given.get(name), leaf) for name, (_, leaf) in wanted.items()}
    wrong = [f"{name}: {_said(came)} for {_said(leaf)}" for name, (came, leaf) in told.items() if not _fits(came, leaf)]
    wrong += [f"{name}: {_said(leaf)} is not in the model" for name, leaf in given.items() if name not in wanted]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        text = f"{len(wrong)} arrays differ from the served weights: {'; '.join(wrong[:_SHOWN])}{more}"
        raise WeightsMismatchError(f"{text}; give the served names, shapes and dtypes", param="state")
    _refuse_broken(given, param="state")
    return nnx.from_flat_state([(path, leaf.replace(_held(given[name]))) for name, (path, leaf) in wanted.items()])


def load_state(
    path: str | Path, served: ServedModel, *, place: Callable[[str], Any] = lambda name: None
) -> nnx.State[Any, Any]:
    """Load a checkpoint of the served architecture, in the served dtype, to where it is served (on one accelerator and
    its host: where `place` says, by name). Raises WeightsMismatchError where its config.json says another model, and
    what ModelFolder.open raises where there is none that can be read."""
    if not isinstance(path, str | Path):
        raise WeightsMismatchError(
            f"model_path={short_repr(path)} must be the path of a checkpoint folder", param="model_path"
        )
    folder = ModelFolder.open(path, in_parts=isinstance(served.config, FamilyConfig))  # as it is served
    config: Any = served.config
    if folder.config != config:
        there, here = dataclasses.asdict(folder.config), dataclasses.asdict(config)
        names = [name for name in here if name not in there or there[name] != here[name]]
        text = f"model_path={short_repr(str(path))} is another model: its config differs in {', '.join(names[:_SHOWN]) or 'architecture'}"
        raise WeightsMismatchError(f"{text}; build an Engine of its own for it", param="model_path")
    dtype = jnp.result_type(jax.tree.leaves(served.arrays)[0])
    state = nnx.split(folder.load(dtype, shards=served.shards, place=place))[1]
    gc.collect()  # nnx.merge leaves a cycle that holds every array: these would stay beside those that replace them
    _refuse_broken(dict(_leaves(state)), param="model_path")
    return state if served.shards is None else with_replica_maps(state, served.shards.put_maps())


def _refuse_broken(leaves: Mapping[str, object], *, param: str) -> None:
    """Raise WeightsMismatchError where a number is none: with it every token of every request would be lost."""
    broken = [name for name, leaf in leaves.items() if not _is_finite(_held(leaf))]
    if broken:
        more = f" and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        text = f"{len(broken)} arrays hold NaN or infinity: {', '.join(broken[:_SHOWN])}{more}"
        raise WeightsMismatchError(f"{text}; the served weights stay as they are", param=param)


def _is_finite(array: Any) -> bool:
    """Checked where the array lies: on the host without a copy, on an accelerator by a reduction there."""
    there = isinstance(array, jax.Array) and any(device.platform != "cpu" for device in array.devices())
    return bool(jnp.isfinite(array).all()) if there else bool(np.isfinite(np.asarray(array)).all())


def _leaves(new: object) -> Iterator[tuple[str, object]]:
    """Dotted names and arrays, whatever form they came in."""
    if isinstance(new, nnx.Module):
        new = nnx.split(new)[1]
    if isinstance(new, Mapping | nnx.State):  # nnx.to_flat_state leaves a cycle that holds every array
        for name, part in new.items():
            if isinstance(part, Mapping | nnx.State | nnx.Module):
                yield from ((f"{name}.{rest}", leaf) for rest, leaf in _leaves(part))
            else:
                yield str(name), part
    else:
        text = f"state={short_repr(new)} must be an nnx.State, an nnx.Module or a mapping of names to arrays"
        raise WeightsMismatchError(text, param="state")


def _is_array(array: object) -> bool:
    return isinstance(array, jax.Array | np.ndarray) and not isinstance(array, Tracer)


def _fits(given: object, served: Any) -> bool:
    array = _held(given)
    if not _is_array(array) or (isinstance(array, jax.Array) and array.is_deleted()):
        return False
    return (array.dtype, array.shape) == (served.dtype, served.shape)


def _held(leaf: object) -> Any:
    """The array of a leaf without touching it: one that was donated cannot be read."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _said(leaf: object) -> str:
    array = _held(leaf)
    if array is None:
        return "nothing"
    if not _is_array(array) and not isinstance(array, jax.ShapeDtypeStruct):
        return f"no array but {short_repr(array)}"
    donated = "a donated " if isinstance(array, jax.Array) and array.is_deleted() else ""
    return f"{donated}{array.dtype}{list(array.shape)}"
