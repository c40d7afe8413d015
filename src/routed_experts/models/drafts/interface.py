"""DraftModel: a module that predicts further tokens from the target's hidden states and the tokens that follow them.

The target is the served model. Row t of a call is a pair: features of token t, and the embedding of token t + 1, its
successor; it is at position t, and its keys and values go to the draft layers' cache at the slot of token t. From it
the module scores token t + 2. The next call of the same chain takes what this one returned as `recycled` for features,
and the embedding of the token that was drafted, at position t + 1. Dims: N tokens, D width of the draft model, T width
of the target, F width of features, V vocabulary, W draft vocabulary."""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.lm_head import LmHead
from routed_experts.models.base.interface import AttentionFn


class DraftModel(Protocol):
    """A draft model. Embedding and head of the target are arguments: they are the arrays that are served now."""

    @property
    def cache(self) -> CacheLayout:
        """What its layers keep of a token."""
        ...

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `features` takes, raw, in this order; empty: it takes the final hidden states."""
        ...

    def features(
        self, hidden: Float[Array, "N T"], streams: Sequence[Float[Array, "N T"]], *, kernels: Kernels
    ) -> Float[Array, "N F"]:
        """Features of tokens that the target has run. `hidden`: behind the target's final norm; `streams`: the outputs
        of the tapped layers."""
        ...

    def __call__(
        self,
        features: Float[Array, "N F"],
        embeddings: Float[Array, "N T"],
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        attend: AttentionFn,
        cache: Any,
        *,
        draft_index: int,
        target_norm: Float[Array, " T"],
        kernels: Kernels,
        tokens: Int[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], Any]:
        """Run the draft layers. `embeddings`: of the successors, as the target embeds them; `draft_index`: static, the
        draft's index in its chain (a model of several modules has one for each); `target_norm`: the
        scale of the target's final norm; `tokens`: ids of the successors, for a model that embeds them itself. Returns
        the input of the head, the features of the next call, and the updated cache."""
        ...

    def lm_head(self, target: LmHead) -> LmHead:
        """The weights that scores are computed with: its own, or the target's."""
        ...

    def target_ids(self) -> Int[Array, " W"] | None:
        """The target's id of each id of the draft vocabulary; None where they are the same."""
        ...
