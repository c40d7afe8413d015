"""The draft model of an engine: found and checked before the target's weights load, then loaded and given a pool."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from routed_experts.core.errors import ConfigError
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.execution.drafting_runner import LoadedDraft
from routed_experts.execution.memory_demand import DraftDemand
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.interface import Decoder, DecoderConfig
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.drafts.draft_folder import DraftFolder
from routed_experts.models.drafts.eagle3_head import Eagle3Config
from routed_experts.models.drafts.interface import DraftModel
from routed_experts.models.drafts.predictor import Predictor
from routed_experts.models.model_folder import ModelFolder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundDraft:
    """A draft model whose tensors fit; no weight is loaded. `abstract`: the module with shapes for arrays, in a dtype;
    `description`: what it is, for the start line."""

    description: str
    abstract: Callable[[jnp.dtype], Any]
    load_model: Callable[[jnp.dtype], DraftModel]

    def demand(self, target: KVPoolSpec, dtype: jnp.dtype) -> DraftDemand:
        """Bytes of its weights, and of a token in its layers, beside a target's pool."""
        model = self.abstract(dtype)
        leaves = jax.tree.leaves(nnx.state(model))
        weights = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        return DraftDemand(weights=weights, bytes_per_token=_pool_spec(model, target).bytes_per_token)

    def load(self, target: KVPoolSpec, dtype: jnp.dtype) -> LoadedDraft:
        """Load the weights; the pool has the target's pages."""
        model = self.load_model(dtype)
        return LoadedDraft(model=model, pool=_pool_spec(model, target))


def find_draft_model(
    speculative: SpeculativeConfig, source: ModelFolder | Decoder, config: DecoderConfig
) -> FoundDraft:
    """Read and check the draft model that a config names. Raises ConfigError or CheckpointError."""
    if not isinstance(config, FamilyConfig):
        raise ConfigError("not with speculation by a draft model: the decoder is not one of this package")
    if speculative.draft_model_path is None:
        return _find_predictor(speculative, source, config)
    folder = DraftFolder.open(speculative.draft_model_path, config, layers=speculative.eagle_layers)
    config_of_head = folder.config
    expected = "EAGLE3" if isinstance(config_of_head, Eagle3Config) else "EAGLE"
    if speculative.algorithm.upper() != expected:
        text = f"speculative_algorithm={speculative.algorithm!r}, but {folder.path} is a head for {expected}"
        raise ConfigError(f"{text}; choose speculative_algorithm={expected!r}")
    tapped = ""
    if isinstance(config_of_head, Eagle3Config):
        tapped = f" that reads the outputs of layers {', '.join(map(str, config_of_head.tapped_layers))}"

    def abstract(dtype: jnp.dtype) -> Any:
        return nnx.eval_shape(lambda: folder.build(dtype))

    return FoundDraft(description=f"{expected} head{tapped}", abstract=abstract, load_model=folder.load)


def _find_predictor(speculative: SpeculativeConfig, source: ModelFolder | Decoder, config: FamilyConfig) -> FoundDraft:
    """The layers of the target's own folder that predict further tokens."""
    if not isinstance(source, ModelFolder):
        text = (
            f"speculative_algorithm={speculative.algorithm!r} reads layers of the model's folder, and model= has none"
        )
        raise ConfigError(f"{text}; give model_path, or choose NGRAM")
    source.check_predictor()

    def abstract(dtype: jnp.dtype) -> Any:
        return nnx.eval_shape(lambda: Predictor(config, rngs=nnx.Rngs(0), dtype=dtype, num_modules=1))

    def load(dtype: jnp.dtype) -> Predictor:
        return source.load_predictor(dtype, num_drafts=1)  # of several modules the first drafts all tokens

    return FoundDraft(description="a prediction layer of the model", abstract=abstract, load_model=load)


def _pool_spec(model: DraftModel, target: KVPoolSpec) -> KVPoolSpec:
    return KVPoolSpec.create(
        model.cache,
        num_pages=target.num_pages,
        page_size=target.page_size,
        dtype=target.dtype,
        num_requests=target.num_requests,
        platform=jax.default_backend(),
    )
