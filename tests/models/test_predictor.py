"""Layers that predict further tokens: every family against its equations (oracles/predictors.py), whole sequences and
paged chunks, float32 on the CPU; and what the loader refuses."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from oracles.families import VOCAB_SIZE
from oracles.predictors import NAMES, PredictorOracle
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.layers.attention import PagedBatch, causal_attention
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS, causal_variant
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.parallel import AxisGroup
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.sharding import AXIS, ModelSharding
from routed_experts.models.decoder.decoder import embed
from routed_experts.models.drafts.predictor import Predictor, predictor_partitions
from routed_experts.models.drafts.predictor_loader import (
    check_predictor,
    load_predictor,
    num_served_modules,
    predictor_sources,
)
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.model_folder import ModelFolder

pytestmark = pytest.mark.usefixtures("fast_compilation")

LENGTH, STEPS, PADDED = 20, 3, 24
CHUNK = 8  # of which 7 rows are tokens
PAGE, PAGES = 4, 9
PLAIN = Kernels(moe=MOE_BACKENDS["reference"]), ATTENTION_BACKENDS["reference"]
NATIVE = NATIVE_KERNELS, NATIVE_ATTENTION
TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, LENGTH + 1)
IN_EVERY_RUN = "DeepseekV3", "Qwen3Next", "Ernie4_5_Moe"  # attention that is latent, gated and plain
STARTS = (LENGTH - 1, 9)  # rows that chains start at; the second overwrites slots


@pytest.fixture(scope="module")
def write_target(tmp_path_factory):
    """The oracle of a family, and its folder, written once."""

    @functools.cache
    def written(name, modules=1):
        folder = tmp_path_factory.mktemp(name)
        return PredictorOracle(name, folder, modules=modules), folder

    return written


class Drafter:
    """A predictor beside its target, as a program runs them: one call a step."""

    def __init__(self, folder, *, num_drafts=STEPS, kernels=PLAIN, dtype=jnp.float32, **spec):
        opened = ModelFolder.open(folder)
        if spec:
            predictor = dataclasses.replace(opened.config.predictor, **spec)
            opened = dataclasses.replace(opened, config=dataclasses.replace(opened.config, predictor=predictor))
        self.target = opened.load(jnp.dtype(dtype))
        self.predictor = opened.load_predictor(jnp.dtype(dtype), num_drafts=num_drafts)
        self.kernels, self.backend = kernels
        self.head = self.predictor.lm_head(self.target.lm_head())
        graphdef, self.state = nnx.split(self.predictor)

        def run(state, features, tokens, positions, valid, attend, cache, draft_index):
            embeddings = embed(opened.config, self.target.embed[...], tokens)
            hidden, recycled, cache = nnx.merge(graphdef, state)(
                features,
                embeddings,
                positions,
                valid,
                attend,
                cache,
                draft_index=draft_index,
                target_norm=self.target.norm[...],
                kernels=self.kernels,
            )
            return self.head.logits(hidden), recycled, cache

        def whole(state, features, tokens, count, draft_index):
            positions = jnp.arange(PADDED, dtype=jnp.int32)
            return run(state, features, tokens, positions, positions < count, causal, None, draft_index)[:2]

        def paged(state, features, tokens, batch, pool, draft_index):
            attend = PagedAttend(backend=self.backend, batch=batch, num_pages=PAGES)
            return run(state, features, tokens, batch.positions, batch.valid, attend, pool, draft_index)

        self._whole, self._paged = jax.jit(whole, static_argnums=4), jax.jit(paged, static_argnums=5)

    def whole(self, features, tokens, draft_index=0):
        """Scores and features of the next calls of a sequence from position 0 on."""
        count = len(tokens)
        padded = np.pad(features, ((0, PADDED - count), (0, 0))), np.pad(tokens, (0, PADDED - count))
        scores, recycled = self._whole(self.state, *map(jnp.asarray, padded), count, draft_index)
        return np.asarray(scores)[:count], np.asarray(recycled)[:count]

    def pool(self):
        """A pool in which every slot holds what no key is."""
        layout = self.predictor.cache
        return jnp.full((layout.num_layers * PAGES, PAGE, layout.rows, layout.head_dim), 3e4, jnp.float32)

    def paged(self, features, tokens, first, pool, draft_index=0):
        """The same of tokens from position `first` on, through the pool."""
        count, padded = len(tokens), 1 if len(tokens) == 1 else CHUNK
        rows = np.arange(padded)
        batch = PagedBatch(
            positions=jnp.asarray(np.where(rows < count, first + rows, 0), jnp.int32),
            token_rows=jnp.zeros(padded, jnp.int32),
            valid=jnp.asarray(rows < count),
            query_starts=jnp.asarray([0, count], jnp.int32),
            seq_lens=jnp.asarray([first + count], jnp.int32),
            page_table=jnp.asarray([[7, 2, 5, 1, 8, 3]], jnp.int32),
            decode=padded == 1,
        )
        inputs = np.pad(features, ((0, padded - count), (0, 0))), np.pad(tokens, (0, padded - count))
        scores, recycled, pool = self._paged(self.state, *map(jnp.asarray, inputs), batch, pool, draft_index)
        return np.asarray(scores)[:count], np.asarray(recycled)[:count], pool


def causal(queries, keys, values, cache, layer, features=None):
    """Attention of one sequence to itself."""
    parts = [None if part is None else part[None] for part in (queries, keys, values)]
    if features is None:
        return causal_attention(*parts, None).reshape(queries.shape), cache
    return causal_variant(*parts, None, features).reshape(*queries.shape[:2], -1), cache


def difference(scores, expected):
    """Relative to the largest score; the best tokens must agree."""
    assert scores.shape == expected.shape
    assert np.array_equal(scores.argmax(-1), expected.argmax(-1))
    return np.abs(scores - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_and_its_chains_are_those_of_the_equations(name, write_target):
    oracle, folder = write_target(name)
    hidden, drafter = oracle.hidden(TOKENS[:-1]), Drafter(folder)
    pairs = oracle.pairs(hidden, TOKENS[1:])
    scores, recycled = drafter.whole(hidden, TOKENS[1:])
    assert difference(scores, oracle.scores(oracle.outputs(pairs)[1])) < 1e-5
    for start in STARTS:
        expected, drafts = oracle.chain(pairs[: start + 1], STEPS)
        features, tokens = hidden[: start + 1], TOKENS[1 : start + 2]
        last, chain = recycled[start], [scores[start]]
        for draft in drafts[:-1]:
            features, tokens = np.concatenate([features, last[None]]), np.append(tokens, draft)
            longer, further = drafter.whole(features, tokens, draft_index=len(chain))
            chain.append(longer[-1])
            last = further[-1]
        assert difference(np.stack(chain), expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(
            name,
            kernels,
            id=f"{name}-{kind}",
            marks=[] if kind == "native" or name in IN_EVERY_RUN else pytest.mark.thorough,
        )
        for name in NAMES
        for kind, kernels in (("plain", PLAIN), ("native", NATIVE))
    ],
)
def test_paged_chunks_and_steps_are_those_of_the_equations(name, kernels, write_target):
    oracle, folder = write_target(name)
    hidden, drafter = oracle.hidden(TOKENS[:-1]), Drafter(folder, kernels=kernels)
    pairs, pool = oracle.pairs(hidden, TOKENS[1:]), drafter.pool()
    scores, recycled = [], []
    for first in range(0, LENGTH, CHUNK - 1):
        rows = slice(first, min(first + CHUNK - 1, LENGTH))
        of_chunk, further, pool = drafter.paged(hidden[rows], TOKENS[1:][rows], first, pool)
        scores, recycled = [*scores, *of_chunk], [*recycled, *further]
    assert difference(np.stack(scores), oracle.scores(oracle.outputs(pairs)[1])) < 1e-5
    for start in STARTS:
        expected, drafts = oracle.chain(pairs[: start + 1], STEPS)
        last, chain = recycled[start][None], [scores[start]]
        for step, draft in enumerate(drafts[:-1], start=1):
            of_step, last, pool = drafter.paged(last, np.array([draft]), start + step, pool, draft_index=step)
            chain.append(of_step[0])
        assert difference(np.stack(chain), expected) < 1e-5


@pytest.mark.parametrize("kernels", [PLAIN, NATIVE], ids=["plain", "native"])
@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe", "Ernie4_5_Moe", "Qwen3Next"])
def test_half_precision_has_the_dtype_of_the_weights(name, kernels, write_target):
    oracle, folder = write_target(name)
    hidden, drafter = oracle.hidden(TOKENS[:-1]), Drafter(folder, kernels=kernels, dtype=jnp.bfloat16)
    scores, recycled = drafter.whole(jnp.asarray(hidden, jnp.bfloat16), TOKENS[1:])
    expected = oracle.scores(oracle.outputs(oracle.pairs(hidden, TOKENS[1:]))[1])
    assert recycled.dtype == jnp.bfloat16
    # one expert chosen otherwise moves a row, and those that attend to it, further
    assert np.median(np.abs(scores - expected).max(-1)) < 0.03 * np.abs(expected).max()


def test_modules_of_their_own_take_their_places(write_target):
    oracle, folder = write_target("Glm4Moe", 2)
    hidden, drafter = oracle.hidden(TOKENS[:-1]), Drafter(folder, num_drafts=2)
    assert drafter.predictor.num_modules == 2 and drafter.predictor.cache.num_layers == 2
    _, normed = oracle.outputs(oracle.pairs(hidden, TOKENS[1:]))
    _, recycled = drafter.whole(hidden, TOKENS[1:])
    expected = oracle.scores(oracle.outputs(oracle.pairs(normed[:-1], TOKENS[2:], module=1), module=1)[1])
    assert difference(drafter.whole(recycled[:-1], TOKENS[2:], draft_index=1)[0], expected) < 1e-5
    assert np.abs(drafter.whole(recycled[:-1], TOKENS[2:], draft_index=0)[0] - expected).max() > 0.1
    inputs = [(hidden[:-1], TOKENS[1:-1]), (recycled[:-1], TOKENS[2:])]
    scores, pool = ([], []), drafter.pool()
    for first in range(0, LENGTH - 1, CHUNK - 1):  # by turns: neither touches the keys of the other
        rows = slice(first, min(first + CHUNK - 1, LENGTH - 1))
        for draft_index, (features, tokens) in enumerate(inputs):
            of_chunk, _, pool = drafter.paged(features[rows], tokens[rows], first, pool, draft_index=draft_index)
            scores[draft_index].extend(of_chunk)
    assert difference(np.stack(scores[0]), oracle.scores(normed)[:-1]) < 1e-5
    assert difference(np.stack(scores[1]), expected) < 1e-5


def test_chains_longer_than_the_modules_run_the_first_alone(write_target):
    _, folder = write_target("Glm4Moe", 2)
    config = ModelFolder.open(folder).config
    assert [num_served_modules(config, drafts) for drafts in (1, 2, 3, 7)] == [1, 2, 1, 1]
    assert Drafter(folder, num_drafts=3).predictor.num_modules == 1


@pytest.mark.parametrize("variant", [dict(hidden_first=True), dict(raw_in=True), dict(raw_out=True)])
def test_the_constants_of_a_family_change_what_they_say(variant, write_target):
    oracle, folder = write_target("Glm4Moe")
    drafter, order = Drafter(folder, **variant), dict(hidden_first=variant.get("hidden_first", False))
    raw_in, raw_out = (variant.get(key, False) for key in ("raw_in", "raw_out"))
    normed, raw = oracle.hidden(TOKENS[:-1]), oracle.hidden(TOKENS[:-1], raw=True)
    assert drafter.predictor.tapped_layers == ((3,) if raw_in else ())
    hidden = drafter.predictor.features(normed, [raw] if raw_in else [], kernels=drafter.kernels)
    expected, drafts = oracle.chain(
        oracle.pairs(raw if raw_in else normed, TOKENS[1:], **order), 1, raw_out=raw_out, **order
    )
    first, recycled = drafter.whole(hidden, TOKENS[1:])
    second, _ = drafter.whole(np.concatenate([hidden, recycled[-1:]]), np.append(TOKENS[1:], drafts[0]))
    assert difference(np.stack([first[-1], second[-1]]), expected) < 1e-5
    usual, _ = oracle.chain(oracle.pairs(normed, TOKENS[1:]), 1)
    assert np.abs(usual - expected).max() > 0.1


def loose(folder, tmp_path, change=lambda tensors: tensors):
    """The config, and a checkpoint of the modules' tensors alone, changed."""
    config, tensors = ModelFolder.open(folder).config, load_file(folder / "model.safetensors")
    names = {source.name for source in predictor_sources(config, tensors)}
    tmp_path.mkdir(exist_ok=True)
    save_file(change({name: tensors[name] for name in names}), tmp_path / "model.safetensors")
    return config, Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]
)
def test_every_tensor_that_is_missing_or_misshapen_is_named(name, write_target, tmp_path):
    _, folder = write_target(name)
    config, whole = loose(folder, tmp_path)
    check_predictor(config, whole)
    for at in whole.names():
        missing = loose(
            folder, tmp_path / "missing", lambda tensors, at=at: {k: t for k, t in tensors.items() if k != at}
        )
        at = f"{at.rpartition('.')[0]}." if at.endswith(("gate_up_proj", "down_proj")) else at  # fused: of all experts
        with pytest.raises(CheckpointError, match="missing") as error:
            check_predictor(*missing)
        assert at in str(error.value)
    for at, (shape, _) in whole.names().items():
        larger = np.zeros((shape[0] + 1, *shape[1:]), np.float32)
        misshapen = loose(folder, tmp_path / "misshapen", lambda tensors, at=at, to=larger: tensors | {at: to})
        with pytest.raises(CheckpointError) as error:
            check_predictor(*misshapen)
        assert f"1 misshapen ({at} is {list(larger.shape)}, expected {list(shape)})" in str(error.value)


@pytest.mark.parametrize(
    ("name", "surplus"),
    [
        ("DeepseekV3", "model.layers.4.self_attn.q_proj.bias"),
        ("Glm4Moe", "model.layers.4.shared_head.norm.bias"),
        ("Glm4MoeLite", "model.layers.4.mlp.experts.16.up_proj.weight"),
        ("BailingMoeV2", "model.layers.4.shared_head.norm.weight"),
        ("Ernie4_5_Moe", "model.mtp_block.1.input_layernorm.weight"),
        ("Ernie4_5_Moe", "model.mtp_norm.0.weight"),
        ("Qwen3Next", "mtp.layers.1.input_layernorm.weight"),
        ("Qwen3_5Moe", "mtp.embed_tokens.weight"),
    ],
)
def test_a_surplus_tensor_is_named(name, surplus, write_target, tmp_path):
    _, folder = write_target(name)
    added = loose(folder, tmp_path, lambda tensors: tensors | {surplus: np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError) as error:
        load_predictor(*added, jnp.dtype(jnp.float32))
    assert f"1 unexpected ({surplus})" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_without_such_layers_offers_another_drafter(name, write_target, tmp_path):
    _, folder = write_target(name)
    config, checkpoint = loose(folder, tmp_path, lambda tensors: {"model.norm.weight": np.zeros(64, np.float32)})
    with pytest.raises(ConfigError) as error:
        load_predictor(config, checkpoint, jnp.dtype(jnp.float32))
    assert type(error.value) is ConfigError and "NGRAM" in str(error.value)
    first = next(iter(predictor_sources(config, [])))
    assert first.name in str(error.value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("DeepseekV3", dict(num_nextn_predict_layers=0), ["model.layers.4.eh_proj.weight", "counts none", "NGRAM"]),
        ("Ernie4_5_Moe", dict(num_nextn_predict_layers=0), ["mtp_linear_proj", "counts none", "NGRAM"]),
        ("Qwen3_5Moe", dict(mtp_num_hidden_layers=0), ["mtp.fc.weight", "NGRAM"]),
        ("Qwen3_5Moe", dict(mtp_use_dedicated_embeddings=True), ["mtp_use_dedicated_embeddings=true", "NGRAM"]),
    ],
)
def test_a_config_without_layers_that_are_served_is_refused(name, values, words, write_target, tmp_path):
    _, folder = write_target(name)
    config = json.loads((folder / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = ModelFolder.open(tmp_path, load_format="dummy")
    for load in (opened.check_predictor, lambda: opened.load_predictor(jnp.dtype(jnp.float32))):
        with pytest.raises(ConfigError) as error:
            load()
        assert all(word in str(error.value) for word in words), error.value


def test_minimax_counts_modules_that_its_files_do_not_hold(tmp_path):
    config = dict(
        architectures=["MiniMaxM2ForCausalLM"],
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        num_mtp_modules=3,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"counts 3 of them.*NGRAM"):
        ModelFolder.open(tmp_path, load_format="dummy").check_predictor()


def test_copies_of_embeddings_and_head_are_ignored(write_target, tmp_path):
    _, folder = write_target("DeepseekV3")
    tensors = load_file(folder / "model.safetensors")
    copies = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": tensors["lm_head.weight"]}
    copies = {f"model.layers.4.{at}.weight": tensor.copy() for at, tensor in copies.items()}
    check_predictor(*loose(folder, tmp_path, lambda tensors: tensors | copies))


def test_weights_of_the_target_do_not_depend_on_the_layers_behind_it(write_target, tmp_path):
    _, folder = write_target("Glm4Moe")
    own = {source.name for source in predictor_sources(ModelFolder.open(folder).config, [])}
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name not in own}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    without, beside = (ModelFolder.open(path).load(jnp.dtype(jnp.float32)) for path in (tmp_path, folder))
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(without), nnx.state(beside)))


def test_fused_and_single_experts_are_the_same_arrays(write_target, tmp_path):
    _, folder = write_target("Glm4Moe")

    def fuse(tensors):
        at = "model.layers.4.mlp.experts."
        parts = {
            part: np.stack([tensors.pop(f"{at}{expert}.{part}_proj.weight") for expert in range(16)])
            for part in ("gate", "up", "down")
        }
        both = np.concatenate([parts["gate"], parts["up"]], axis=1)
        return tensors | {f"{at}gate_up_proj": both, f"{at}down_proj": parts["down"]}

    single, fused = (
        load_predictor(*loose(folder, tmp_path / str(number), change), jnp.dtype(jnp.float32))
        for number, change in enumerate([lambda tensors: tensors, fuse])
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(single), nnx.state(fused)))


def test_a_folder_with_a_vision_tower_has_them_at_the_top(write_target, tmp_path):
    _, folder = write_target("Qwen3_5Moe")
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors | {"model.visual.w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    outer = dict(architectures=["Qwen3_5MoeForConditionalGeneration"], text_config=text, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(outer))
    nested, alone = (ModelFolder.open(path).load_predictor(jnp.dtype(jnp.float32)) for path in (tmp_path, folder))
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(nested), nnx.state(alone)))


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_have_the_shapes_of_loaded_ones(name, write_target):
    _, folder = write_target(name)
    drawn, loaded = (
        ModelFolder.open(folder, load_format=form).load_predictor(jnp.dtype(jnp.bfloat16)) for form in ("dummy", "auto")
    )
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.state(model)) for model in (drawn, loaded)]
    assert shapes[0] == shapes[1]
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(nnx.state(drawn)))


@pytest.mark.devices(2)
@pytest.mark.parametrize("by_expert", [False, True], ids=["by width", "by expert"])
@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe", "Qwen3Next"])
def test_two_devices_compute_what_one_does(name, by_expert, write_target):
    oracle, folder = write_target(name)
    hidden, opened, dtype = oracle.hidden(TOKENS[:-1]), ModelFolder.open(folder), jnp.dtype(jnp.float32)
    parallel = ParallelConfig(devices=2, expert_parallel=by_expert)
    partitions = predictor_partitions(opened.config, 1, by_expert=by_expert)
    shards = ModelSharding.create(partitions, parallel)
    state = nnx.state(opened.load_predictor(dtype, shards=shards))
    local = Predictor(opened.config.shard(parallel), rngs=nnx.Rngs(0), dtype=dtype, num_modules=1)
    graphdef, _ = nnx.split(local)
    kernels = PLAIN[0].with_group(AxisGroup(axis=AXIS, count=2, expert_parallel=by_expert))
    embeddings, norm = (oracle.embeddings(TOKENS[1:]), oracle.target.model.norm.weight.detach().numpy())
    arrays = [jnp.asarray(array, jnp.float32) for array in (hidden, embeddings, norm)]
    rows = jnp.arange(LENGTH, dtype=jnp.int32)

    def program(state, features, embeddings, norm):
        own = nnx.merge(graphdef, state)
        options = dict(draft_index=0, target_norm=norm, kernels=kernels)
        return own(features, embeddings, rows, rows >= 0, causal, None, **options)[0]

    specs = nnx.from_flat_state(
        [
            (path, leaf.replace(shards.spec(".".join(map(str, path)), leaf.ndim)))
            for path, leaf in nnx.to_flat_state(state)
        ]
    )
    where = (specs, *[PartitionSpec()] * 3)
    run = jax.jit(jax.shard_map(program, mesh=shards.mesh, in_specs=where, out_specs=PartitionSpec(), check_vma=False))
    expected = oracle.outputs(oracle.pairs(hidden, TOKENS[1:]))[1]
    assert len(partitions) >= 4
    assert difference(oracle.scores(np.asarray(run(state, *arrays))), oracle.scores(expected)) < 1e-5
