"""One model on one, two and four devices: the same tokens, routes and logprobs; memory of a device; what is refused.

Every case is compared with the same engine on one device in float32: tokens and ids are equal, logprobs within 1e-4."""

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import nnx

from oracles.driver import Bench, request
from routed_experts import Engine, extract_routed_experts_from_meta_info
from routed_experts.core.buckets import Buckets
from routed_experts.core.errors import ConfigError, InvalidRequestError, PlacementError
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendEntry, BackendRegistry
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.engine.build.memory_planning import kv_shapes
from routed_experts.engine.control.score import Scorer
from routed_experts.engine.control.served_model import create_sharding, load_model
from routed_experts.execution.aot_programs import RunnerConfig
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.memory_plan import plan_memory
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.programs import ProgramSpec
from routed_experts.execution.spmd import MeshSpecs
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.models.model_folder import ModelFolder
from routed_experts.placement.eplb import rebalance
from support import lazy_compile
from support.family_folders import write_family
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = [pytest.mark.devices(4), pytest.mark.usefixtures("fast_compilation")]

SIZES = dict(
    page_size=4, context_length=96, precompile_bs_paddings=(4,), precompile_token_paddings=(32,), max_total_tokens=512
)
LOGPROB = 1e-4
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
MESHES = {"tp2": (2, 1), "tp4": (4, 1), "ep2": (2, 2), "ep4": (4, 4)}
FAMILIES = {
    "deepseek": ("tp2", "ep4"),
    "gpt-oss": ("ep2", "tp4"),
    "olmoe": ("tp4",),
    "qwen3-next": ("tp2",),
    "lfm2-moe": ("ep2",),
    "gemma4": ("tp2", "ep2"),
    "bailing-hybrid": ("tp2",),
}
# The first mesh of each. test_data_ranks.py has lfm2-moe and gemma4 on another mesh, and the tests below Qwen3-MoE on
# four devices by width; only scripts/thorough has olmoe, bailing-hybrid and a convolution by width.
IN_EVERY_RUN = ("deepseek", "gpt-oss", "qwen3-next")


class DeviceBench(Bench):
    """A compiled model of a folder, on one device or several."""

    def __init__(self, folder, tp=1, ep=1, *, registry=DEFAULT_BACKENDS, **backends):
        devices = dict(tp_size=tp, ep_size=ep)
        self.args = args = ServerArgs(
            model_path=str(folder), enable_return_routed_experts=True, **devices, **SIZES, **backends
        )
        source = ModelFolder.open(folder)
        config, shards = source.config, create_sharding(args, source.config)
        kernels, attention = registry.choose(args, config.needs)
        served, state = load_model(source, config, shards, dtype="auto", progress=None)
        buckets = Buckets.from_args(args, context_length=args.context_length)
        self.spec = config.capture_spec
        plan = plan_memory(
            args,
            kv_shapes(args, served.part, state, attention),
            served.arrays if shards is None else shards.local_part(served.arrays),
            self.spec,
            context_length=96,
            vocab_size=config.vocab_size,
        )
        spec = ProgramSpec(
            graphdef=served.graphdef,
            capture=self.spec,
            kernels=kernels,
            attention=attention,
            num_pages=plan.pool.num_pages,
            raw_logprobs=False,
            mesh_specs=None if shards is None else MeshSpecs.create(shards.mesh, jax.tree.leaves(state), plan.pool),
        )
        shapes = tuple(
            BatchShape(mode=mode, num_tokens=tokens, num_requests=requests, table_width=buckets.table_width)
            for mode, tokens, requests in buckets.all_shapes()
        )
        sizes = RunnerConfig(
            pool=plan.pool, num_request_slots=args.running_limit + 1, shapes=shapes, vocab_size=config.vocab_size
        )
        self.runner = ModelRunner(state, spec, sizes)
        lazy_compile.compile_lazily(self.runner)
        self.assembly = SimpleNamespace(plan=plan, buckets=buckets, vocab_size=config.vocab_size)
        self.probe, self._weights, self._version = SimpleNamespace(clear=lambda: None), self.runner.state, 0


def random_prompts(vocab, *, seed=0, lengths=(1, 5, 45, 17)):
    """One prompt is longer than a step."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def run_prompts(bench, prompts, *, max_tokens=6, pages=None, retracts=False):
    """Tokens, rows and logprobs of greedy answers."""
    recurrent = bench.runner.config.pool.recurrent is not None
    drive = bench.drive(disable_radix_cache=recurrent, pages=pages)
    outputs = drive.run(
        *(request(str(index), ids, max_tokens, prompt_logprobs_from=0) for index, ids in enumerate(prompts))
    )
    assert (drive.core.ranks[0].num_retracted > 0) == retracts
    return [outputs[str(index)] for index in range(len(prompts))]


def assert_alike(outputs, expected):
    assert len({tuple(output.tokens) for output in expected}) > 1, "a constant answer proves nothing"
    for output, reference in zip(outputs, expected, strict=True):
        assert output.tokens == reference.tokens, (output.tokens, reference.tokens)
        np.testing.assert_array_equal(output.end.routed_experts.ids, reference.end.routed_experts.ids)
        for actual, expected_logprobs in (
            (output.logprobs, reference.logprobs),
            (output.prompt_logprobs[1:], reference.prompt_logprobs[1:]),
        ):
            np.testing.assert_allclose(actual, expected_logprobs, rtol=0, atol=LOGPROB)


@contextlib.contextmanager
def compile_events():
    """What JAX traces, lowers and compiles."""
    events = []

    def on_event(event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if mesh == meshes[0] and name in IN_EVERY_RUN else [pytest.mark.thorough])
        for name, meshes in FAMILIES.items()
        for mesh in meshes
    ],
)
def test_family_answers_alike_on_every_mesh(tmp_path, name, mesh):
    folder = tmp_path / name
    write_family(folder, name)
    prompts = random_prompts(211)
    expected = run_prompts(DeviceBench(folder), prompts)
    assert_alike(run_prompts(DeviceBench(folder, *MESHES[mesh]), prompts), expected)


def test_dense_model_scores_alike_without_capture(tmp_path):
    """Its head is tied to its embeddings; two programs run, because it is scored."""
    folder = tmp_path
    write_family(folder, "dense")
    prompts, outputs = [np.array(ids, np.int32) for ids in random_prompts(211)[1:]], []
    for tp in (1, 2, 4):
        bench = DeviceBench(folder, tp)
        runner = bench.runner
        scorer = Scorer(bench.args, bench.assembly.buckets, runner, lambda start: start())
        outputs.append(scorer.run(prompts, None, lambda runner=runner: (runner.state, WeightVersion())))
    for first, *others in zip(*outputs, strict=True):
        for other in others:
            assert other.routed_experts is None
            np.testing.assert_allclose(first.logprobs, other.logprobs, rtol=0, atol=LOGPROB)


def all_logprobs(answer):
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


class Qwen3:
    """The tiny Qwen3-MoE on one device and on meshes of four; programs are compiled once."""

    def __init__(self, folder):
        self.folder, self.other = folder / "served", folder / "other"
        write_tiny_checkpoint(self.folder)
        write_tiny_checkpoint(self.other, seed=1)
        self.alone = DeviceBench(self.folder)
        self.benches = {name: DeviceBench(self.folder, *sizes) for name, sizes in MESHES.items() if sizes[0] == 4}
        self.prompts = random_prompts(VOCAB_SIZE)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return Qwen3(tmp_path_factory.mktemp("qwen3"))


def test_answers_are_alike_on_every_mesh(qwen3):
    expected = run_prompts(qwen3.alone, qwen3.prompts)
    for bench in qwen3.benches.values():
        assert_alike(run_prompts(bench, qwen3.prompts), expected)


def test_gpu_kernels_serve_one_devices_heads_and_experts(qwen3):
    """The kernels are interpreted."""
    gpu = BackendRegistry(
        moe={"gpu": BackendEntry(load=lambda: gpu_kernels(interpret=True))},
        attention={"gpu": BackendEntry(load=lambda: gpu_attention_backend(interpret=True))},
    )
    bench = DeviceBench(qwen3.folder, 2, 2, registry=gpu, moe_backend="gpu", attention_backend="gpu")
    assert_alike(run_prompts(bench, qwen3.prompts), run_prompts(qwen3.alone, qwen3.prompts))


def test_prefix_hits_are_alike_on_every_mesh(qwen3):
    expected = two_turns(qwen3.alone, qwen3.prompts[2])
    for bench in qwen3.benches.values():
        assert_alike(two_turns(bench, qwen3.prompts[2]), expected)


def two_turns(bench, first):
    """Answers of which the last ones read pages that the first one wrote."""
    drive = bench.drive()
    drive.run(request("first", first, 6, prompt_logprobs_from=0))
    drive.run(request("second", [*first, 7, 8, 9], 6, prompt_logprobs_from=0))
    assert drive.reqs["second"].cached_tokens == 0, "prompt logprobs are computed anew"
    outputs = drive.run(request("third", [*first, 9, 8, 7], 6, prompt_logprobs_from=len(first)))
    assert drive.reqs["third"].cached_tokens >= 40
    return [outputs[name] for name in ("first", "second", "third")]


def test_retraction_is_alike_on_every_mesh(qwen3):
    """The pool holds the prompts and not their answers."""
    prompts = random_prompts(VOCAB_SIZE, seed=2, lengths=(4, 5, 6, 7))
    expected = run_prompts(qwen3.alone, prompts, max_tokens=24)
    for bench in qwen3.benches.values():
        assert_alike(run_prompts(bench, prompts, max_tokens=24, pages=20, retracts=True), expected)


def test_a_device_holds_its_share_of_weights_and_pages(qwen3, engines):
    """Of four devices or two: its share of what is sharded, and all of the rest."""
    whole, pool = _device_bytes_held(qwen3.alone)
    same = sum(array.nbytes for path, array in _arrays(qwen3.alone) if path.endswith(("norm", "router")))
    repeated = (
        sum(array.nbytes for path, array in _arrays(qwen3.alone) if path.endswith("qkv")) // 2
    )  # keys and values: 4 of 8 heads
    assert same < 0.1 * whole
    for name, bench in {**qwen3.benches, "tp2": engines[1].components.core}.items():
        devices = MESHES[name][0]
        heads = min(devices, 2)  # a kv head is not cut: four devices hold each of the two twice
        expected = same + (whole - same - repeated) // devices + repeated // heads
        assert _device_bytes_held(bench) == (expected, pool // heads), name


def _arrays(bench):
    flat = jax.tree_util.tree_flatten_with_path(bench.runner.state)[0]
    return [("".join(str(part) for part in path).removesuffix(".value").rstrip("']"), leaf) for path, leaf in flat]


def _device_bytes_held(bench):
    """Bytes of weights and of pages on a device; all hold as much."""
    sizes = [[shard.data.nbytes for shard in array.addressable_shards] for _, array in _arrays(bench)]
    assert all(len(set(of_array)) == 1 for of_array in sizes)
    return sum(of_array[0] for of_array in sizes), bench.runner._pool.addressable_shards[0].data.nbytes


SAMPLING = [
    dict(temperature=0.0),
    dict(temperature=0.9, seed=3),
    dict(temperature=1.1, top_k=20, top_p=0.9, seed=4),
    dict(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={5: 2.5}),
]


@pytest.fixture(scope="module")
def engines(qwen3):
    """A whole engine on one device, and one on two."""
    args = dict(skip_tokenizer_init=True, enable_return_routed_experts=True, **SIZES)
    with lazy_compile.lazy_compilation():
        return [Engine(str(qwen3.folder), tp_size=tp, **args) for tp in (1, 2)]


def generate_all(engine, prompts):
    """Answers of every sampler; the prefix cache is empty afterwards."""
    answers = []
    for sampling in SAMPLING:
        params = dict(max_tokens=6, ignore_eos=True, **sampling)
        answers += engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, return_routed_experts=True
        )
    engine.flush_cache()
    return answers


def test_placed_experts_move_under_load_and_change_no_value(qwen3, engines):
    """Experts with replicas, placed one way, then another while requests run, then with other weights: tokens and
    routes are those of one device, ids are logical, and nothing compiles."""
    single = engines[0]
    rng, sizes = np.random.default_rng(5), dict(num_instances=20, num_devices=4)
    first, second, third = (rebalance(rng.gamma(0.5, size=(3, 16)), **sizes) for _ in range(3))
    assert (first.physical_to_logical_map != second.physical_to_logical_map).any(axis=1).all()
    args = dict(skip_tokenizer_init=True, enable_return_routed_experts=True, **SIZES)
    ask = dict(
        input_ids=qwen3.prompts,
        sampling_params=GREEDY | {"max_tokens": 24},
        return_logprob=True,
        return_routed_experts=True,
    )
    with Engine(str(qwen3.folder), tp_size=4, ep_size=4, placement=first, **args) as replicated:
        expected = single.generate(**ask)
        alike(expected, replicated.generate(**ask))
        replicated.flush_cache()
        for next_one in (second, third):
            with ThreadPoolExecutor(1) as pool, compile_events() as compiled:
                running = pool.submit(replicated.generate, **ask)
                assert replicated.apply_placement(next_one) > 0
                alike(expected, running.result())
                assert replicated.apply_placement(next_one) == 0
                replicated.flush_cache()
                alike(expected, replicated.generate(**ask))
            assert not compiled, compiled
            assert_experts_held(replicated, next_one, qwen3.folder)
        scored = [engine.score(qwen3.prompts[2]) for engine in (single, replicated)]
        np.testing.assert_array_equal(*(score.routed_experts.ids for score in scored))
        for engine in (single, replicated):
            engine.update_weights_from_disk(qwen3.other, version=1)
        assert_experts_held(replicated, third, qwen3.other)
        alike(single.generate(**ask), replicated.generate(**ask))
        runner = replicated.components.core.runner
        replicated.thread.run_drained(
            lambda: runner.move_layer(*runner.layers()[0], second)
        )  # a change that stops half way
        for engine in (single, replicated):
            engine.update_weights_from_disk(qwen3.folder, version=2)
        assert_experts_held(replicated, third, qwen3.folder)
        assert replicated.apply_placement(second) > 0
        assert_experts_held(replicated, second, qwen3.folder)
        alike(single.generate(**ask), replicated.generate(**ask))
        with pytest.raises(PlacementError, match="max_replicas"):
            replicated.apply_placement(rebalance(np.ones((3, 16)), num_instances=24, num_devices=4))
        with pytest.raises(InvalidRequestError, match="placement="):
            single.apply_placement(second)
    with pytest.raises(PlacementError, match="num_devices=4, but tp_size=2"):
        Engine(str(qwen3.folder), tp_size=2, ep_size=2, placement=first, **args)


def assert_experts_held(engine, placement, folder):
    """Every device holds, layer by layer, the experts of the placement, whole."""
    source = ModelFolder.open(folder)
    whole = nnx.split(source.load(source.dtype("auto")))[1]
    experts = {
        path[-1]: np.asarray(leaf.get_raw_value())
        for path, leaf in nnx.to_flat_state(whole)
        if path[:2] == ("blocks", 1)
    }
    own = placement.instances_per_device
    for path, leaf in nnx.to_flat_state(_state(engine)):
        if path[-1] not in ("gate_up", "down") or path[:2] != ("blocks", 1):
            continue
        for device, shard in enumerate(leaf.get_raw_value().addressable_shards):
            experts_held = placement.physical_to_logical_map[:, device * own : (device + 1) * own]
            expected = experts[path[-1]].reshape(3, 16, *leaf.shape[1:])[np.arange(3)[:, None], experts_held]
            np.testing.assert_array_equal(np.asarray(shard.data).reshape(expected.shape), expected)


def alike(single, shared):
    for left, right in zip(single, shared, strict=True):
        assert left["output_ids"] == right["output_ids"]
        np.testing.assert_array_equal(*(extract_routed_experts_from_meta_info(outputs) for outputs in (left, right)))
        np.testing.assert_allclose(all_logprobs(left), all_logprobs(right), rtol=0, atol=LOGPROB)


def _state(engine):
    return engine.components.core.runner.state


def test_every_sampler_draws_alike_and_compiles_nothing_the_second_time(qwen3, engines):
    for again in (False, True):
        with compile_events() as compiled:
            single, shared = (generate_all(engine, qwen3.prompts) for engine in engines)
        assert not again or not compiled, compiled
        alike(single, shared)


def test_routes_of_one_device_are_replayed_on_two(qwen3, engines):
    scored = engines[0].score(qwen3.prompts[2])
    forced = dataclasses.replace(scored.routed_experts, ids=scored.routed_experts.ids[..., ::-1].copy())
    for routes in (scored.routed_experts, forced):
        left, right = (engine.score(qwen3.prompts[2], routed=routes) for engine in engines)
        np.testing.assert_array_equal(right.routed_experts.ids, routes.ids)
        np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=LOGPROB)


def test_new_weights_are_sharded_as_before(qwen3, engines):
    """Arrays that a trainer holds whole, and a folder."""
    single, shared = engines
    shardings = [leaf.sharding for leaf in jax.tree.leaves(_state(shared))]
    before = generate_all(shared, qwen3.prompts)
    opened = ModelFolder.open(qwen3.other)
    weights = opened.load(opened.dtype("auto"))
    for how in ("arrays", "from disk", "after a release", "donated"):
        for engine in engines:
            version = engine.components.core.runner.weight_version + 1
            if how == "arrays":
                engine.update_weights(weights, version=version)
            elif how == "donated":
                leaves = jax.tree.leaves(nnx.split(gift := opened.load(opened.dtype("auto")))[1])
                engine.update_weights(gift, version=version, donate=True)
                assert any(leaf.is_deleted() for leaf in leaves) == (engine is shared), "sharded arrays are copies"
            elif how == "from disk":
                engine.update_weights_from_disk(qwen3.folder, version=version)
            else:
                engine.release_memory_occupation()
                engine.resume_memory_occupation(weights, version=version)
        after = generate_all(shared, qwen3.prompts)
        alike(generate_all(single, qwen3.prompts), after)
        assert [leaf.sharding for leaf in jax.tree.leaves(_state(shared))] == shardings
        same = [answer["output_ids"] for answer in after] == [answer["output_ids"] for answer in before]
        assert same == (how == "from disk")


def test_impossible_meshes_are_refused_before_a_weight_is_loaded(tmp_path):
    """A memory plan needs no device."""
    folder = tmp_path
    write_tiny_checkpoint(folder)
    args = dict(skip_tokenizer_init=True, **SIZES)
    for tp, sentence in (
        (3, "tp_size=3 does not divide 2 kv heads, .*; values that work for this model: 1, 2, 4"),
        (8, "4 query heads.*; values that work for this model: 1, 2, 4"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Engine(str(folder), tp_size=tp, **args)
    write_family(folder / "wide", "olmoe", num_attention_heads=8)
    with pytest.raises(ConfigError, match=r"tp_size=8 is above the 4 cpu devices here; lower it, or .* XLA_FLAGS=.*=8"):
        Engine(str(folder / "wide"), tp_size=8, **args)
    with pytest.raises(ConfigError, match=r"moe_backend='native' cannot run here: .* tp_size=2"):
        Engine(str(folder), tp_size=2, moe_backend="native", **args)
    plans = [inspect_model(ServerArgs(model_path=str(folder / "wide"), tp_size=tp)).memory_plan for tp in (1, 8)]
    assert "each of 8 devices" in plans[1][-1] and "device" in plans[0][-1] and plans[0][0] != plans[1][0]
