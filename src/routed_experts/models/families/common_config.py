"""Config fields that nearly all config.json files share: sizes, heads, norms, experts."""

import dataclasses
from collections.abc import Collection, Sequence

from routed_experts.core.capture_spec import MAX_HIDDEN_LAYERS
from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.base.config_reader import MAX_HEAD_DIM, ConfigReader
from routed_experts.models.base.rotary_reader import Rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.grouped_attention import GroupedAttention

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder, read under the usual names."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    context_length: int
    position_limit: int | None = None

    def attention(self, rotary: RotarySpec | None) -> GroupedAttention:
        """Grouped-query attention without any of a family's additions."""
        return GroupedAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary=rotary,
            eps=self.norm_eps,
        )

    def decoder(
        self, layers: Sequence[LayerSpec], *, ignored_tensors: tuple[str, ...] = (), num_predicting: int = 0
    ) -> FamilyConfig:
        """A decoder of these layers; the `num_predicting` layers after them predict further tokens and are not run. A
        window or chunk that is as wide as the context is left out: no sequence that is served reaches its end."""
        reach = {_reach(layer) for layer in layers}
        wide = {length for length in reach if length >= self.context_length}
        layers = [_seeing_all(layer) if _reach(layer) in wide else layer for layer in layers]
        limits = wide if self.position_limit is None else {*wide, self.position_limit}
        return FamilyConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=tuple(layers),
            norm_eps=self.norm_eps,
            context_length=self.context_length,
            position_limit=min(limits, default=None),
            tie_embeddings=self.tie_embeddings,
            ignored_tensors=ignored_tensors,
            num_predicting=num_predicting,
        )

    def within(self, rotary: Rotary) -> "Sizes":
        """The same, with context_length cut to the range of its rotary positions."""
        length = rotary.context_length
        return self if length is None else dataclasses.replace(self, context_length=length, position_limit=length)


def _reach(layer: LayerSpec) -> int:
    """Tokens of the sliding window or of the chunk of a layer; 0 for neither."""
    return max(layer.mixer.window, layer.mixer.chunk) if isinstance(layer.mixer, GroupedAttention) else 0


def _seeing_all(layer: LayerSpec) -> LayerSpec:
    """The layer without a window and without chunks."""
    assert isinstance(layer.mixer, GroupedAttention), layer
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=0, chunk=0))


def read_sizes(
    reader: ConfigReader,
    *,
    eps: float = 1e-6,
    tied: bool = False,
    eps_key: str = "rms_norm_eps",
    latent: bool = False,
) -> Sizes:
    """Read them; a CheckpointError names a missing or invalid key, and one above MAX_HIDDEN_LAYERS or MAX_HEAD_DIM.
    `eps` and `tied` are the family's defaults. `latent`: all attention is latent, whose widths are other keys, and
    `head_dim` may be odd."""
    hidden, heads = reader.int("hidden_size", minimum=1), reader.int("num_attention_heads", minimum=1)
    kv_heads = reader.int("num_key_value_heads", minimum=1, default=heads)
    reader.require(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    head_dim = reader.int("head_dim", minimum=2, maximum=MAX_HEAD_DIM, default=max(2, hidden // heads))
    reader.require(latent or head_dim % 2 == 0, "head_dim", "an even number: rotary positions turn pairs")
    reader.str("hidden_act", default="silu", choices=("silu", "swish"))  # two names of one function
    refuse(reader, "is_causal", allowed=(True,), default=True)
    norm_eps = reader.float(eps_key, default=eps)
    reader.require(norm_eps >= 0, eps_key, "a number of at least 0")
    return Sizes(
        vocab_size=reader.int("vocab_size", minimum=1),
        hidden_size=hidden,
        num_layers=reader.int("num_hidden_layers", minimum=1, maximum=MAX_HIDDEN_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=norm_eps,
        tie_embeddings=reader.bool("tie_word_embeddings", default=tied),
        context_length=reader.int("max_position_embeddings", minimum=1),
    )


def read_experts(
    reader: ConfigReader,
    *,
    key: str = "num_experts",
    per_token: str = "num_experts_per_tok",
    scoring: str = "softmax",
    methods: Collection[str] = ("greedy",),
    grouped: bool = False,
) -> tuple[int, int]:
    """Experts of a layer and experts per token; `check_routing` besides."""
    check_routing(reader, scoring=scoring, methods=methods, grouped=grouped)
    experts = reader.int(key, minimum=1)
    return experts, reader.int(per_token, minimum=1, maximum=experts)


def check_routing(
    reader: ConfigReader, *, scoring: str = "softmax", methods: Collection[str] = ("greedy",), grouped: bool = False
) -> None:
    """Raise where a config names another routing than its family's. Without these keys the family's default
    applies."""
    for word in ("scoring_func", "score_function"):
        reader.str(word, default=scoring, choices=(scoring,))
    reader.str("topk_method", default=next(iter(methods)), choices=methods)
    for word in () if grouped else ("n_group", "topk_group"):
        reader.require(reader.int(word, default=1) == 1, word, "1: experts of this architecture are not grouped")


def refuse(reader: ConfigReader, key: str, *, allowed: Collection[bool] = (False,), default: bool = False) -> None:
    """Raise where a switch has a value that is not served; null is the default, also where that is true."""
    strings = " or ".join("true" if value else "false" for value in allowed)
    reader.require((reader.bool(key) if reader.has(key) else default) in allowed, key, strings)


def read_window(reader: ConfigReader) -> int:
    """Tokens that a layer with a sliding window sees; 0, all of them, without one."""
    return reader.int("sliding_window", minimum=1) if reader.has("sliding_window") else 0


def read_windows(reader: ConfigReader, sizes: Sizes) -> tuple[int, ...]:
    """Tokens that each layer sees, 0 for all, in Qwen's form: with `use_sliding_window`, layers from
    `max_window_layers` on slide, or those that `layer_types` names."""
    slides, first = (
        reader.bool("use_sliding_window", default=False),
        reader.int("max_window_layers", minimum=0, default=28),
    )
    window = read_window(reader.with_default("sliding_window", 4096)) if slides else 0
    default = tuple(_LAYER_TYPES[slides and index >= first] for index in range(sizes.num_layers))
    kinds = reader.strings("layer_types", choices=_LAYER_TYPES, default=default)
    reader.require(len(kinds) == sizes.num_layers, "layer_types", f"{sizes.num_layers} words")
    reader.require(
        slides or "sliding_attention" not in kinds,
        "layer_types",
        "full_attention alone where use_sliding_window is false",
    )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
