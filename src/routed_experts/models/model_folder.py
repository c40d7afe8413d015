"""ModelFolder: a checkpoint folder whose config is read and whose tensors are checked, and the model loaded from it.

An architecture that models/registry.py does not list is refused with the list of those that it does."""

import dataclasses
import fnmatch
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.core.errors import CheckpointError, ConfigError, WeightsMismatchError
from routed_experts.layers.kv_format import LayerScales
from routed_experts.layers.quantized import E4M3
from routed_experts.models.base.config_reader import (
    ConfigReader,
    check_quantization,
    parse_architecture,
    read_config,
    read_json_object,
)
from routed_experts.models.base.quantization_config import METHODS, QuantizationConfig
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.base.weight_format import placed
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.code_selection import CodeSupport, can_retain, select_codes
from routed_experts.models.decoder.coded_arrays import CodedArray, coded_sources
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig, weight_sources
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.drafts.predictor import Predictor
from routed_experts.models.drafts.predictor_loader import check_predictor, load_predictor
from routed_experts.models.loading.block_quantization import BlockCodes, BlockScales
from routed_experts.models.loading.checkpoint import Checkpoint, check
from routed_experts.models.loading.dummy_weights import dummy_model
from routed_experts.models.loading.fused_experts import fuse_experts
from routed_experts.models.loading.kv_scales import read_kv_scales
from routed_experts.models.loading.model_source import model_path
from routed_experts.models.loading.quantized_checkpoint import (
    GROUP_SCALES,
    NONE_RETAINED,
    QuantizedCheckpoint,
    RetainedCodes,
    open_quantized,
    show_codes,
)
from routed_experts.models.loading.virtual_tensors import (
    CodedTensor,
    VirtualCheckpoint,
    VirtualTensor,
    with_axes_swapped,
)
from routed_experts.models.loading.weight_loader import load_module
from routed_experts.models.registry import FAMILIES, Family

logger = logging.getLogger(__name__)
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
    own_dtype: jnp.dtype | None = None  # before matrices became codes
    stored: Checkpoint | QuantizedCheckpoint | None = None  # before the family's table names its tensors
    quantized_tensors: Mapping[str, CodedTensor] = dataclasses.field(default_factory=dict)  # of the table

    @staticmethod
    def open(path: str | Path, *, load_format: str = "auto") -> "ModelFolder":
        """Read config.json and, unless `load_format` is "dummy", the tensors' headers. `path`: a folder, or "demo", the
        model of the package. Raises CheckpointError naming everything that does not fit, and ConfigError for another
        format."""
        if load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format={load_format!r} is unknown; choose one of {', '.join(LOAD_FORMATS)}")
        path = model_path(path)
        accepted = {name: family.accepted_quirks for name, family in FAMILIES.items()}
        values = read_config(path, architectures=accepted, quantization=METHODS)
        architecture = parse_architecture(values)
        family = FAMILIES[architecture]
        config = family.read_config(ConfigReader(values, path / "config.json"))
        if load_format == "dummy":
            return ModelFolder(
                path=path, architecture=architecture, family=family, config=config, checkpoint=None, sources=()
            )
        quantization = QuantizationConfig.read(path, values)
        quantized = None if quantization is None else open_quantized(Checkpoint(path), quantization)
        stored = quantized or Checkpoint(path)
        checkpoint = _shown(stored, family)
        sources = _sources(config, checkpoint)
        unused = (*_UNUSED, *config.unused(checkpoint.names()))
        check(sources, checkpoint, ignore=(*unused, _HEAD) if config.tie_embeddings else unused)
        if quantized is not None and quantization is not None:
            _check_plain(checkpoint, sources, quantized.matrices)
            _check_targeted(quantized, sources, quantization)
        if config.tie_embeddings:
            _check_tied(checkpoint, sources)
        return ModelFolder(
            path=path,
            architecture=architecture,
            family=family,
            config=config,
            checkpoint=checkpoint,
            sources=sources,
            quantization=quantization,
            stored=stored,
            quantized_tensors=_quantized_tensors(stored, family),
        )

    def dtype(self, expected: str) -> jnp.dtype:
        """The compute dtype: `expected`, or with "auto" the one that most bytes of the model's tensors have (bfloat16
        without them); quantised ones do not count. Tensors of another dtype are cast as they are loaded; routing
        parameters are always float32."""
        if expected != "auto":
            return jnp.dtype(expected)
        if self.own_dtype is not None:
            return self.own_dtype
        if self.checkpoint is None:
            return jnp.dtype("bfloat16")
        headers, sizes = self.checkpoint.names(), Counter[str]()
        names = [source.name for source in self.sources if source.name in headers]
        for shape, dtype in (headers[name] for name in names if name not in self.quantized_tensors):
            sizes[dtype] += math.prod(shape) * jnp.dtype(dtype).itemsize
        return jnp.dtype(max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16"))

    def stored_form(self, dtype: jnp.dtype) -> tuple[int, str]:
        """Bytes of a quantised checkpoint, its formats and the served form in words; (0, "") for plain weights."""
        coded, stored = self.config.coded_arrays, self.quantized_tensors
        if self.checkpoint is None or not (stored or coded):
            return 0, ""
        quantized = len(coded) if not stored else 0
        if quantized:
            form = f"plain, {quantized} arrays of layers served as e4m3 codes (blocks 128 x 128), products in {dtype}"
            return self.checkpoint.num_bytes, form
        retained, total = len(self._retained_tensors(coded)), len(stored)
        served = f"served as {dtype}"
        if retained:
            others = "" if retained == total else f", the other {total - retained} as {dtype}"
            served = f"{retained} tensors served as codes, products in {dtype}{others}"
        return self.checkpoint.num_bytes, f"{self.quantized_form}, {served}"

    @property
    def quantized_form(self) -> str:
        """The formats of a quantised checkpoint in words; "" for plain weights."""
        if self.quantization is not None:
            return str(self.quantization)
        return ", ".join(dict.fromkeys(f"{tensor}" for tensor in self.quantized_tensors.values()))

    def kv_scales(self) -> tuple[LayerScales, ...]:
        """Scales of keys and of values that the checkpoint has for a pool of e4m3 codes, of the layers that attend, by
        the shape of their rows (CacheLayout.groups); () where all are 1. Raises what `read_kv_scales` and
        `check_kv_codes` raise."""
        if not isinstance(self.stored, QuantizedCheckpoint):
            return ()
        assert self.quantization is not None, self.path
        self.quantization.check_kv_codes()
        config = self.config
        attending = {
            f"{config.stem}layers.{index}.{layer.mixer.names.at}": config.cache_group(layer.mixer)
            for index, layer in enumerate(config.layers)
            if isinstance(layer.mixer, GroupedAttention)
        }
        scales = read_kv_scales(self.stored.stored, tuple(attending))
        if all(pair == (1.0, 1.0) for pair in scales.values()):
            return ()
        groups = range(len(config.cache.groups))
        return tuple(tuple(scales[at] for at, own in attending.items() if own == group) for group in groups)

    def with_codes(self, support: CodeSupport) -> "ModelFolder":
        """The same model, whose matrices stay codes where the kernels take them (code_selection.py)."""
        names = () if self.checkpoint is None else self.checkpoint.names()
        return self.coded_as(select_codes(self.config, self.quantized_tensors, names, support))

    def coded_as(self, config: FamilyConfig) -> "ModelFolder":
        """The same model with the codes of `config`, which differs in these and in its blocks alone. For codes of e4m3,
        tensors that are stored as other codes, or as plain numbers, are quantised when they are loaded; for codes of 4
        bits they raise WeightsMismatchError. `self` has no codes."""
        coded = config.coded_arrays
        if not coded or self.checkpoint is None or self.stored is None:
            return dataclasses.replace(self, config=config)
        sources_of_config = _sources(config, self.checkpoint)
        folder = dataclasses.replace(self, config=config, sources=sources_of_config, own_dtype=self.dtype("auto"))
        retained = folder._retained_tensors(coded)
        checkpoint = _shown(self.stored, self.family, retained)
        swapped: dict[str, VirtualTensor] = {}
        quantized: dict[str, VirtualTensor] = {}
        sources: list[WeightSource] = []
        for source in folder.sources:
            array = coded.get(source.target)
            if array is not None and not source.transpose:  # [E, I, O]
                swapped[source.name] = with_axes_swapped(source.name)
                *lead, inputs, outputs = source.shape
                source = dataclasses.replace(source, shape=(*lead, outputs, inputs), transpose=True)
            if array is not None and source.name not in retained:
                self._check_quantizes(array, source)
                segments = array.segments_of(source)
                scales = BlockScales(source.name, segments, array.group, array.span)
                quantized |= {source.name: BlockCodes(source.name, segments), f"{source.name}{GROUP_SCALES}": scales}
            sources.append(source)
        if quantized:
            logger.info("%d tensors are quantised to e4m3 as they are loaded", len(quantized) // 2)
        if again := len(quantized.keys() & self.quantized_tensors.keys()):
            logger.warning(
                "%d of them are codes, but not in the blocks that are served: they are quantised again", again
            )
        for tensors in (swapped, quantized):
            checkpoint = VirtualCheckpoint(checkpoint, tensors) if tensors else checkpoint
        return dataclasses.replace(folder, checkpoint=checkpoint, sources=tuple(coded_sources(sources, coded)))

    def _check_quantizes(self, array: CodedArray, source: WeightSource) -> None:
        """Raise where plain numbers cannot become the codes of an array."""
        if array.format == E4M3:
            return
        stored = self.quantized_tensors.get(source.name)
        form = "plain numbers" if stored is None else str(stored)
        raise WeightsMismatchError(
            f"{self.path}: {source.name} is stored as {form}, and {source.target} is served as {array.format} codes in "
            f"groups of {array.group} inputs, to which nothing is quantised here; load a checkpoint of that form, or "
            "build the engine with quantization='none'",
            param="model_path",
        )

    def _retained_tensors(self, coded: Mapping[str, CodedArray]) -> dict[str, RetainedCodes]:
        """The quantised tensors that stay codes, and how."""
        matrices = self.quantized_tensors
        targets = ((source, coded.get(source.target)) for source in self.sources if source.name in matrices)
        return {
            source.name: RetainedCodes(group=array.group, span=array.span, run=array.run, scale_dtype=array.scale_dtype)
            for source, array in targets
            if array is not None and can_retain(array, source, matrices)
        }

    def with_experts_from(self, path: str | Path, targets: Callable[[str], bool]) -> "ModelFolder":
        """The same model, with tensors read from another folder where `targets` holds for their target. Raises
        CheckpointError naming tensors that are missing there or have another shape, and a quantisation that is not
        read."""
        if self.checkpoint is None:
            raise ConfigError(
                f"kt_weight_path={str(path)!r} with load_format='dummy', which reads no weight; leave one of them out"
            )
        file, quantization = Path(path) / "config.json", None
        if file.exists():
            values = read_json_object(file)
            check_quantization(Path(path), values, (*self.family.accepted_quirks.quantization, *METHODS))
            quantization = QuantizationConfig.read(path, values)
        plain = Checkpoint(path)
        right = _shown(plain if quantization is None else open_quantized(plain, quantization), self.family)
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


def _shown(
    stored: Checkpoint | QuantizedCheckpoint, family: Family, retained: Mapping[str, RetainedCodes] = NONE_RETAINED
) -> Checkpoint:
    """The tensors as the family's table names them; those of `retained` as `show_codes` has them."""
    checkpoint = stored.shown(retained) if isinstance(stored, QuantizedCheckpoint) else stored
    virtual = family.virtual_tensors(checkpoint)
    return VirtualCheckpoint(checkpoint, show_codes(virtual, retained)) if virtual else checkpoint


def _quantized_tensors(stored: Checkpoint | QuantizedCheckpoint, family: Family) -> dict[str, CodedTensor]:
    """The tensors of the family's table that are quantised, by plain names."""
    is_quantized = isinstance(stored, QuantizedCheckpoint)
    matrices = stored.matrices if is_quantized else {}
    virtual = family.virtual_tensors(stored.shown() if is_quantized else stored)
    own = {name: tensor for name, tensor in virtual.items() if isinstance(tensor, CodedTensor)}
    return {name: matrix for name, matrix in matrices.items() if name not in virtual} | own


def _sources(config: FamilyConfig, checkpoint: Checkpoint) -> tuple[WeightSource, ...]:
    """The table of names for the tensors that are there."""
    return tuple(fuse_experts(weight_sources(config), checkpoint.names()))


def _check_plain(checkpoint: Checkpoint, sources: Iterable[WeightSource], quantized: Collection[str]) -> None:
    """Raise where embeddings or a router are quantised: no method does it, and ids would change."""
    for source in sources:
        if source.name in quantized and source.target.rpartition(".")[2] in _ALWAYS_PLAIN:
            raise CheckpointError(
                f"{checkpoint.path}: {source.name} is quantised; expected plain embeddings and routers; use another "
                "checkpoint"
            )


def _check_targeted(
    quantized: QuantizedCheckpoint, sources: Iterable[WeightSource], config: QuantizationConfig
) -> None:
    """Raise where config.json quantises a matrix by name or expression, and the file holds it plain. Those of a class
    are read as they are, and the log counts them: a published list of what is left out may be missing (DeepSeek-V3), or
    name modules otherwise than the tensors."""
    headers, plain = quantized.stored.names(), list[str]()
    for source in sources:
        name, array = source.name, source.target.rpartition(".")[2]
        is_matrix = len(source.shape) == 2 and name.endswith(".weight") and name in headers
        if not is_matrix or name in quantized.matrices or array in (*_ALWAYS_PLAIN, "head"):
            continue
        module = name.removesuffix(".weight")
        if config.is_ignored(module) or config.storage(module) is None:
            continue
        if config.names(module):
            shape, dtype = headers[name]
            raise CheckpointError(
                f"{quantized.stored.path}: {name} is {list(shape)} {dtype} without a scale; expected "
                f"{config.storage(module)}, as a group of {config.path.name} targets it; copy the checkpoint again, or "
                "add the module to ignore"
            )
        plain.append(name)
    if plain:
        text = "%d matrices are plain where config.json quantises their class, and are read as such: %s"
        logger.info(text, len(plain), ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else ""))


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
