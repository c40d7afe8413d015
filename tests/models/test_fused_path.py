"""The fused path is chosen by what layers need and what kernels say that they have, and by nothing else."""

import dataclasses

import pytest

from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.layers.parallel import AxisGroup
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.decoder.dense_beside_sparse import DenseBesideSparse
from routed_experts.models.decoder.family_config import LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.fused_path import block_kernel, describe_path
from routed_experts.models.decoder.grouped_attention import PROJECTION_BIASES, GroupedAttention
from support.qwen3_configs import qwen3_config

CONFIG = qwen3_config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    mlp_only_layers=[0],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)
ROUTER = CONFIG.layers[1].feed.router
ROTARY = CONFIG.layers[1].mixer.rotary
BESIDE = DenseBesideSparse(
    **{field.name: getattr(CONFIG.layers[1].feed, field.name) for field in dataclasses.fields(Sparse)},
    dense=Dense(width=24),
    eps=1e-6,
    norm_sources=("a", "b", "c"),
    router_scale="d",
    expert_scale="e",
)
GPU_KERNELS = gpu_kernels(interpret=False)
GPU_ATTENTION = gpu_attention_backend(interpret=False)
PLATFORMS = {"cpu": (NATIVE_KERNELS, NATIVE_ATTENTION), "gpu": (GPU_KERNELS, GPU_ATTENTION)}
MIXERS = {
    "no q/k norm": dict(qk_norm=""),
    "a q/k norm of all heads": dict(qk_norm="whole"),
    "a q/k norm without a scale": dict(qk_norm="bare"),
    "an offset q/k norm": dict(norm_offset=1.0),
    "no rotary positions": dict(rotary=None),
    "partial rotary positions": dict(rotary=dataclasses.replace(ROTARY, inverse=ROTARY.inverse[:2])),
    "interleaved rotary positions": dict(rotary=dataclasses.replace(ROTARY, interleaved=True)),
    "a norm after rotary positions": dict(norm_after_rope=True),
    "input biases": dict(bias_in=True),
    "an output bias": dict(bias_out=True),
    "gated heads": dict(gated=True),
    "clipped projections": dict(clip=2.0),
    "tuned queries": dict(tuning=(16.0, 0.1)),
    "a sliding window": dict(window=8),
    "chunks": dict(chunk=8),
    "sinks": dict(sinks=True),
    "its own scale": dict(scale=0.1),
    "several epsilons": dict(eps=1e-5),
    "a norm of values": dict(value_norm=True),
    "keys that are values": dict(keys_are_values=True),
}
FEEDS = {
    "shared experts": dict(shared_width=8),
    "gated shared experts": dict(shared_gated=True),
    "a float32 router": dict(wide_router=True),
    "a router bias": dict(router_bias=True),
    "biased experts": dict(biased=True),
    "clamped swiglu experts": dict(activation="clamped swiglu"),
    "tanh gelu experts": dict(activation="tanh gelu"),
    "weighted expert inputs": dict(weight_inputs=True),
    "placed experts": dict(replicas=2),
}
STREAMS = {
    "layer normalisation": dict(layer_norms=True),
    "offset norms": dict(norm_offset=1.0),
    "a residual scale": dict(residual_scale=0.5),
}
LAYERS = {
    "norms of outputs": dict(output_norms=True),
    "a scale of the stream": dict(scaled=True),
    "a dense network beside experts": dict(feed=BESIDE),
}
ROUTERS = {
    "sigmoid": dict(scoring_func="sigmoid"),
    "logits": dict(scoring_func="logits"),
    "scaled": dict(scale=2.0),
    "groups": dict(num_groups=4, topk_group=2),
    "a selection bias": dict(biased=True),
}


def changed(*, mixer=None, feed=None, layer=None, **stream):
    """The config whose MoE layers are changed so."""
    layers = [
        plain
        if isinstance(plain.feed, Dense)
        else dataclasses.replace(
            plain,
            mixer=dataclasses.replace(plain.mixer, **(mixer or {})),
            **{"feed": dataclasses.replace(plain.feed, **(feed or {}))} | (layer or {}),
        )
        for plain in CONFIG.layers
    ]
    return dataclasses.replace(CONFIG, layers=tuple(layers), **stream)


def every_change():
    for word, change in MIXERS.items():
        yield word, changed(mixer=change)
    for word, change in FEEDS.items():
        yield word, changed(feed=change)
    for word, change in STREAMS.items():
        yield word, changed(**change)
    for word, change in LAYERS.items():
        yield word, changed(layer=change)
    other_rows = dataclasses.replace(CONFIG.layers[0].mixer, head_dim=16)
    first = dataclasses.replace(CONFIG.layers[0], mixer=other_rows)
    yield "cache rows of several shapes", dataclasses.replace(CONFIG, layers=(first, *CONFIG.layers[1:]))


CHANGES = dict(every_change())


def kernels_of(config, platform, backends=None):
    """The kernel of each block; `backends`: kernels and attention, by default the platform's."""
    kernels, attention = backends or PLATFORMS[platform]
    return [block_kernel(config, block, kernels, attention) for block in config.blocks]


def with_features(platform, features):
    """The platform's kernels and attention, as if they had these features."""
    kernels, attention = PLATFORMS[platform]
    part = "layer_stack" if platform == "cpu" else "fused_layer"
    kernels = dataclasses.replace(kernels, **{part: dataclasses.replace(getattr(kernels, part), features=features)})
    return kernels, dataclasses.replace(attention, fused_features=features)


def declared_features(platform):
    """What the platform's kernels of whole layers have."""
    if platform == "cpu":
        return NATIVE_KERNELS.layer_stack.features
    return GPU_KERNELS.fused_layer.features | GPU_ATTENTION.fused_features


def test_plain_layers_with_head_norms_run_in_the_platforms_kernel():
    assert kernels_of(CONFIG, "cpu") == [NATIVE_KERNELS.layer_stack] * 2
    assert kernels_of(CONFIG, "gpu") == [None, GPU_KERNELS.fused_layer]


def is_mixers(config, word, platform):
    """Whether the feature is of a mixer, which on a GPU runs in pieces where attention has no kernel of it."""
    return platform == "gpu" and word in config.layers[1].mixer.stack_needs


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("word", CHANGES)
def test_a_feature_that_no_kernel_declares_leaves_the_fused_path_and_one_that_is_declared_does_not(platform, word):
    config = CHANGES[word]
    needs = config.stack_needs(config.blocks[1])
    assert word in needs
    of_mixer = is_mixers(config, word, platform)
    assert (kernels_of(config, platform)[1] is not None) == (of_mixer or word in declared_features(platform))
    assert kernels_of(config, platform, with_features(platform, needs))[1] is not None
    assert (kernels_of(config, platform, with_features(platform, needs - {word}))[1] is not None) == of_mixer


@pytest.mark.parametrize("word", [word for word in CHANGES if is_mixers(CHANGES[word], word, "gpu")])
def test_a_mixer_that_attention_does_not_fuse_is_said_to_run_in_pieces(word):
    config, (kernels, attention) = CHANGES[word], PLATFORMS["gpu"]
    path = describe_path(config, kernels, attention)
    fused = config.layers[1].mixer.is_fused_by(attention)
    assert fused == (word in attention.fused_features or word in PROJECTION_BIASES)
    assert path.startswith("fused run, up to 512 tokens" if fused else "fused feed-forward, up to 512 tokens; pieces: ")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("change", [dict(replicas=2), dict(bounded=True), dict(local_experts=4)], ids=str)
def test_experts_that_are_placed_in_any_way_leave_the_fused_path(platform, change):
    config = changed(feed=change)
    assert "placed experts" in config.stack_needs(config.blocks[1])
    assert kernels_of(config, platform)[1] is None
    backends = with_features(platform, declared_features(platform) | {"placed experts"})
    assert kernels_of(config, platform, backends)[1] is not None, "nothing but this need is in the way"


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("law", ROUTERS)
def test_a_router_that_the_kernel_does_not_implement_leaves_the_fused_path(platform, law):
    config = changed(feed=dict(router=dataclasses.replace(ROUTER, **ROUTERS[law])))
    kernels, attention = with_features(platform, frozenset({"a selection bias"}))
    assert kernels_of(config, platform, (kernels, attention))[1] is not None, "both platforms' kernels have every law"
    part = "layer_stack" if platform == "cpu" else "router"
    plain = {part: dataclasses.replace(getattr(kernels, part), supports=lambda spec: spec.is_plain)}
    assert kernels_of(config, platform, (dataclasses.replace(kernels, **plain), attention))[1] is None


def test_every_field_of_a_layer_is_a_need_or_a_size():
    """A field that a part gains is one more case of the tests above."""
    sizes = {"num_heads", "num_kv_heads", "head_dim", "names", "width", "router", "local_experts", "bounded", "coded"}
    parts = ((GroupedAttention, MIXERS), (Sparse, FEEDS), (LayerSpec, LAYERS | {"": dict(mixer=None)}))
    for part, cases in parts:
        covered = {name for change in cases.values() for name in change}
        assert {field.name for field in dataclasses.fields(part)} == covered | (
            sizes & {field.name for field in dataclasses.fields(part)}
        )


def alternating(**changes):
    """MoE layers, every other one changed so."""
    plain = CONFIG.layers[1]
    other = dataclasses.replace(
        plain, **{part: dataclasses.replace(getattr(plain, part), **fields) for part, fields in changes.items()}
    )
    return dataclasses.replace(CONFIG, layers=(plain, other) * 2)


def test_layers_that_alternate_run_as_one_where_only_traits_differ():
    alternate = alternating(mixer=dict(window=8))
    assert [len(block.pattern) for block in alternate.blocks] == [2]
    assert kernels_of(alternate, "cpu") == [NATIVE_KERNELS.layer_stack] and kernels_of(alternate, "gpu") == [
        GPU_KERNELS.fused_layer
    ]
    for changes in (
        dict(feed=dict(width=24)),
        dict(feed=dict(shared_width=8)),
        dict(feed=dict(router=dataclasses.replace(ROUTER, scale=2.0))),
        dict(mixer=dict(num_kv_heads=4)),
        dict(mixer=dict(rotary=dataclasses.replace(ROTARY, inverse=ROTARY.inverse[:2]))),
    ):
        assert kernels_of(alternating(**changes), "cpu") == [None], changes
    dense = dataclasses.replace(CONFIG, layers=CONFIG.layers[:2] * 2)
    assert [len(block.pattern) for block in dense.blocks] == [2]
    assert kernels_of(dense, "cpu") == [NATIVE_KERNELS.layer_stack] and kernels_of(dense, "gpu") == [None]


def test_a_share_of_a_layer_has_no_kernel_of_whole_layers():
    kernels = NATIVE_KERNELS.with_group(AxisGroup(axis="tensor", count=2))
    config = CONFIG.shard(ParallelConfig(2))
    assert kernels_of(config, "cpu", (kernels, NATIVE_ATTENTION)) == [None, None]


def test_the_path_of_a_model_is_said_in_words():
    assert describe_path(CONFIG, NATIVE_KERNELS, NATIVE_ATTENTION) == "fused run"
    assert (
        describe_path(CONFIG, GPU_KERNELS, GPU_ATTENTION)
        == f"fused run, up to {GPU_KERNELS.fused_layer.max_tokens} tokens"
    )
    dense = dataclasses.replace(CONFIG, layers=CONFIG.layers[:1] * 2)
    assert describe_path(dense, NATIVE_KERNELS, NATIVE_ATTENTION) == "fused run"
    scaled = changed(layer_norms=True)
    expected = "pieces: projections, q/k norm, attention, router, experts"
    assert describe_path(scaled, NATIVE_KERNELS, NATIVE_ATTENTION) == expected
