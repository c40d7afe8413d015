"""Data ranks over real devices: the same tokens, rows and logprobs as one device, on every mesh and in every rank; what
each rank has of its own; what is refused. Lives of requests without a model: test_data_ranks_machine.py.

Every case is compared with the same engine on one device in float32: tokens and ids are equal, logprobs within 1e-4."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts import Engine, extract_routed_experts_from_meta_info
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.placement.eplb import rebalance
from support.family_folders import write_family
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = [pytest.mark.devices(4), pytest.mark.usefixtures("fast_compilation")]

SIZES = dict(
    page_size=4,
    context_length=96,
    precompile_bs_paddings=(4,),
    precompile_token_paddings=(32,),
    max_total_tokens=512,
    skip_tokenizer_init=True,
    enable_return_routed_experts=True,
)
LOGPROB = 1e-4
# devices, data ranks, and experts whole (as many as devices) or by width (1)
MESHES = {
    "2 ranks, width": (4, 2, 1),
    "2 ranks, experts": (4, 2, 4),
    "4 ranks": (4, 4, 4),
    "1 device a rank": (2, 2, 1),
}
FAMILIES = {  # what each has that another has not: rows of all heads, biases and sinks, states, two networks beside
    "deepseek": ("2 ranks, experts", "1 device a rank"),
    "gpt-oss": ("2 ranks, width",),
    "qwen3-next": ("2 ranks, width",),
    "lfm2-moe": ("1 device a rank",),
    "gemma4": ("2 ranks, experts",),
    "dense": ("1 device a rank",),
}
IN_EVERY_RUN = ("deepseek", "lfm2-moe", "gemma4")  # latent rows, states, pages of two shapes; on one mesh each
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
SAMPLING = [
    dict(temperature=0.0),
    dict(temperature=0.9, seed=3),
    dict(temperature=1.1, top_k=20, top_p=0.9, seed=4),
    dict(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={5: 2.5}),
]


@contextlib.contextmanager
def build(folder, mesh=None, **changed):
    """An engine that compiles a program when it first runs it."""
    sizes = {} if mesh is None else dict(zip(("tp_size", "dp_size", "ep_size"), MESHES[mesh], strict=True))
    with lazy_compilation(), Engine(str(folder), **(SIZES | sizes | changed)) as engine:
        engine.thread.run_drained(engine.components.core.runner.overwrite_pool)
        yield engine


def random_prompts(vocab, *, seed=0, lengths=(1, 5, 45, 17, 30, 8, 12, 3)):
    """One is longer than a step, and each rank gets several."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def answers(engine, prompts, *, ask=True, **params):
    return engine.generate(
        input_ids=prompts,
        sampling_params=GREEDY | params,
        return_logprob=True,
        logprob_start_len=0,
        return_routed_experts=ask,
    )


def logprobs_of(answer):
    meta = answer["meta_info"]
    return [entry[0] for entry in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])]


def assert_alike(expected, given):
    assert len({tuple(answer["output_ids"]) for answer in expected}) > 1, "a constant answer proves nothing"
    for left, right in zip(expected, given, strict=True):
        assert left["output_ids"] == right["output_ids"]
        np.testing.assert_allclose(logprobs_of(left), logprobs_of(right), rtol=0, atol=LOGPROB)
        if "routed_experts" in left["meta_info"]:
            np.testing.assert_array_equal(*(extract_routed_experts_from_meta_info(answer) for answer in (left, right)))


def ranks_of(given):
    return [answer["meta_info"]["dp_rank"] for answer in given]


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_family_answers_as_on_one_device(tmp_path, name, is_thorough):
    """In every run on one mesh."""
    write_family(tmp_path, name)
    prompts, capture = random_prompts(211), name != "dense"
    with build(tmp_path, enable_return_routed_experts=capture) as alone:
        expected = answers(alone, prompts, ask=capture)
    for mesh in FAMILIES[name] if is_thorough else FAMILIES[name][:1]:
        with build(tmp_path, mesh, enable_return_routed_experts=capture) as ranked:
            given = answers(ranked, prompts, ask=capture)
            assert_alike(expected, given)
            assert set(ranks_of(given)) == set(range(MESHES[mesh][1])), "every rank has answered"
            for leaf in jax.tree.leaves(ranked.components.core.runner._pool):
                parts = {str(shard.index) for shard in leaf.addressable_shards}
                assert len(parts) % MESHES[mesh][1] == 0, "each rank has pages and states of its own"


class Qwen3:
    """Engines of the tiny Qwen3-MoE: on one device, and on four with data ranks."""

    def __init__(self, folder, stack):
        self.folder, self.other = folder / "served", folder / "other"
        write_tiny_checkpoint(self.folder)
        write_tiny_checkpoint(self.other, seed=1)
        self.prompts = random_prompts(VOCAB_SIZE)
        self.alone = stack.enter_context(build(self.folder))
        self.ranked = {mesh: stack.enter_context(build(self.folder, mesh)) for mesh in MESHES}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Qwen3(tmp_path_factory.mktemp("qwen3"), stack)


@pytest.fixture(autouse=True)
def integrity(request):
    """Afterwards every engine of the module holds its invariants, and nothing is cached."""
    yield
    if "qwen3" in request.fixturenames:
        shared = request.getfixturevalue("qwen3")
        for engine in (shared.alone, *shared.ranked.values()):
            assert engine.check_integrity() == []
            engine.flush_cache()


@pytest.mark.parametrize("mesh", MESHES)
def test_every_sampler_draws_as_on_one_device(qwen3, mesh):
    for sampling in SAMPLING:
        for engine in (qwen3.alone, qwen3.ranked[mesh]):
            engine.flush_cache()
        assert_alike(
            answers(qwen3.alone, qwen3.prompts, **sampling), answers(qwen3.ranked[mesh], qwen3.prompts, **sampling)
        )


@pytest.mark.parametrize("mesh", MESHES)
def test_a_request_answers_alike_in_every_rank_while_the_others_are_idle(qwen3, mesh):
    engine, prompts = qwen3.ranked[mesh], qwen3.prompts[2:4]
    expected = answers(qwen3.alone, prompts)
    for rank in range(MESHES[mesh][1]):
        before = engine.stats().data_ranks
        given = engine.generate(
            input_ids=prompts,
            sampling_params=GREEDY,
            return_logprob=True,
            logprob_start_len=0,
            return_routed_experts=True,
            data_parallel_rank=rank,
        )
        assert_alike(expected, given)
        assert ranks_of(given) == [rank, rank]
        fed = [now.tokens - then.tokens for now, then in zip(engine.stats().data_ranks, before, strict=True)]
        assert fed[rank] > 0 and sum(fed) == fed[rank], "no other rank has fed a token"
        assert engine.stats().padding_ratio >= MESHES[mesh][1]


def test_a_prefix_is_found_in_its_own_rank_alone(qwen3):
    engine, text = qwen3.ranked["2 ranks, experts"], qwen3.prompts[4]

    def cached(**where):
        meta = engine.generate(input_ids=text, sampling_params=GREEDY, return_routed_experts=True, **where)["meta_info"]
        return meta["dp_rank"], meta["cached_tokens"]

    assert [cached(data_parallel_rank=1), cached(data_parallel_rank=0)] == [(1, 0), (0, 0)]
    assert cached(data_parallel_rank=1) == (1, 28) and cached() == (0, 28)
    engine.flush_cache()
    cached(data_parallel_rank=1)
    assert cached() == (1, 28), "the rank that has most of the prompt"
    expected = answers(qwen3.alone, [text])
    assert_alike([*expected, *answers(qwen3.alone, [qwen3.prompts[0]])], answers(engine, [text, qwen3.prompts[0]]))


def test_ranks_do_not_share_rows(qwen3):
    """The same slots of every rank are written by different requests, of which each gets its own rows."""
    engine = qwen3.ranked["4 ranks"]
    prompts = random_prompts(VOCAB_SIZE, seed=4, lengths=(21, 21, 21, 21))
    expected = answers(qwen3.alone, prompts)
    assert_alike(expected, given := answers(engine, prompts))
    assert sorted(ranks_of(given)) == [0, 1, 2, 3]
    rows = [extract_routed_experts_from_meta_info(answer) for answer in expected]
    assert all((rows[0] != other).any() for other in rows[1:])

    def owned(core):
        return [set(scheduler.pages.owned_slots(scheduler.running).tolist()) for scheduler in core.ranks]

    slots = engine.thread.run_between_steps(lambda: owned(engine.components.core))
    assert set.intersection(*slots), "slots have the same numbers in all ranks"


def test_counts_are_those_of_the_rows(qwen3):
    for engine in (qwen3.alone, qwen3.ranked["2 ranks, experts"]):
        engine.reset_routing_stats()
        answers(engine, qwen3.prompts[:3])  # a rank is idle for some steps
    alone, ranked = qwen3.alone.routing_stats(), qwen3.ranked["2 ranks, experts"].routing_stats()
    np.testing.assert_array_equal(alone.counts, ranked.counts)
    np.testing.assert_array_equal(alone.num_tokens, ranked.num_tokens)


def test_given_routes_are_played_back(qwen3):
    scored = qwen3.alone.score(qwen3.prompts)
    engine = qwen3.ranked["2 ranks, width"]
    for left, right in zip(scored, engine.score(qwen3.prompts), strict=True):
        np.testing.assert_array_equal(left.routed_experts.ids, right.routed_experts.ids)
        np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=LOGPROB)
    forced = [record.routed_experts[:] for record in scored]
    for record in forced:
        record.ids.setflags(write=True)
        record.ids[:] = record.ids[..., ::-1].copy()
    left, right = (engine.score(qwen3.prompts, routed=forced) for engine in (qwen3.alone, engine))
    for index, record in enumerate(forced):
        np.testing.assert_array_equal(right[index].routed_experts.ids, record.ids)
        np.testing.assert_allclose(left[index].logprobs, right[index].logprobs, rtol=0, atol=LOGPROB)


def test_new_weights_reach_every_rank(qwen3):
    engine = qwen3.ranked["2 ranks, experts"]
    for folder in (qwen3.other, qwen3.folder):
        for served in (qwen3.alone, engine):
            served.update_weights_from_disk(folder, version=served.components.core.runner.weight_version + 1)
        assert_alike(answers(qwen3.alone, qwen3.prompts), given := answers(engine, qwen3.prompts))
        assert {answer["meta_info"]["weight_version"] for answer in given} == {engine.stats().weight_version}
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation()
    qwen3.alone.flush_cache()
    assert_alike(answers(qwen3.alone, qwen3.prompts), answers(engine, qwen3.prompts))


def test_placed_experts_of_all_ranks_move_and_change_no_value(qwen3):
    rng, sizes = np.random.default_rng(5), dict(num_instances=20, num_devices=4)
    first, second = (rebalance(rng.gamma(0.5, size=(3, 16)), **sizes) for _ in range(2))
    expected = answers(qwen3.alone, qwen3.prompts)
    with build(qwen3.folder, "2 ranks, experts", placement=first) as engine:
        assert_alike(expected, answers(engine, qwen3.prompts))
        assert engine.apply_placement(second) > 0
        engine.flush_cache()
        monitor = engine.components.load_monitor
        engine.thread.run_drained(monitor.close_window)()
        engine.reset_routing_stats()
        assert_alike(expected, answers(engine, qwen3.prompts))
        counts = engine.thread.run_drained(monitor.close_window)()
        np.testing.assert_array_equal(counts, engine.routing_stats().counts)


def test_deterministic_bits_are_those_of_any_rank_and_any_company(qwen3):
    with build(qwen3.folder, "2 ranks, width", deterministic=True) as engine:
        assert_alike(answers(qwen3.alone, qwen3.prompts), answers(engine, qwen3.prompts))
        together = answers(engine, qwen3.prompts, temperature=0.8, seed=5)
        for rank in (0, 1):
            for prompt, expected in zip(qwen3.prompts, together, strict=True):
                engine.flush_cache()
                alone = engine.generate(
                    input_ids=prompt,
                    sampling_params=GREEDY | {"temperature": 0.8, "seed": 5},
                    return_logprob=True,
                    logprob_start_len=0,
                    return_routed_experts=True,
                    data_parallel_rank=rank,
                )
                assert alone["output_ids"] == expected["output_ids"]
                assert logprobs_of(alone) == logprobs_of(expected), "to the bit"
                rows = [extract_routed_experts_from_meta_info(answer) for answer in (alone, expected)]
                np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("mesh", ["1 device a rank", pytest.param("2 ranks, experts", marks=pytest.mark.thorough)])
def test_ranks_of_codes_answer_as_one_device_of_codes(tiny_checkpoint, tmp_path, mesh):
    """Before and after an update from a plain checkpoint, which every device quantises its part of."""
    other, prompts = write_tiny_checkpoint(tmp_path, seed=1), random_prompts(VOCAB_SIZE)
    with (
        build(tiny_checkpoint, quantization="fp8_block") as alone,
        build(tiny_checkpoint, mesh, quantization="fp8_block") as ranked,
    ):
        expected = answers(alone, prompts)
        assert_alike(expected, given := answers(ranked, prompts))
        assert set(ranks_of(given)) == {0, 1}
        for engine in (alone, ranked):
            assert any(leaf.dtype == jnp.float8_e4m3fn for leaf in jax.tree.leaves(engine.components.served.arrays))
            engine.update_weights_from_disk(other)
        assert_alike(updated := answers(alone, prompts), answers(ranked, prompts))
        assert [answer["output_ids"] for answer in updated] != [answer["output_ids"] for answer in expected]


def test_a_rank_has_its_own_pages_and_all_share_the_experts(qwen3):
    def bytes_of(engine):
        runner = engine.components.core.runner
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(runner.state))
        return held, runner._pool.nbytes, runner._pool.addressable_shards[0].data.nbytes

    ranked, alone = qwen3.ranked["4 ranks"], qwen3.alone
    (whole, pages, _), (part, all_pages, own_pages) = bytes_of(alone), bytes_of(ranked)
    plan = ranked.components.plan
    assert whole - plan.rank_weights == 4 * (part - plan.rank_weights) > whole / 2, "a quarter of the experts"
    assert (all_pages, own_pages) == (4 * pages, pages)
    assert plan.num_ranks == 4 and any("by data rank" in line for line in plan.lines())
    assert plan.capture_host == 4 * alone.components.plan.capture_host
    slots, row_bytes = 4 * plan.pool.num_slots, plan.row_bytes
    assert plan.capture_host == slots * row_bytes
    assert any(f"{slots:,} slots of {row_bytes:,} bytes" in line for line in plan.lines()), "figures that multiply"
    stats = ranked.stats()
    assert stats.total_pages == 4 * alone.stats().total_pages == 4 * stats.data_ranks[0].total_pages
    assert alone.stats().data_ranks == ()


def test_plans_of_ranks_need_no_device(qwen3):
    args = ServerArgs(model_path=str(qwen3.folder), tp_size=8, dp_size=4, page_size=4, context_length=96)
    assert any("by data rank" in line for line in inspect_model(args).memory_plan)


REFUSED = {
    "not a divisor": (dict(tp_size=4, dp_size=3), "dp_size=3 does not divide tp_size=4.*choose one of 1, 2, 4"),
    "none": (dict(dp_size=0), "dp_size=0 must be an integer of at least 1"),
    "alone": (dict(dp_size=2), "dp_size=2 does not divide tp_size=1.*several engines for copies"),
    "drafts": (dict(tp_size=2, dp_size=2, speculative_algorithm="NGRAM"), "dp_size=2: speculation by NGRAM"),
    "heads": (dict(tp_size=32, dp_size=4), "tp_size=32 of dp_size=4 does not divide.*values that work for this model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(qwen3, case):
    given, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        Engine(str(qwen3.folder), **(SIZES | given))


def test_capacities_are_refused(qwen3):
    plan = rebalance(np.ones((3, 16)), num_instances=20, num_devices=4)
    placement = PlacementConfig(plan=plan, mode="reroute", capacity_factor=1.5)
    with pytest.raises(ConfigError, match="dp_size=2: capacities"):
        Engine(str(qwen3.folder), tp_size=4, ep_size=4, dp_size=2, placement=placement, **SIZES)


@pytest.mark.parametrize("rank", [-1, 2, True, "0", 1.0])
def test_a_rank_that_is_none_is_refused(qwen3, rank):
    with pytest.raises(InvalidRequestError, match=r"data_parallel_rank=.* must be an integer in 0\.\.1, a") as refused:
        qwen3.ranked["2 ranks, width"].generate(input_ids=[1], data_parallel_rank=rank)
    assert refused.value.param == "data_parallel_rank"
    with pytest.raises(InvalidRequestError, match=r"0\.\.0, a data rank \(dp_size=1\)"):
        qwen3.alone.generate(input_ids=[1], data_parallel_rank=1)


def test_sums_of_counts_add_the_newest_windows():
    rng = np.random.default_rng(0)

    def stats(windows):
        counts = rng.integers(0, 5, (windows, 2, 3, 8)).astype(np.int32)
        counts[..., 0] += 40 - counts.sum(axis=3, dtype=np.int32)
        total = counts.sum(axis=0, dtype=np.int64)
        return RoutingStats(
            counts=total, num_tokens=total[:, 0].sum(axis=1) // 2, windows=counts, layer_ids=(0, 1, 2), top_k=2
        )

    short, long = stats(2), stats(5)
    merged = RoutingStats.merge([short, long])
    np.testing.assert_array_equal(merged.counts, short.counts + long.counts)
    np.testing.assert_array_equal(merged.num_tokens, short.num_tokens + long.num_tokens)
    for index in range(5):
        expected = long.windows[index] + (short.windows[index - 3] if index >= 3 else 0)
        np.testing.assert_array_equal(merged.windows[index], expected)
    assert RoutingStats.merge([short]) is short
