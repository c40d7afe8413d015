"""Arrays of a model whose layers are in blocks of one config, in the blocks of another config of the same layers. Where
a checkpoint leaves some layers plain, those of codes are blocks of their own, and a block whose stack kernels cannot
read is cut; a trainer's module has them together."""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from routed_experts.models.decoder.family_config import FamilyConfig

_Location = tuple[str, int, int]  # the block and position in its pattern as a path, the repeat, and how many there are


def is_grouped_alike(left: FamilyConfig, right: FamilyConfig) -> bool:
    """Whether the blocks of two configs hold the same layers."""
    shapes = ([(run.first, len(run.pattern), run.repeats) for run in config.blocks] for config in (left, right))
    return next(shapes) == next(shapes)


def regroup(arrays: Mapping[str, Any], source: FamilyConfig, target: FamilyConfig) -> dict[str, Any]:
    """Arrays by dotted path, from the blocks of `source` to those of `target`; arrays outside of layers as they are.
    Layers that are neighbours in both stay one slice. Arrays that `source` does not have are left out."""
    if is_grouped_alike(source, target):
        return dict(arrays)
    locations = _locations(source)
    regrouped = {name: array for name, array in arrays.items() if not name.startswith("blocks.")}
    by_layer = sorted(_locations(target).items())
    for path in dict.fromkeys(location[0] for _, location in by_layer):
        layers = [locations[layer] for layer, location in by_layer if location[0] == path]
        prefix = f"{layers[0][0]}."
        for name in [name for name in arrays if name.startswith(prefix)]:
            last = name.removeprefix(prefix)
            parts = [_rows(arrays, last, run) for run in _neighbours(layers)]
            regrouped[f"{path}.{last}"] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return regrouped


def coded_everywhere(source: FamilyConfig, target: FamilyConfig) -> frozenset[str]:
    """The arrays of the blocks of `source` that are codes in `target` in each of their layers, by dotted path."""
    by_path: dict[str, list[frozenset[str]]] = defaultdict(list)
    for layer, (path, _, _) in _locations(source).items():
        by_path[path].append(frozenset(array.name for array in target.layers[layer].coded))
    return frozenset(f"{path}.{name}" for path, layers in by_path.items() for name in frozenset.intersection(*layers))


def _locations(config: FamilyConfig) -> dict[int, _Location]:
    """Where each layer is."""
    return {
        run.first + repeat * len(run.pattern) + kind: (f"blocks.{number}.{kind}", repeat, run.repeats)
        for number, run in enumerate(config.blocks)
        for kind in range(len(run.pattern))
        for repeat in range(run.repeats)
    }


def _neighbours(locations: list[_Location]) -> list[list[_Location]]:
    """Runs of repeats of one path that follow each other."""
    numbered = enumerate(locations)
    return [
        [location for _, location in group]
        for _, group in itertools.groupby(numbered, key=lambda item: (item[1][0], item[1][1] - item[0]))
    ]


def _rows(arrays: Mapping[str, Any], last: str, run: list[_Location]) -> Array:
    """The rows of some repeats."""
    path, first, repeats = run[0]
    array = arrays[f"{path}.{last}"]
    size = array.shape[0] // repeats
    return array if len(run) == repeats else array[first * size : (first + len(run)) * size]
