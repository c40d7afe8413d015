"""DraftFolder: the folder of an EAGLE head, whose config is read and whose tensors are checked against the target, and
the head loaded from it.

Everything that config.json and the headers tell is checked before a weight is read. Tensors may stand under `model.`,
and the layer of an EAGLE-3 head under `midlayer.` or `layers.0.`. Dims: W draft vocabulary."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Int32

from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.core.paths import is_folder
from routed_experts.models.base.config_reader import (
    AcceptedQuirks,
    ConfigReader,
    parse_architecture,
    read_config,
    read_json_object,
)
from routed_experts.models.base.interface import DecoderConfig
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.drafts.eagle3_head import Eagle3Config, Eagle3Head, read_eagle3
from routed_experts.models.drafts.eagle_head import EagleConfig, EagleHead, read_eagle
from routed_experts.models.drafts.tapped_layers import chosen_outputs, tapped_outputs
from routed_experts.models.drafts.token_map import check_token_map, read_token_map
from routed_experts.models.loading.checkpoint import Checkpoint, check
from routed_experts.models.loading.weight_loader import load

DraftConfig = Eagle3Config | EagleConfig
EagleModel = Eagle3Head | EagleHead

EAGLE3 = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"})
EAGLE = frozenset({"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"})
_THIRD_PARTY: Mapping[str, str] = MappingProxyType(  # parts of an architecture or a model type, without _ and case
    {
        "medusa": "Medusa",
        "hydra": "Hydra",
        "peagle": "P-EAGLE",
        "dflash": "DFlash",
        "dspark": "DSpark",
        "lstmspeculator": "an LSTM speculator",
        "mlpspeculator": "an MLP speculator",
        "eaglespeculator": "an EAGLE-1 head in the speculators format",
    }
)
_CODE = AcceptedQuirks(code=True)  # the speculators library writes an auto_map, which is not run
_UNUSED = ("*rotary_emb.inv_freq",)
_PICKLES = frozenset({".bin", ".pt", ".pth"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftFolder:
    """A head that fits its target; no weight is loaded yet. `token_ids`: the target's id of each draft id, None where
    they are the same."""

    path: Path
    config: DraftConfig
    checkpoint: Checkpoint
    sources: tuple[WeightSource, ...]
    token_ids: Int32[np.ndarray, " W"] | None = None

    @staticmethod
    def open(path: str | Path, target: DecoderConfig, *, layers: Sequence[int] | None = None) -> "DraftFolder":
        """Read config.json, the headers, and the map of ids. `layers`: of the target, whose outputs an EAGLE-3 head
        reads, instead of those that its config names. Raises CheckpointError or ConfigError naming what does not
        fit."""
        folder = Path(path)
        config = read_draft_config(folder)
        _check_target(folder, config, target)
        _refuse_pickles(folder)
        checkpoint = Checkpoint(folder)
        names = _canonical_names(checkpoint)
        if "mask_hidden" in names:
            raise _third_party(folder, "P-EAGLE", f"the tensor {names['mask_hidden']}")
        if isinstance(config, EagleConfig):
            if layers is not None:
                raise ConfigError(
                    f"speculative_eagle_layers={list(layers)}, but {folder} is an EAGLE-1 head, which reads no layers; "
                    "leave it out"
                )
            return DraftFolder(
                path=folder, config=config, checkpoint=checkpoint, sources=_checked_eagle(config, checkpoint, names)
            )
        tapped = (
            tapped_outputs(config.layer_ids, target.num_layers, where=str(folder / "config.json"))
            if layers is None
            else chosen_outputs(layers, target.num_layers)
        )
        config = _with_arrays(dataclasses.replace(config, tapped_layers=tapped), names)
        sources, token_ids = _checked_eagle3(config, checkpoint, names)
        config = dataclasses.replace(config, has_token_map=token_ids is not None)
        return DraftFolder(path=folder, config=config, checkpoint=checkpoint, sources=sources, token_ids=token_ids)

    def load(
        self, dtype: jnp.dtype, *, sharding: Sharding | None = None, shards: ModelSharding | None = None
    ) -> EagleModel:
        """Load every tensor and return the head. Arrays are placed by `sharding`, or on the first device. With `shards`
        (over `config.partitions()`) each device reads its own part: the head runs only under shard_map."""
        graphdef, state = self._split(dtype)
        flat = [(".".join(map(str, path)), path, leaf) for path, leaf in nnx.to_flat_state(state)]
        targets = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, _, leaf in flat}
        arrays = load(self.checkpoint, self.sources, targets, sharding=sharding, shards=shards)
        if self.token_ids is not None:
            default = sharding or jax.local_devices()[0]
            ids = self.token_ids
            arrays["token_ids"] = jax.device_put(ids, default) if shards is None else shards.put_array("token_ids", ids)
        filled = [(path, leaf.replace(arrays[name])) for name, path, leaf in flat]
        return nnx.merge(graphdef, nnx.from_flat_state(filled))

    def shapes(self, dtype: jnp.dtype) -> nnx.State[Any, Any]:
        """Names, shapes and dtypes of the head's arrays; nothing is loaded."""
        return self._split(dtype)[1]

    def _split(self, dtype: jnp.dtype) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
        return nnx.split(nnx.eval_shape(lambda: self.build(dtype)))

    def build(self, dtype: jnp.dtype) -> EagleModel:
        """The head with random weights."""
        return _build(self.config, dtype)


def read_draft_config(path: str | Path) -> DraftConfig:
    """Read config.json of a draft folder. Raises CheckpointError for a missing folder, another kind of model, and heads
    that are not served, by name."""
    folder = Path(path)
    if is_folder(folder):
        _refuse_others(folder, read_json_object(folder / "config.json"))
    accepted = dict.fromkeys(EAGLE3 | EAGLE, AcceptedQuirks()) | {"Eagle3Speculator": _CODE}
    values = read_config(folder, architectures=accepted)
    reader = ConfigReader(values, folder / "config.json")
    return read_eagle3(reader) if parse_architecture(values) in EAGLE3 else read_eagle(reader)


def _build(config: DraftConfig, dtype: jnp.dtype) -> EagleModel:
    rngs = nnx.Rngs(0)
    if isinstance(config, EagleConfig):
        return EagleHead(config, rngs=rngs, dtype=dtype)
    return Eagle3Head(config, rngs=rngs, dtype=dtype)


def _refuse_others(folder: Path, values: Mapping[str, object]) -> None:
    """Raise where config.json is of a head of another kind, or of no head."""
    file, declared = folder / "config.json", values.get("architectures")
    words = declared if isinstance(declared, list) else [declared]
    kinds = [*words, values.get("model_type"), values.get("speculators_model_type"), *values.keys()]
    for kind in kinds:
        plain = str(kind).replace("_", "").replace("-", "").lower()
        for part, name in _THIRD_PARTY.items():
            if part in plain and not (part == "eaglespeculator" and "eagle3" in plain):
                raise _third_party(folder, name, str(kind))
    if values.get("parallel_drafting"):
        raise _third_party(folder, "P-EAGLE", "parallel_drafting")
    if len(words) != 1 or not isinstance(words[0], str) or words[0] not in EAGLE3 | EAGLE:
        looks = "draft_vocab_size" in values
        hint = "LlamaForCausalLMEagle3: it has draft_vocab_size" if looks else ", ".join(sorted(EAGLE3 | EAGLE))
        raise CheckpointError(
            f"{file}: architectures={declared!r} is not an EAGLE head; expected {'' if looks else 'one of '}{hint}; "
            "name the folder of a head, or correct architectures if it is one"
        )


def _third_party(folder: Path, name: str, sign: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds {name} (by {sign}), a draft head that is not served; expected an EAGLE-1, EAGLE-2 or EAGLE-3 "
        "head; use one of these, or NGRAM, which needs no head"
    )


def _refuse_pickles(folder: Path) -> None:
    """Raise where the only weights are pickled; the error says how to convert them."""
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickled and not any(folder.glob("*.safetensors*")):
        raise CheckpointError(
            f"{folder} holds pickled weights ({', '.join(pickled)}), which can run code and are never read; expected "
            "model.safetensors; convert them once: safetensors.torch.save_file(torch.load("
            f"{pickled[0]!r}, weights_only=True), 'model.safetensors')"
        )


def _check_target(folder: Path, config: DraftConfig, target: DecoderConfig) -> None:
    """Raise CheckpointError where the head is not for a model of these sizes."""
    is_eagle3 = isinstance(config, Eagle3Config)
    own = {
        "target_hidden_size" if is_eagle3 else "hidden_size": (
            config.target_size if is_eagle3 else config.hidden_size,
            target.hidden_size,
            "hidden_size",
        ),
        "vocab_size": (config.vocab_size, target.vocab_size, "vocab_size"),
    }
    for key, (has, wants, what) in own.items():
        if has != wants:
            absent = " (hidden_size, where it is absent)" if key == "target_hidden_size" else ""
            raise CheckpointError(
                f"{folder / 'config.json'}: {key}={has}{absent}, but {what} of the target is {wants}; expected a head "
                "that was trained for this target; use another folder"
            )


def _canonical_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The tensors' names by name without `model.`. Raises CheckpointError where two names mean one tensor."""
    names: dict[str, str] = {}
    for name in checkpoint.names():
        plain = name.removeprefix("model.")
        if plain in names:
            raise CheckpointError(
                f"{checkpoint.path} holds both {names[plain]} and {name}; expected one of them; remove the other"
            )
        names[plain] = name
    return names


def _with_arrays(config: Eagle3Config, names: Mapping[str, str]) -> Eagle3Config:
    """The config with the arrays that the folder brings, or must bring."""
    own_width = config.hidden_size != config.target_size
    return dataclasses.replace(
        config,
        own_embedding="embed_tokens.weight" in names or own_width,
        own_head="lm_head.weight" in names or own_width or config.draft_vocab_size != config.vocab_size,
        has_token_map="d2t" in names or config.draft_vocab_size != config.vocab_size,
    )


def _renamed(sources: Sequence[WeightSource], names: Mapping[str, str]) -> tuple[WeightSource, ...]:
    """The sources under the names of this folder; a missing one keeps its canonical name."""
    return tuple(dataclasses.replace(source, name=names.get(source.name, source.name)) for source in sources)


def _checked_eagle(config: EagleConfig, checkpoint: Checkpoint, names: Mapping[str, str]) -> tuple[WeightSource, ...]:
    """The sources of an EAGLE-1 head. Its embedding is a copy of the target's, and is not read."""
    sources, embedding = _renamed(tuple(config.sources()), names), names.get("embed_tokens.weight", "")
    copied = WeightSource(name=embedding, shape=(config.vocab_size, config.hidden_size), target="", optional=True)
    check((*sources, copied), checkpoint, ignore=_UNUSED)
    return sources


def _checked_eagle3(
    config: Eagle3Config, checkpoint: Checkpoint, names: Mapping[str, str]
) -> tuple[tuple[WeightSource, ...], Int32[np.ndarray, " W"] | None]:
    """The sources of an EAGLE-3 head, and the target's id of each draft id."""
    layered = {
        f"midlayer.{name.removeprefix('layers.0.')}": at for name, at in names.items() if name.startswith("layers.0.")
    }
    both = sorted(layered.keys() & names.keys())
    if both:
        raise CheckpointError(
            f"{checkpoint.path} holds both {names[both[0]]} and {layered[both[0]]}; expected one of them; remove the "
            "other"
        )
    sources = _renamed(tuple(config.sources()), {**names, **layered})
    maps = [names[name] for name in ("d2t", "t2d") if name in names]
    unread = () if config.norm_output else ("norm.weight", "model.norm.weight")
    ids = [WeightSource(name="d2t", shape=(config.draft_vocab_size,), target="")] if config.has_token_map else []
    missing = [source for source in ids if source.name not in names]
    check((*sources, *missing), checkpoint, ignore=(*_UNUSED, *unread, *maps))
    if "d2t" not in names:
        return sources, None
    sizes = {"vocab_size": config.vocab_size, "draft_size": config.draft_vocab_size}
    d2t, t2d = names["d2t"], names.get("t2d")
    check_token_map(checkpoint, d2t, t2d, **sizes)
    token_ids = read_token_map(checkpoint, d2t, t2d, **sizes)
    if token_ids is not None and not config.own_head:
        raise CheckpointError(
            f"{checkpoint.path} has {d2t}, which renames ids, but no lm_head.weight; expected both; copy the head again"
        )
    return sources, token_ids
