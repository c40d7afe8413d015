"""FamilyConfig: the layers of a decoder, part by part, as one frozen value read from config.json.

Layers are scanned in blocks. A block is a pattern of one or more layers that repeats: dense-first models have two
blocks of one layer each, a model whose layers alternate has one block of two. So compile time follows the number of
different layers, not of layers. Dims: L layers, V vocabulary, D hidden."""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.base.interface import RequiredFeatures
from routed_experts.models.base.partitioning import AxisPartition, ParallelConfig, embedding_partition
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.coded_arrays import CodedArray, coded_specs
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.latent_attention import LatentAttention
from routed_experts.models.decoder.layer_params import ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope
from routed_experts.models.decoder.short_convolution import ShortConvolution

_LONGEST_PATTERN = 8
MAX_NEXTN_LAYERS = 64  # layers that predict further tokens, as a config may count them

INPUT_NORMS = ("input_norm", "post_norm")
OUTPUT_NORMS = ("mixer_norm", "feed_norm")
RECURRENT = -1  # the cache group of layers that keep a state
Recurrent = DeltaAttention | ShortConvolution  # keep a state, and no keys and values
AnyMixer = GroupedAttention | LatentAttention | Recurrent
AnyFeedForward = Dense | Sparse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: x + mixer(norm(x)), then x + feed(norm(x)). `output_norms`: the outputs of mixer and feed are normed
    before they are added (Gemma 2). `scaled`: after both, the stream is multiplied by a number of the layer. `coded`:
    the matrices that are codes and scales in memory."""

    mixer: AnyMixer
    feed: AnyFeedForward
    output_norms: bool = False
    scaled: bool = False
    coded: tuple[CodedArray, ...] = ()

    def shard(self, parallel: ParallelConfig) -> "LayerSpec":
        """What one device does of it."""
        return dataclasses.replace(self, mixer=self.mixer.shard(parallel), feed=self.feed.shard(parallel))

    @property
    def needs(self) -> frozenset[str]:
        """What it does beside adding the outputs of its parts to the stream, in words."""
        words = {
            "norms of outputs": self.output_norms,
            "a scale of the stream": self.scaled,
            "a dense network beside experts": self.feed.reads_stream,
        }
        return frozenset(word for word, needed in words.items() if needed)

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have for it, in words."""
        return self.needs | self.mixer.stack_needs | self.feed.stack_needs

    def weights(self, config: "FamilyConfig") -> tuple[ParamSpec, ...]:
        """All arrays of the layer."""
        hidden = config.hidden_size
        names = (*INPUT_NORMS, *(OUTPUT_NORMS if self.output_norms else ()))
        norms = [ParamSpec(name=name, shape=(hidden,), fill=1.0 - config.norm_offset) for name in names]
        if config.layer_norms:
            norms += [ParamSpec(name=f"{norm.name}_bias", shape=(hidden,), fill=0.0) for norm in norms]
        if self.scaled:
            norms.append(ParamSpec(name="stream_scale", shape=(1,), fill=1.0))
        return tuple(coded_specs((*norms, *self.mixer.weights(hidden), *self.feed.weights(hidden)), self.coded))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSpec:
    """Layers that predict further tokens (DeepSeek-V3, section 2.2). Module i of `num_modules` computes from features
    h, and from the embedding e of the token that follows, the input o of the head:

        y = layer(projection [norm(e); norm(h)])        o = norm(y)

    Names of tensors are patterns, in which "{}" is `first` + i; a name without it is of all modules. `output_norm` "":
    the scale is that of the target's final norm. `hidden_first`: [h; e] is projected. `raw_in`: h is the output of the
    target's last layer, not the normed one; `raw_out`: the features of the next call are y, not o. `tensors`: patterns
    of all its tensors; `ignored`: of those among them that are not read. `refused`: what config.json says that is not
    served; "" for nothing."""

    num_modules: int
    layer: LayerSpec
    first: int
    tensors: str
    layer_prefix: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    output_norm: str = ""
    hidden_first: bool = False
    raw_in: bool = False
    raw_out: bool = False
    ignored: tuple[str, ...] = ()
    refused: str = ""

    def shard(self, parallel: ParallelConfig) -> "PredictorSpec":
        """What one device does of it."""
        return dataclasses.replace(self, layer=self.layer.shard(parallel))

    def weights(self, config: "FamilyConfig") -> tuple[ParamSpec, ...]:
        """All arrays of a module."""
        hidden, fill = config.hidden_size, 1.0 - config.norm_offset
        names = ("embedding_norm", "hidden_norm", *(("output_norm",) if self.output_norm else ()))
        norms = (ParamSpec(name=name, shape=(hidden,), fill=fill) for name in names)
        projection = ParamSpec(name="projection", shape=(2 * hidden, hidden), kind=ParamKind.MATRIX)
        return (projection, *norms, *self.layer.weights(config))

    def sources(self, config: "FamilyConfig", target: str) -> Iterator[WeightSource]:
        """The table of names: where each tensor belongs in the arrays at `target`."""
        hidden = config.hidden_size
        for module in range(self.num_modules):
            number, scope = self.first + module, CheckpointScope(target=target, row=module, prefix="")
            yield scope.source(f"{self.projection.format(number)}.weight", (hidden, 2 * hidden), "projection")
            yield scope.source(f"{self.embedding_norm.format(number)}.weight", (hidden,), "embedding_norm")
            yield scope.source(f"{self.hidden_norm.format(number)}.weight", (hidden,), "hidden_norm")
            if self.output_norm:
                yield scope.source(f"{self.output_norm.format(number)}.weight", (hidden,), "output_norm")
            prefix = self.layer_prefix.format(number)
            yield from layer_sources(config, self.layer, dataclasses.replace(scope, prefix=prefix))

    def named(self, *patterns: str) -> tuple[str, ...]:
        """The patterns with the number of each module."""
        numbers = range(self.first, self.first + self.num_modules)
        return tuple(dict.fromkeys(pattern.format(number) for pattern in patterns for number in numbers))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlock:
    """Layers first .. first + len(pattern) * repeats - 1."""

    first: int
    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        """Layers of all repeats."""
        return len(self.pattern) * self.repeats

    @property
    def num_moe(self) -> int:
        """MoE layers of the pattern."""
        return sum(isinstance(layer.feed, Sparse) for layer in self.pattern)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig:
    """What config.json says of a model of any family: its layers, sizes, and names of tensors.

    `layer_norms`: layer normalisation with biases, not RMS. `norm_offset`: added to the scale of every norm of
    the stream. `logit_softcap` c: scores s of the vocabulary become c tanh(s / c); 0 for none. `stem` and `head`: how
    the names of the layers' tensors and of the head's begin; `final_norm`: the name of the norm after the last layer;
    `output_norm_names` and `stream_scale`: of layers that have output norms or are scaled. `ignored_tensors`: shell
    patterns of tensors that a checkpoint may hold without a use here. `num_predicting`: layers behind the last one that
    predict further tokens; the decoder does not run them. `predictor`: how they compute; None where the model has none
    of a served kind. `most_repeats`: of a pattern in one block; None: all that follow one another. `position_limit`:
    tokens of a sequence up to which the layers compute what config.json says, None for any number; past them rotary
    frequencies change for the whole sequence, or a window ends that is left out as it is as wide as the context."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    context_length: int
    position_limit: int | None = None
    tie_embeddings: bool = False
    layer_norms: bool = False
    norm_offset: float = 0.0
    head_bias: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    stem: str = "model."
    embed_name: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    output_norm_names: tuple[str, str] = ("", "")
    stream_scale: str = ""
    ignored_tensors: tuple[str, ...] = ()
    num_predicting: int = 0
    predictor: PredictorSpec | None = None
    most_repeats: int | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of the first layer that attends."""
        return _attending(self.layers)[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return self.cache.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a row of the cache."""
        return self.cache.head_dim

    @property
    def cache(self) -> CacheLayout:
        """What the layers keep: one layout for each shape of rows, in the order of the first layer of each."""
        counts = collections.Counter(mixer.cache(1) for mixer in _attending(self.layers))
        first, *others = (dataclasses.replace(layout, num_layers=count) for layout, count in counts.items())
        shapes = [layer.mixer.shape for layer in self.layers if isinstance(layer.mixer, Recurrent)]
        assert len(set(shapes)) <= 1, shapes
        recurrent = shapes[0] if shapes else None
        return dataclasses.replace(first, others=tuple(others), num_recurrent=len(shapes), recurrent=recurrent)

    def cache_group(self, mixer: AnyMixer) -> int:
        """Which of the cache's shapes the rows of a layer have; RECURRENT for layers that keep a state."""
        if isinstance(mixer, Recurrent):
            return RECURRENT
        return [dataclasses.replace(group, num_layers=1) for group in self.cache.groups].index(mixer.cache(1))

    @property
    def rotary(self) -> frozenset[RotarySpec]:
        """All kinds of rotary positions."""
        return frozenset(mixer.rotary for mixer in _attending(self.layers) if mixer.rotary is not None)

    @property
    def needs(self) -> RequiredFeatures:
        """What kernels must be able to do."""
        experts = [layer.feed.needs for layer in self.layers if isinstance(layer.feed, Sparse)]
        attention = [layer.mixer.needs for layer in self.layers]
        return RequiredFeatures(experts=frozenset[str]().union(*experts), attention=frozenset[str]().union(*attention))

    @property
    def capture_spec(self) -> CaptureSpec | None:
        """What the routed experts of this model look like; None for a model without MoE layers."""
        routers = {
            index: layer.feed.router for index, layer in enumerate(self.layers) if isinstance(layer.feed, Sparse)
        }
        sizes = {(router.num_experts, router.top_k) for router in routers.values()}
        if not sizes:
            return None
        assert len(sizes) == 1, sizes
        experts, top_k = sizes.pop()
        return CaptureSpec(
            num_hidden_layers=self.num_layers, layer_ids=tuple(routers), num_experts=experts, top_k=top_k
        )

    @property
    def blocks(self) -> tuple[LayerBlock, ...]:
        """From each layer on the pattern that, repeated, covers most layers; the shortest of those. Its repeats are in
        one block, or in several of `most_repeats` at most, which differ by one at most."""
        blocks: list[LayerBlock] = []
        first = 0
        while first < self.num_layers:
            left = self.layers[first:]
            sizes = range(1, min(_LONGEST_PATTERN, len(left)) + 1)
            covered = {size: _repeats(left, size) * size for size in sizes}
            size = max(
                (size for size in sizes if covered[size] > size), key=lambda size: (covered[size], -size), default=1
            )
            repeats = covered[size] // size
            parts = math.ceil(repeats / (self.most_repeats or repeats))
            for part in range(parts):
                count = repeats // parts + (part < repeats % parts)
                blocks.append(LayerBlock(first=first, pattern=left[:size], repeats=count))
                first += size * count
        return tuple(blocks)

    def stack_needs(self, block: LayerBlock) -> frozenset[str]:
        """Features that a kernel must have to run all layers of a block at once, beside those of plain pre-norm layers;
        in words."""
        eps = {layer.mixer.eps for layer in block.pattern if isinstance(layer.mixer, GroupedAttention)}
        words = {
            "layers of several kinds": len(block.pattern) > 1,
            "layer normalisation": self.layer_norms,
            "offset norms": self.norm_offset,
            "a residual scale": self.residual_scale != 1.0,
            "several epsilons": bool(eps - {self.norm_eps}),
            "cache rows of several shapes": self.cache.others,
        }
        own = frozenset(word for word, needed in words.items() if needed)
        return own.union(*(layer.stack_needs for layer in block.pattern))

    def shard(self, parallel: ParallelConfig) -> "FamilyConfig":
        """The decoder as one of several devices runs it; the stream between layers is as wide as ever."""
        predictor = None if self.predictor is None else self.predictor.shard(parallel)
        layers = tuple(layer.shard(parallel) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, predictor=predictor)

    def partitions(self, *, by_expert: bool) -> dict[str, AxisPartition]:
        """How arrays are sharded, by dotted path; arrays that are not named are replicated."""
        partitions_by_path = embedding_partition(self.hidden_size, tied=self.tie_embeddings)
        for number, run in enumerate(self.blocks):
            for kind, layer in enumerate(run.pattern):
                for weight in layer.weights(self):
                    partition = weight.partition_in(run.repeats, by_expert=by_expert)
                    if partition is not None:
                        partitions_by_path[f"blocks.{number}.{kind}.{weight.name}"] = partition
        return partitions_by_path

    @property
    def coded_arrays(self) -> dict[str, CodedArray]:
        """The arrays that are codes in memory, by dotted path."""
        return {
            f"blocks.{number}.{kind}.{array.name}": array
            for number, run in enumerate(self.blocks)
            for kind, layer in enumerate(run.pattern)
            for array in layer.coded
        }

    def unused(self, names: Collection[str]) -> tuple[str, ...]:
        """Shell patterns of the tensors among `names` that are not read. A layer behind the last one is let be only if
        it is one that predicts: those project an embedding beside a hidden state (`eh_proj`). Another one says that the
        config counts too few."""
        behind = (f"{self.stem}layers.{self.num_layers + index}." for index in range(self.num_predicting))
        return (*self.ignored_tensors, *(f"{at}*" for at in behind if f"{at}eh_proj.weight" in names))


def weight_sources(config: FamilyConfig) -> Iterator[WeightSource]:
    """The table of names: where each tensor of a checkpoint belongs."""
    dim, vocab = config.hidden_size, config.vocab_size
    yield WeightSource(name=f"{config.stem}{config.embed_name}.weight", shape=(vocab, dim), target="embed")
    yield WeightSource(name=f"{config.stem}{config.final_norm}.weight", shape=(dim,), target="norm")
    if config.layer_norms:
        yield WeightSource(name=f"{config.stem}{config.final_norm}.bias", shape=(dim,), target="norm_bias")
    if not config.tie_embeddings:
        yield WeightSource(name=f"{config.head}.weight", shape=(vocab, dim), target="head", transpose=True)
    if config.head_bias:
        yield WeightSource(name=f"{config.head}.bias", shape=(vocab,), target="head_bias")
    for number, run in enumerate(config.blocks):
        for index in range(run.num_layers):
            row, kind = divmod(index, len(run.pattern))
            scope = CheckpointScope(
                target=f"blocks.{number}.{kind}", row=row, prefix=f"{config.stem}layers.{run.first + index}."
            )
            yield from layer_sources(config, run.pattern[kind], scope)


def layer_sources(config: FamilyConfig, layer: LayerSpec, scope: CheckpointScope) -> Iterator[WeightSource]:
    """The tensors of one layer."""
    dim, names, norms = config.hidden_size, config.norm_names, INPUT_NORMS
    if layer.output_norms:
        names, norms = (*names, *config.output_norm_names), (*norms, *OUTPUT_NORMS)
    if layer.scaled:
        yield scope.source(config.stream_scale, (1,), "stream_scale")
    for name, to in zip(names, norms, strict=True):
        yield scope.source(f"{name}.weight", (dim,), to)
        if config.layer_norms:
            yield scope.source(f"{name}.bias", (dim,), f"{to}_bias")
    yield from layer.mixer.sources(dim, scope)
    yield from layer.feed.sources(dim, scope)


def _attending(layers: tuple[LayerSpec, ...]) -> tuple[GroupedAttention | LatentAttention, ...]:
    """The mixers that attend."""
    return tuple(layer.mixer for layer in layers if not isinstance(layer.mixer, Recurrent))


def _repeats(layers: tuple[LayerSpec, ...], size: int) -> int:
    """How often the first `size` layers follow one another."""
    repeats = 1
    while layers[repeats * size : (repeats + 1) * size] == layers[:size]:
        repeats += 1
    return repeats
