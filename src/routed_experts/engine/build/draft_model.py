"""The draft model of an engine: found and checked before the target's weights load, then loaded and given a pool."""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from routed_experts.core.errors import ConfigError
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.memory_planning import array_code_dtype
from routed_experts.execution.drafting_runner import OF_TARGET, STANDALONE, DraftKind, LoadedDraft
from routed_experts.execution.memory_demand import DraftDemand
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.interface import Decoder, DecoderConfig, RequiredFeatures
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.drafts.draft_folder import DraftFolder
from routed_experts.models.drafts.eagle3_head import Eagle3Config
from routed_experts.models.drafts.interface import DraftModel
from routed_experts.models.drafts.predictor import Predictor
from routed_experts.models.drafts.vocabularies import check_vocabularies
from routed_experts.models.loading.model_source import draft_folder_path
from routed_experts.models.model_folder import ModelFolder

logger = logging.getLogger(__name__)
HOST_BRANCHES = ("gpu",)  # platforms whose host waits where a program branches on a value: no step could run ahead
KernelChoice = tuple[Kernels, AttentionBackend]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundDraft:
    """A draft model whose tensors fit; no weight is loaded. `shapes`: of its arrays, in a dtype; `layout`: what its
    layers keep of a token; `kernels`: its own, None: it runs with the target's; `description`: what it is, for the
    start line; `tapped_layers`: as in LoadedDraft."""

    description: str
    kind: DraftKind
    layout: CacheLayout
    shapes: Callable[[jnp.dtype], nnx.State[Any, Any]]
    load_model: Callable[[jnp.dtype], DraftModel | Decoder]
    kernels: KernelChoice | None = None
    tapped_layers: tuple[int, ...] = ()

    def demand(self, target: KVPoolSpec, dtype: jnp.dtype) -> DraftDemand:
        """Bytes of its weights, and of a token in its layers, beside a target's pool."""
        leaves = jax.tree.leaves(self.shapes(dtype))
        weights = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        return DraftDemand(weights=weights, bytes_per_token=self._pool(target).bytes_per_token)

    def load(self, target: KVPoolSpec, dtype: jnp.dtype, kernels: KernelChoice) -> LoadedDraft:
        """Load the weights; the pool has the target's pages, and `kernels` are the target's."""
        moe, attention = self.kernels or kernels
        return LoadedDraft(
            model=self.load_model(dtype),
            kind=self.kind,
            pool=self._pool(target),
            kernels=moe,
            attention=attention,
            tapped_layers=self.tapped_layers,
            static_modes=jax.default_backend() in HOST_BRANCHES,
        )

    def _pool(self, target: KVPoolSpec) -> KVPoolSpec:
        is_written = self.kernels is None or self.kernels[1].write is not None
        return KVPoolSpec.create(
            self.layout,
            num_pages=target.num_pages,
            page_size=target.page_size,
            dtype=target.dtype if is_written else array_code_dtype(target.dtype),
            num_requests=target.num_requests,
            platform=jax.default_backend(),
        )


def find_draft_model(
    speculative: SpeculativeConfig,
    source: ModelFolder | Decoder,
    config: DecoderConfig,
    *,
    context_length: int,
    choose_kernels: Callable[[RequiredFeatures], KernelChoice],
) -> FoundDraft:
    """Read and check the draft model that a config names. `context_length`: the longest sequence that is served;
    `choose_kernels`: for another model, by what it needs. Raises ConfigError or CheckpointError."""
    if speculative.is_standalone:
        folder = _open_standalone(str(speculative.draft_model_path), source, config)
        return _find_standalone(folder, context_length, choose_kernels(folder.config.needs))
    if not isinstance(config, FamilyConfig):
        raise ConfigError("not with speculation by a draft model: the decoder is not one of this package")
    if speculative.draft_model_path is None:
        return _find_predictor(speculative, source, config)
    path = draft_folder_path(speculative.draft_model_path)
    folder = DraftFolder.open(path, config, layers=speculative.eagle_layers)
    config_of_head = folder.config
    expected = "EAGLE3" if isinstance(config_of_head, Eagle3Config) else "EAGLE"
    if speculative.algorithm.upper() != expected:
        text = f"speculative_algorithm={speculative.algorithm!r}, but {folder.path} is a head for {expected}"
        raise ConfigError(f"{text}; choose speculative_algorithm={expected!r}")
    tapped = ""
    if isinstance(config_of_head, Eagle3Config):
        tapped = f" that reads the outputs of layers {', '.join(map(str, config_of_head.tapped_layers))}"

    return _of_target(f"{expected} head{tapped}", folder.build, folder.load)


def _find_predictor(speculative: SpeculativeConfig, source: ModelFolder | Decoder, config: FamilyConfig) -> FoundDraft:
    """The layers of the target's own folder that predict further tokens."""
    if not isinstance(source, ModelFolder):
        text = (
            f"speculative_algorithm={speculative.algorithm!r} reads layers of the model's folder, and model= has none"
        )
        raise ConfigError(f"{text}; give model_path, or choose NGRAM")
    source.check_predictor()

    def build(dtype: jnp.dtype) -> Predictor:
        return Predictor(config, rngs=nnx.Rngs(0), dtype=dtype, num_modules=1)

    def load(dtype: jnp.dtype) -> Predictor:
        return source.load_predictor(dtype, num_drafts=1)  # of several modules the first drafts all tokens

    return _of_target("a prediction layer of the model", build, load)


def _of_target(
    description: str, build: Callable[[jnp.dtype], DraftModel], load: Callable[[jnp.dtype], DraftModel]
) -> FoundDraft:
    """A draft model that reads hidden states of the target. `build`: the module with random weights."""
    abstract: Any = nnx.eval_shape(lambda: build(jnp.dtype("float32")))
    return FoundDraft(
        description=description,
        kind=OF_TARGET,
        layout=abstract.cache,
        shapes=lambda dtype: nnx.state(nnx.eval_shape(lambda: build(dtype))),
        load_model=load,
        tapped_layers=abstract.tapped_layers,
    )


def _open_standalone(path: str, source: ModelFolder | Decoder, config: DecoderConfig) -> ModelFolder:
    """Another model, of the same vocabulary. It has random weights where the target has them."""
    is_dummy = isinstance(source, ModelFolder) and source.checkpoint is None
    folder = ModelFolder.open(path, load_format="dummy" if is_dummy else "auto")
    cache = folder.config.cache
    if cache.recurrent is not None:
        text = f"{cache.num_recurrent} layers of {path} ({folder.architecture}) keep a state, which cannot be cut back"
        raise ConfigError(f"not as a draft model: {text} to the accepted tokens; choose a model without such layers")
    check_vocabularies(
        folder.path,
        source.path if isinstance(source, ModelFolder) else None,
        draft_size=folder.config.vocab_size,
        target_size=config.vocab_size,
    )
    return folder


def _find_standalone(folder: ModelFolder, served_length: int, kernels: KernelChoice) -> FoundDraft:
    """A model that fits. It drafts no token behind its own context."""
    config, name = folder.config, f"{folder.architecture} of {folder.config.num_layers} layers"
    if config.context_length < served_length:
        text = "%s is trained for %d tokens, and %d are served: it drafts none behind its own"
        logger.info(text, folder.path, config.context_length, served_length)
        name = f"{name}, up to token {config.context_length:,}"
    return FoundDraft(
        description=name,
        kind=STANDALONE,
        layout=config.cache,
        shapes=folder.shapes,
        load_model=folder.load,
        kernels=kernels,
    )
