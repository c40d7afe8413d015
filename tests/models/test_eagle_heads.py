"""EAGLE heads against the equations: whole sequences, recycled steps, and chunks on pages."""

import copy
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from oracles.eagle_heads import LLAMA3, D, HeadCase, TorchHead, V, eagle3_case, eagle_case, target_config
from routed_experts.layers.attention import PagedBatch, attend_all
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.lm_head import LmHead
from routed_experts.layers.native.ops import NATIVE_KERNELS
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.parallel import AxisGroup
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.sharding import AXIS, ModelSharding
from routed_experts.models.drafts.draft_folder import DraftFolder
from support.kernels import ATTENTION, MOE

pytestmark = pytest.mark.usefixtures("fast_compilation")

REFERENCE = Kernels(moe=MOE["tiled"])
LENGTH, STEPS, PAGE, WIDTH = 11, 3, 4, 4
WIDE = 24  # of a target that is wider than its head
Spelling = dict[str, object]

CASES: dict[str, tuple[HeadCase, Spelling]] = {
    "plain": (eagle3_case(), {}),
    "fc_norm": (eagle3_case(fc_norm=True), {}),
    "norm_before_residual": (eagle3_case(norm_before_residual=True), {}),
    "no norm of the output": (eagle3_case(norm_output=False), {}),
    "reduced vocabulary": (eagle3_case(draft_vocab_size=17), {}),
    "own embedding": (eagle3_case(own_embedding=True), {}),
    "biases": (eagle3_case(attention_bias=True), {}),
    "the target's head": (eagle3_case(own_head=False), {}),
    "wide target": (eagle3_case(own_embedding=True, target_hidden_size=WIDE, fc_norm=True), {}),
    "llama3 positions": (eagle3_case(rope_scaling=LLAMA3), {}),
    "five streams": (
        eagle3_case(streams=5, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 5, 6, 8]}),
        {},
    ),
    "layers.0 names": (eagle3_case(), {"layer": "layers.0."}),
    "model prefix": (eagle3_case(draft_vocab_size=17), {"prefix": "model."}),
    "both": (eagle3_case(), {"prefix": "model.", "layer": "layers.0."}),
    "speculators": (
        eagle3_case(draft_vocab_size=17, norm_before_residual=True, own_embedding=True),
        {"layer": "layers.0.", "speculators": True},
    ),
    "eagle 1": (eagle_case(), {}),
    "eagle 1 without a bias": (eagle_case(bias=False, copied_embedding=False), {}),
    "eagle 1 of two layers": (eagle_case(num_hidden_layers=2, attention_bias=True), {"prefix": "model."}),
}


@dataclass
class Sequence:
    """A sequence of the target: its tokens' successors, final hidden states, and the streams of tapped layers."""

    successors: np.ndarray
    hidden: np.ndarray
    streams: list[np.ndarray]


@dataclass
class Target:
    """The served model's arrays."""

    embed: np.ndarray
    head: np.ndarray
    width: int

    @staticmethod
    def of(case: HeadCase, seed: int = 5) -> "Target":
        rng, width = np.random.default_rng(seed), case.config.get("target_hidden_size", D)
        shape = (V, width)
        head = rng.standard_normal(shape) / np.sqrt(width)
        return Target(rng.standard_normal(shape).astype(np.float32), head.astype(np.float32), width)

    def sequence(self, length: int, streams: int, seed: int) -> Sequence:
        rng = np.random.default_rng(seed)
        rows = (rng.standard_normal((streams + 1, length, self.width)) * 2).astype(np.float32)
        return Sequence(rng.integers(0, V, length), rows[0], list(rows[1:]))

    @property
    def lm_head(self) -> LmHead:
        return LmHead(matrix=jnp.asarray(self.head.T))


def write_and_load(name: str, folder, dtype: str = "float32", **how):
    case, spelling = CASES[name]
    target = Target.of(case)
    path = case.write(folder / "head", **spelling)
    opened = DraftFolder.open(path, target_config(target.width), layers=how.pop("layers", None))
    return case, target, opened.load(jnp.dtype(dtype), **how)


def dense_attend(queries, keys, values, cache, layer):
    """Keys and values of a sequence at their positions; `cache` is (arrays [2, L, S, G, C], positions [N])."""
    arrays, positions = cache
    arrays = arrays.at[0, layer, positions].set(keys).at[1, layer, positions].set(values)
    mask = jnp.arange(arrays.shape[2])[None] <= positions[:, None]
    rows = (jnp.broadcast_to(part[layer], (len(positions), *part[layer].shape)) for part in arrays)
    return attend_all(queries, *rows, mask), (arrays, positions)


def run_rows(
    head, target, kernels, attend, cache, features, tokens, positions, valid=None, dtype=jnp.float32, matrix=None
):
    """One call: scores, recycled features, the cache."""
    tokens, positions = jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32)
    valid = jnp.ones(len(positions), bool) if valid is None else jnp.asarray(valid)
    embeddings = jnp.take(jnp.asarray(target.embed, dtype), tokens, axis=0)
    hidden, recycled, cache = head(
        features,
        embeddings,
        positions,
        valid,
        attend,
        cache,
        draft_index=0,
        target_norm=jnp.ones(target.width),
        kernels=kernels,
        tokens=tokens,
    )
    lm_head = target.lm_head if matrix is None else LmHead(matrix=matrix)
    return head.lm_head(lm_head).logits(hidden, kernels.lm_head), recycled, cache


def named_id(head, draft_id: int) -> int:
    ids = head.target_ids()
    return int(draft_id if ids is None else ids[draft_id])


def features_of(head, sequence, kernels=REFERENCE):
    rows = [jnp.asarray(rows) for rows in (sequence.hidden, *sequence.streams)]
    return head.features(rows[0], rows[1:], kernels=kernels)


def run_whole(head, target, sequence, kernels=REFERENCE) -> list[np.ndarray]:
    """Scores of the whole sequence, then of each recycled step behind its last token."""
    length, layout = len(sequence.successors), head.cache
    arrays = jnp.full((2, layout.num_layers, length + STEPS, layout.num_kv_heads, layout.head_dim), jnp.nan)
    positions, tokens, features = np.arange(length), sequence.successors, features_of(head, sequence, kernels)
    outs = []
    for step in range(STEPS + 1):
        cache = (arrays, jnp.asarray(positions, jnp.int32))
        scores, recycled, (arrays, _) = run_rows(
            head, target, kernels, dense_attend, cache, features, tokens, positions
        )
        outs.append(np.asarray(scores))
        features, tokens = recycled[-1:], [named_id(head, int(scores[-1].argmax()))]
        positions = np.array([length + step])
    return outs


def run_oracle(case, target, sequence) -> list[np.ndarray]:
    oracle = TorchHead(case, target.embed, target.head)
    features, tokens, first = oracle.features(sequence.hidden, sequence.streams), sequence.successors, 0
    outs = []
    for _ in range(STEPS + 1):
        scores, recycled = oracle.call(features, tokens, first)
        outs.append(scores.numpy())
        first += len(tokens)
        features, tokens = recycled[-1:], np.array([oracle.target_id(int(scores[-1].argmax()))])
    return outs


def assert_same(outs, expected, tolerance=1e-5):
    for rows, want in zip(outs, expected, strict=True):
        np.testing.assert_allclose(rows, want, atol=tolerance, rtol=0)
        np.testing.assert_array_equal(rows.argmax(1), want.argmax(1))


@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_its_equations_in_whole_sequences_and_recycled_steps(tmp_path, name):
    case, target, head = write_and_load(name, tmp_path)
    sequence = target.sequence(LENGTH, len(head.tapped_layers), 7)
    expected = run_oracle(case, target, sequence)
    assert 0.3 < np.concatenate(expected).std() < 5  # large enough for a tolerance of 1e-5 to mean something
    assert_same(run_whole(head, target, sequence), expected)


def changed(case: HeadCase, **changes) -> HeadCase:
    return HeadCase(case.config | changes, case.tensors)


WRONG = {  # the same tensors, read with one rule less
    "fc_norm": {"fc_norm": False},
    "norm_before_residual": {"norm_before_residual": False},
    "plain": {"norm_output": False},
    "biases": {"attention_bias": False},
    "llama3 positions": {"rope_scaling": None},
    "eagle 1": {"bias": False},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_rule_that_is_left_out(tmp_path, name):
    case, target, head = write_and_load(name, tmp_path)
    sequence = target.sequence(LENGTH, len(head.tapped_layers), 7)
    expected = run_oracle(changed(case, **WRONG[name]), target, sequence)
    with pytest.raises(AssertionError):
        assert_same(run_whole(head, target, sequence)[:1], expected[:1], tolerance=1e-3)


class Pages:
    """A pool of pages for two requests, and steps of any tokens on it. Unwritten slots hold NaN."""

    TABLE = ((3, 5, 7, 8), (2, 9, 4, 6))
    PAGES = 12

    def __init__(self, head, target, kernels, attention, dtype="float32"):
        self.graphdef, self.state = nnx.split(head)
        self.target, self.kernels, self.attention, self.dtype = target, kernels, attention, jnp.dtype(dtype)
        layout = head.cache
        self.pool = jnp.full((layout.num_layers * self.PAGES, PAGE, layout.rows, layout.head_dim), jnp.nan, self.dtype)
        self._run = jax.jit(self._traced)

    def _traced(self, state, pool, batch, features, tokens):
        head = nnx.merge(self.graphdef, state)
        attend = PagedAttend(backend=self.attention, batch=batch, num_pages=self.PAGES)
        return run_rows(
            head,
            self.target,
            self.kernels,
            attend,
            pool,
            features,
            tokens,
            batch.positions,
            batch.valid,
            self.dtype,
        )

    def step(self, ranges, features, tokens, *, padded: int, decode: bool = False):
        """Run rows [first, end) of each request; features and tokens are theirs, one after another. Returns scores and
        recycled features of each request."""
        sizes = [end - first for first, end in ranges]
        total = sum(sizes)
        pad = padded - total
        positions = np.concatenate([np.arange(*bounds) for bounds in ranges] + [np.zeros(pad, int)])
        batch = PagedBatch(
            positions=jnp.asarray(positions, jnp.int32),
            token_rows=jnp.asarray(np.repeat([0, 1, 2], [*sizes, pad]), jnp.int32),
            valid=jnp.arange(padded) < total,
            query_starts=jnp.asarray([0, sizes[0], total, padded if decode else total], jnp.int32),
            seq_lens=jnp.asarray([*(end for _, end in ranges), 0], jnp.int32),
            page_table=jnp.asarray([*self.TABLE, (0,) * WIDTH], jnp.int32),
            decode=decode,
        )
        features = jnp.pad(jnp.concatenate(features), ((0, pad), (0, 0)))
        tokens = jnp.asarray(np.pad(np.concatenate(tokens), (0, pad)), jnp.int32)
        scores, recycled, self.pool = self._run(self.state, self.pool, batch, features, tokens)
        cuts = sizes[0], total
        return np.split(np.asarray(scores), cuts)[:2], jnp.split(recycled, cuts)[:2]


def run_paged(head, target, sequences, kernels, attention, cuts, dtype="float32") -> list[list[np.ndarray]]:
    """Scores of two sequences that are cut into chunks, and of recycled steps; each as `run_whole` returns them."""
    pages = Pages(head, target, kernels, attention, dtype)
    features = [features_of(head, sequence, kernels) for sequence in sequences]
    first, parts = [0, 0], ([], [])
    for ends in cuts:
        ranges = list(zip(first, ends, strict=True))
        rows = [part[slice(*bounds)] for part, bounds in zip(features, ranges, strict=True)]
        tokens = [sequence.successors[slice(*bounds)] for sequence, bounds in zip(sequences, ranges, strict=True)]
        scores, recycled = pages.step(ranges, rows, tokens, padded=16)
        for part, block in zip(parts, scores, strict=True):
            part.append(block)
        first = ends
    outs, scores = [[np.concatenate(part)] for part in parts], [part[-1] for part in parts]
    for step in range(STEPS):
        tokens = [np.array([named_id(head, int(block[-1].argmax()))]) for block in scores]
        ranges = [(end + step, end + step + 1) for end in first]
        scores, recycled = pages.step(ranges, [rows[-1:] for rows in recycled], tokens, padded=3, decode=True)
        for out, block in zip(outs, scores, strict=True):
            out.append(block)
    return outs


CUTS = [(5, 1), (6, 8), (11, 9)]  # ends of the chunks of two sequences: within pages, at their border, of one token


ON_PAGES = ("llama3 positions", "speculators", "eagle 1 of two layers")  # others differ in what has no pages


@pytest.mark.parametrize(
    "name", [name if name in ON_PAGES else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_chunks_on_pages_are_the_whole_sequence(tmp_path, name):
    _, target, head = write_and_load(name, tmp_path)
    sequences = [target.sequence(length, len(head.tapped_layers), seed) for length, seed in ((11, 7), (9, 8))]
    paged = run_paged(head, target, sequences, REFERENCE, ATTENTION["paged"], CUTS)
    for outs, sequence in zip(paged, sequences, strict=True):
        assert_same(outs, run_whole(head, target, sequence))


@pytest.mark.parametrize("name", ["speculators", "biases", "eagle 1 of two layers"])
def test_native_kernels_compute_the_same_head(tmp_path, name):
    _, target, head = write_and_load(name, tmp_path)
    sequences = [target.sequence(length, len(head.tapped_layers), seed) for length, seed in ((11, 7), (9, 8))]
    paged = run_paged(head, target, sequences, NATIVE_KERNELS, ATTENTION["native"], CUTS)
    for outs, sequence in zip(paged, sequences, strict=True):
        assert_same(outs, run_whole(head, target, sequence))


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", ["speculators", "eagle 1"])
def test_a_head_of_half_precision_is_near_its_equations(tmp_path, name, kernels):
    case, target, head = write_and_load(name, tmp_path, "bfloat16")
    rounded = copy.deepcopy(case)
    for tensor, array in case.tensors.items():
        if array.dtype == np.float32:
            rounded.tensors[tensor] = np.asarray(jnp.asarray(array, jnp.bfloat16).astype(jnp.float32))
    sequences = [target.sequence(length, len(head.tapped_layers), seed) for length, seed in ((11, 7), (9, 8))]
    bundle, attention = (REFERENCE, "paged") if kernels == "reference" else (NATIVE_KERNELS, "native")
    paged = run_paged(head, target, sequences, bundle, ATTENTION[attention], CUTS, "bfloat16")
    for outs, sequence in zip(paged, sequences, strict=True):
        expected = run_oracle(rounded, target, sequence)
        np.testing.assert_allclose(outs[0], expected[0], atol=0.1, rtol=0)
        assert np.abs(outs[0] - expected[0]).mean() < 0.02


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    "name",
    ["speculators", pytest.param("biases", marks=pytest.mark.thorough), "the target's head", "eagle 1 of two layers"],
)
def test_a_head_on_two_devices_computes_the_same(tmp_path, name):
    _, target, head = write_and_load(name, tmp_path)
    sequence, parallel = target.sequence(LENGTH, len(head.tapped_layers), 7), ParallelConfig(devices=2)
    folder = DraftFolder.open(tmp_path / "head", target_config(target.width))
    shards = ModelSharding.create(folder.config.partitions(), parallel)
    assert shards is not None
    part = folder.load(jnp.dtype("float32"), shards=shards)
    part.config = part.config.shard(parallel)
    graphdef, state = nnx.split(part)
    flat = nnx.to_flat_state(state)
    specs = nnx.from_flat_state(
        [(at, leaf.replace(shards.spec(".".join(map(str, at)), leaf.ndim))) for at, leaf in flat]
    )
    kernels = REFERENCE.with_group(AxisGroup(axis=AXIS, count=2))
    layout, positions = part.cache, jnp.arange(LENGTH, dtype=jnp.int32)
    shape = (2, layout.num_layers, LENGTH, layout.num_kv_heads, layout.head_dim)
    head_part = jnp.split(jnp.asarray(target.head.T), 2)

    def scored(state):
        own = nnx.merge(graphdef, state)
        features, cache = features_of(own, sequence, kernels), (jnp.zeros(shape), positions)
        matrix = jnp.stack(head_part)[jax.lax.axis_index(AXIS)]  # [D/2, V]
        return run_rows(
            own, target, kernels, dense_attend, cache, features, sequence.successors, positions, matrix=matrix
        )[0]

    run = jax.shard_map(scored, mesh=shards.mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    assert layout.num_kv_heads == head.cache.num_kv_heads // 2
    assert_same([np.asarray(jax.jit(run)(state))], run_whole(head, target, sequence)[:1])


def test_one_program_runs_every_step_of_a_chain(tmp_path):
    _, target, head = write_and_load("plain", tmp_path)
    sequence = target.sequence(1, 3, 7)
    features = features_of(head, sequence)
    shape = jax.eval_shape(functools.partial(_one_step, head, target), features)
    assert shape.shape == features.shape and shape.dtype == features.dtype


def _one_step(head, target, features):
    layout = head.cache
    arrays = jnp.zeros((2, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim))
    cache = (arrays, jnp.zeros(1, jnp.int32))
    return run_rows(head, target, REFERENCE, dense_attend, cache, features, [3], [0])[1]
