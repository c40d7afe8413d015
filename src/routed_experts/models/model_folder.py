"""ModelFolder: a checkpoint folder whose config is read and whose tensors are checked, and the model loaded from it.

An architecture that models/registry.py does not list is refused with the list of those that it does."""

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.models.base.config_reader import ConfigReader, parse_architecture, read_config, read_json_object
from routed_experts.models.base.quantization_config import METHODS, QuantizationConfig
from routed_experts.models.base.weight_format import placed
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig, weight_sources
from routed_experts.models.drafts.predictor import Predictor
from routed_experts.models.drafts.predictor_loader import check_predictor, load_predictor
from routed_experts.models.loading.checkpoint import Checkpoint, check
from routed_experts.models.loading.dummy_weights import dummy_model
from routed_experts.models.loading.fused_experts import fuse_experts
from routed_experts.models.loading.quantized_checkpoint import open_quantized
from routed_experts.models.loading.virtual_tensors import VirtualCheckpoint
from routed_experts.models.loading.weight_loader import load_module
from routed_experts.models.registry import FAMILIES, Family
from routed_experts.models.sharding import ModelSharding

LOAD_FORMATS = ("auto", "dummy")
# Tensors that checkpoints carry although they follow from the config, or repeat another.
_UNUSED = ("*rotary_emb.inv_freq",)
_HEAD = "*lm_head.weight"
_ALWAYS_PLAIN = ("embed", "router")  # arrays
_COMPARED_BYTES = 16 << 20  # of a tied head, at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A checkpoint whose config has been read and whose tensors have been checked; no weight is loaded yet. Without
    `checkpoint` the weights are to be random ones (load_format "dummy"), and config.json is all that the folder
    needs."""

    path: Path
    architecture: str
    family: Family
    config: FamilyConfig
    checkpoint: Checkpoint | None
    sources: tuple[WeightSource, ...]
    expert_sources: tuple[Checkpoint, tuple[WeightSource, ...]] | None = None  # another folder of experts
    quantization: QuantizationConfig | None = None
    quantized: frozenset[str] = frozenset()  # names of the tensors that are stored so

    @staticmethod
    def open(path: str | Path, *, load_format: str = "auto") -> "ModelFolder":
        """Read config.json and, unless `load_format` is "dummy", the tensors' headers. Raises CheckpointError naming
        everything that does not fit, and ConfigError for another format."""
        if load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format={load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}")
        accepted = {name: family.accepted_quirks for name, family in FAMILIES.items()}
        values = read_config(path, architectures=accepted, quantization=METHODS)
        architecture = parse_architecture(values)
        family = FAMILIES[architecture]
        config = family.read_config(ConfigReader(values, Path(path) / "config.json"))
        if load_format == "dummy":
            return ModelFolder(
                path=Path(path), architecture=architecture, family=family, config=config, checkpoint=None, sources=()
            )
        quantization = QuantizationConfig.read(path, values)
        checkpoint, quantized = _open_checkpoint(path, family, quantization)
        sources = tuple(fuse_experts(weight_sources(config), checkpoint.names()))
        unused = (*_UNUSED, *config.unused(checkpoint.names()))
        check(sources, checkpoint, ignore=(*unused, _HEAD) if config.tie_embeddings else unused)
        _check_plain(checkpoint, sources, quantized)
        if config.tie_embeddings:
            _check_tied(checkpoint, sources)
        return ModelFolder(
            path=Path(path),
            architecture=architecture,
            family=family,
            config=config,
            checkpoint=checkpoint,
            sources=sources,
            quantization=quantization,
            quantized=quantized,
        )

    def dtype(self, expected: str) -> jnp.dtype:
        """The compute dtype: `expected`, or with "auto" the one that most bytes of the model's tensors have (bfloat16
        without them); quantised ones do not count. Tensors of another dtype are cast as they are loaded; routing
        parameters are always float32."""
        if expected != "auto":
            return jnp.dtype(expected)
        if self.checkpoint is None:
            return jnp.dtype("bfloat16")
        headers, sizes = self.checkpoint.names(), Counter[str]()
        names = [source.name for source in self.sources if source.name in headers]
        for shape, dtype in (headers[name] for name in names if name not in self.quantized):
            sizes[dtype] += math.prod(shape) * jnp.dtype(dtype).itemsize
        return jnp.dtype(max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16"))

    def stored_form(self, dtype: jnp.dtype) -> tuple[int, str]:
        """Bytes of a quantised checkpoint, its formats and the served dtype in words; (0, "") for plain weights."""
        if self.checkpoint is None or self.quantization is None:
            return 0, ""
        return self.checkpoint.num_bytes, f"{self.quantization}, served as {dtype}"

    def with_experts_from(self, path: str | Path, targets: Callable[[str], bool]) -> "ModelFolder":
        """The same model, with tensors read from another folder where `targets` holds for their target. Raises
        CheckpointError naming tensors that are missing there or have another shape."""
        if self.checkpoint is None:
            raise ConfigError(
                f"kt_weight_path={str(path)!r} with load_format='dummy', which reads no weight; leave one of them out"
            )
        file = Path(path) / "config.json"
        quantization = QuantizationConfig.read(path, read_json_object(file)) if file.exists() else None
        right = _open_checkpoint(path, self.family, quantization)[0]
        expected = tuple(
            fuse_experts(filter(lambda source: targets(source.target), weight_sources(self.config)), right.names())
        )
        check(expected, right, ignore=("*",))
        sources = tuple(source for source in self.sources if not targets(source.target))
        return dataclasses.replace(self, sources=sources, expert_sources=(right, expected))

    def load(
        self,
        dtype: jnp.dtype,
        *,
        progress: Callable[[int, int], None] | None = None,
        device_for: Callable[[str], Any] = lambda target: None,
        shards: ModelSharding | None = None,
    ) -> FamilyDecoder:
        """Load every tensor and return the model; `progress(bytes read, total bytes)`. `device_for` maps the dotted
        name of an array to its device; None: the default one. With `shards` each device reads its own part
        instead, and the arrays are global: the model runs only under shard_map."""
        if self.checkpoint is None:
            put_array = (lambda _, array: placed(array)) if shards is None else shards.put_array
            return dummy_model(self._build(dtype), device_for=device_for, put_array=put_array)
        parts = [(self.checkpoint, self.sources), *([] if self.expert_sources is None else [self.expert_sources])]
        return load_module(self._build(dtype), parts, progress=progress, device_for=device_for, shards=shards)

    def check_predictor(self) -> None:
        """Check the tensors of the layers that predict further tokens. Raises ConfigError where there are none, and
        CheckpointError naming everything that does not fit."""
        check_predictor(self.config, self.checkpoint)

    def load_predictor(
        self,
        dtype: jnp.dtype,
        *,
        num_drafts: int = 1,
        progress: Callable[[int, int], None] | None = None,
        device_for: Callable[[str], Any] = lambda target: None,
        shards: ModelSharding | None = None,
    ) -> Predictor:
        """Load the layers that predict further tokens, for chains of `num_drafts`; errors of `check_predictor`, other
        arguments as for `load`. `shards` are made of `predictor_partitions`."""
        return load_predictor(
            self.config,
            self.checkpoint,
            dtype,
            num_drafts=num_drafts,
            progress=progress,
            device_for=device_for,
            shards=shards,
        )

    def shapes(self, dtype: jnp.dtype) -> nnx.State[Any, Any]:
        """Names, shapes and dtypes of the model's arrays; nothing is loaded."""
        return nnx.split(nnx.eval_shape(self._build(dtype)))[1]

    def _build(self, dtype: jnp.dtype) -> Callable[[], FamilyDecoder]:
        return lambda: FamilyDecoder(self.config, rngs=nnx.Rngs(0), dtype=dtype)


def _open_checkpoint(
    path: str | Path, family: Family, quantization: QuantizationConfig | None
) -> tuple[Checkpoint, frozenset[str]]:
    """The tensors as the family's table names them, and the names of those that are stored quantised."""
    checkpoint, quantized = Checkpoint(path), frozenset[str]()
    if quantization is not None:
        checkpoint, quantized = open_quantized(checkpoint, quantization)
    virtual = family.virtual_tensors(checkpoint.names())
    return (VirtualCheckpoint(checkpoint, virtual) if virtual else checkpoint), quantized


def _check_plain(checkpoint: Checkpoint, sources: Iterable[WeightSource], quantized: Collection[str]) -> None:
    """Raise where embeddings or a router are quantised: no method does it, and ids would change."""
    for source in sources:
        if source.name in quantized and source.target.rpartition(".")[2] in _ALWAYS_PLAIN:
            raise CheckpointError(
                f"{checkpoint.path}: {source.name} is quantised; expected plain embeddings and routers; use another "
                "checkpoint"
            )


def _check_tied(checkpoint: Checkpoint, sources: Iterable[WeightSource]) -> None:
    """Raise where the config ties the head to the embeddings, but the checkpoint has a head of other numbers."""
    embed = next(source for source in sources if source.target == "embed")
    for head in fnmatch.filter(checkpoint.names(), _HEAD):
        shape = checkpoint.names()[head][0]
        if shape != embed.shape or not _same(checkpoint, embed.name, head, shape):
            raise CheckpointError(
                f"{checkpoint.path}: config.json says tie_word_embeddings=true, but {head} differs from {embed.name}; "
                "expected the same "
                "numbers or no head; set tie_word_embeddings to false, or remove the tensor"
            )


def _same(checkpoint: Checkpoint, left: str, right: str, shape: tuple[int, ...]) -> bool:
    """Whether two matrices hold the same numbers, read in blocks of rows."""
    rows = max(1, _COMPARED_BYTES // (4 * shape[1]))
    boxes = ((slice(first, min(first + rows, shape[0])), slice(0, shape[1])) for first in range(0, shape[0], rows))
    return all(
        np.array_equal(*(checkpoint.read(name, box).astype(np.float32) for name in (left, right)), equal_nan=True)
        for box in boxes
    )
