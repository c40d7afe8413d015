"""One model on one, two and four devices, in a process that has four: run by tests/engine/test_devices.py, which starts
it with XLA_FLAGS and reads what it prints, a JSON line a case: its name, and null or how it failed.

Everything is compared with the same engine on one device, float32: tokens and ids are equal, logprobs within 1e-4."""

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendEntry, BackendRegistry
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.engine.build.memory_planning import kv_shapes
from routed_experts.engine.build.served_model import load_model, shards_of
from routed_experts.engine.control.score import Scorer
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
from support import at_first_use
from support.family_folders import write_family
from support.tiny import VOCAB_SIZE, write_tiny_checkpoint

SIZES = dict(
    page_size=4, context_length=96, precompile_bs_paddings=(4,), precompile_token_paddings=(32,), max_total_tokens=512
)
LOGPROB = 1e-4
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
MESHES = {"tp2": (2, 1), "tp4": (4, 1), "ep2": (2, 2), "ep4": (4, 4)}
FAMILIES = {"deepseek": ("tp2", "ep4"), "gpt-oss": ("tp4", "ep2"), "olmoe": ("tp4",), "qwen3-next": ("tp2",)}


class Small(Bench):
    """A bench of a folder, on one device or several."""

    def __init__(self, folder, tp=1, ep=1, *, registry=DEFAULT_BACKENDS, **backends):
        devices = dict(tp_size=tp, ep_size=ep)
        self.args = args = ServerArgs(
            model_path=str(folder), enable_return_routed_experts=True, **devices, **SIZES, **backends
        )
        source = ModelFolder.open(folder)
        config, shards = source.config, shards_of(args, source.config)
        kernels, attention = registry.choose(args, config.needs)
        served, state = load_model(source, config, shards, dtype="auto", progress=None)
        buckets = Buckets.from_args(args, context_length=args.context_length)
        self.spec = config.capture_spec
        plan = plan_memory(
            args,
            kv_shapes(args, served.part, state),
            served.held,
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
            on=None if shards is None else MeshSpecs.of(shards.mesh, jax.tree.leaves(state), plan.pool),
        )
        shapes = tuple(
            BatchShape(mode=mode, num_tokens=tokens, num_requests=requests, table_width=buckets.table_width)
            for mode, tokens, requests in buckets.all_shapes()
        )
        sizes = RunnerConfig(
            pool=plan.pool, num_request_slots=args.running_limit + 1, shapes=shapes, vocab_size=config.vocab_size
        )
        self.runner = ModelRunner(state, spec, sizes)
        at_first_use.compile_at_first_use(self.runner)
        self.assembly = SimpleNamespace(plan=plan, buckets=buckets, vocab_size=config.vocab_size)
        self.tap, self._weights, self._version = SimpleNamespace(clear=lambda: None), self.runner.state, 0


def prompts_of(vocab, *, seed=0, lengths=(1, 5, 45, 17)):
    """One prompt is longer than a step."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def told_of(bench, prompts, *, max_tokens=6, pages=None, retracts=False):
    """Tokens, rows and logprobs of greedy answers."""
    recurrent = bench.runner.config.pool.recurrent is not None
    drive = bench.drive(disable_radix_cache=recurrent, pages=pages)
    told = drive.run(*(request(str(at), ids, max_tokens, prompt_logprobs_from=0) for at, ids in enumerate(prompts)))
    assert (drive.core.scheduler.num_retracted > 0) == retracts
    return [told[str(at)] for at in range(len(prompts))]


def assert_alike(told, wanted):
    assert len({tuple(one.tokens) for one in wanted}) > 1, "a constant answer proves nothing"
    for one, other in zip(told, wanted, strict=True):
        assert one.tokens == other.tokens, (one.tokens, other.tokens)
        np.testing.assert_array_equal(one.end.routed_experts.ids, other.end.routed_experts.ids)
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs[1:], other.prompt_logprobs[1:])):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=LOGPROB)


@contextlib.contextmanager
def events():
    """What JAX traces, lowers and compiles."""
    seen = []

    def note(event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def family(folder, name):
    """Every mesh of the family against one device."""
    write_family(folder, name)
    prompts = prompts_of(211)
    wanted = told_of(Small(folder), prompts)
    for mesh in FAMILIES[name]:
        assert_alike(told_of(Small(folder, *MESHES[mesh]), prompts), wanted)


def dense(folder):
    """A model without experts, its head tied to its embeddings; nothing is captured. Scored, so that two programs
    do."""
    write_family(folder, "dense")
    prompts, told = [np.array(ids, np.int32) for ids in prompts_of(211)[1:]], []
    for tp in (1, 2, 4):
        bench = Small(folder, tp)
        runner = bench.runner
        scorer = Scorer(bench.args, bench.assembly.buckets, runner, lambda start: start())
        told.append(scorer.run(prompts, None, lambda runner=runner: (runner.state, 0)))
    for one, *others in zip(*told, strict=True):
        for other in others:
            assert other.routed_experts is None
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=LOGPROB)


def logprobs_of(answer):
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


class Qwen3:
    """The tiny Qwen3-MoE on one device and on meshes; engines are made once."""

    def __init__(self, folder):
        self.folder, self.other = folder / "served", folder / "other"
        write_tiny_checkpoint(self.folder)
        write_tiny_checkpoint(self.other, seed=1)
        self.alone = Small(self.folder)
        self.benches = {name: Small(self.folder, *sizes) for name, sizes in MESHES.items() if sizes[0] == 4}
        self.prompts = prompts_of(VOCAB_SIZE)

    def answers(self):
        wanted = told_of(self.alone, self.prompts)
        for bench in self.benches.values():
            assert_alike(told_of(bench, self.prompts), wanted)

    def gpu_kernels(self):
        """Those of a GPU, interpreted: a kernel sees one device's heads and experts."""
        gpu = BackendRegistry(
            moe={"gpu": BackendEntry(load=lambda: gpu_kernels(interpret=True))},
            attention={"gpu": BackendEntry(load=lambda: gpu_attention_backend(interpret=True))},
        )
        bench = Small(self.folder, 2, 2, registry=gpu, moe_backend="gpu", attention_backend="gpu")
        assert_alike(told_of(bench, self.prompts), told_of(self.alone, self.prompts))

    def prefix_hits(self):
        """A second turn over pages that the first one wrote."""
        wanted = self._two_turns(self.alone)
        for bench in self.benches.values():
            assert_alike(self._two_turns(bench), wanted)

    def _two_turns(self, bench):
        drive, first = bench.drive(), self.prompts[2]
        drive.run(request("first", first, 6, prompt_logprobs_from=0))
        told = drive.run(request("second", [*first, 7, 8, 9], 6, prompt_logprobs_from=0))
        assert drive.reqs["second"].cached_tokens == 0, "prompt logprobs are computed anew"
        told = drive.run(request("third", [*first, 9, 8, 7], 6, prompt_logprobs_from=len(first)))
        assert drive.reqs["third"].cached_tokens >= 40
        return [told[name] for name in ("first", "second", "third")]

    def retraction(self):
        """A pool that holds the prompts and not what is said to them."""
        prompts = prompts_of(VOCAB_SIZE, seed=2, lengths=(4, 5, 6, 7))
        wanted = told_of(self.alone, prompts, max_tokens=24)
        for bench in self.benches.values():
            told = told_of(bench, prompts, max_tokens=24, pages=20, retracts=True)
            assert_alike(told, wanted)

    def memory(self, two):
        """What a device holds, of four or of the `two`: its share of what is dealt out, and all of the rest."""
        whole, pool = _held(self.alone)
        same = sum(array.nbytes for path, array in _arrays(self.alone) if path.endswith(("norm", "router")))
        repeated = (
            sum(array.nbytes for path, array in _arrays(self.alone) if path.endswith("qkv")) // 2
        )  # keys and values: 4 of 8 heads
        assert same < 0.1 * whole
        for name, bench in {**self.benches, "tp2": two}.items():
            devices = MESHES[name][0]
            heads = min(devices, 2)  # a kv head is not cut: four devices hold each of the two twice
            held = same + (whole - same - repeated) // devices + repeated // heads
            assert _held(bench) == (held, pool // heads), name


def _arrays(bench):
    flat = jax.tree_util.tree_flatten_with_path(bench.runner.state)[0]
    return [("".join(str(part) for part in path).removesuffix(".value").rstrip("']"), leaf) for path, leaf in flat]


def _held(bench):
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


class Served:
    """A whole engine on two devices beside one on one: every sampler, replay, new weights, and that nothing compiles on
    the way."""

    def __init__(self, qwen3):
        self.qwen3 = qwen3
        args = dict(skip_tokenizer_init=True, enable_return_routed_experts=True, **SIZES)
        self.engines = [Engine(str(qwen3.folder), tp_size=tp, **args) for tp in (1, 2)]

    def samplers(self):
        """The same tokens from every sampler, the second time without a trace of a compiler."""
        for again in (False, True):
            with events() as seen:
                alone, shared = (self._ask(engine) for engine in self.engines)
            assert not again or not seen, seen
            self._compare(alone, shared)

    def new_weights(self):
        """Arrays that a trainer holds whole, and a folder: both end up dealt out as before."""
        alone, shared = self.engines
        where = [leaf.sharding for leaf in jax.tree.leaves(_state(shared))]
        before = self._ask(shared)
        opened = ModelFolder.open(self.qwen3.other)
        held = opened.load(opened.dtype("auto"))
        for how in ("given", "from disk", "after a release", "donated"):
            for engine in self.engines:
                version = engine.components.core.runner.weight_version + 1
                if how == "given":
                    engine.update_weights(held, version=version)
                elif how == "donated":
                    mine = jax.tree.leaves(nnx.split(gift := opened.load(opened.dtype("auto")))[1])
                    engine.update_weights(gift, version=version, donate=True)
                    assert any(leaf.is_deleted() for leaf in mine) == (engine is shared), "what is dealt out is copied"
                elif how == "from disk":
                    engine.update_weights_from_disk(self.qwen3.folder, version=version)
                else:
                    engine.release_memory_occupation()
                    engine.resume_memory_occupation(held, version=version)
            after = self._ask(shared)
            self._compare(self._ask(alone), after)
            assert [leaf.sharding for leaf in jax.tree.leaves(_state(shared))] == where
            assert ([one["output_ids"] for one in after] == [one["output_ids"] for one in before]) == (
                how == "from disk"
            )

    def replay(self):
        """Routes of one device's run, forced on two."""
        scored = self.engines[0].score(self.qwen3.prompts[2])
        forced = dataclasses.replace(scored.routed_experts, ids=scored.routed_experts.ids[..., ::-1].copy())
        for routes in (scored.routed_experts, forced):
            one, other = (engine.score(self.qwen3.prompts[2], routed=routes) for engine in self.engines)
            np.testing.assert_array_equal(other.routed_experts.ids, routes.ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=LOGPROB)

    def _ask(self, engine):
        told = []
        for sampling in SAMPLING:
            how = dict(max_tokens=6, ignore_eos=True, **sampling)
            asks = dict(sampling_params=how, return_logprob=True, return_routed_experts=True)
            told += engine.generate(input_ids=self.qwen3.prompts, **asks)
        engine.flush_cache()
        return told

    def _compare(self, alone, shared):
        alike(alone, shared)


def placement(qwen3, alone):
    """Experts with replicas, placed one way, then another while requests run, then with other weights: tokens and
    routes are those of one device, ids are logical, and nothing compiles."""
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
    with Engine(str(qwen3.folder), tp_size=4, ep_size=4, placement=first, **args) as placed:
        wanted = alone.generate(**ask)
        alike(wanted, placed.generate(**ask))
        placed.flush_cache()
        for next_one in (second, third):
            with ThreadPoolExecutor(1) as pool, events() as seen:
                running = pool.submit(placed.generate, **ask)
                assert placed.apply_placement(next_one) > 0
                alike(wanted, running.result())
                assert placed.apply_placement(next_one) == 0
                placed.flush_cache()
                alike(wanted, placed.generate(**ask))
            assert not seen, seen
            held_is(placed, next_one, qwen3.folder)
        scored = [engine.score(qwen3.prompts[2]) for engine in (alone, placed)]
        np.testing.assert_array_equal(*(score.routed_experts.ids for score in scored))
        for engine in (alone, placed):
            engine.update_weights_from_disk(qwen3.other, version=1)
        held_is(placed, third, qwen3.other)
        alike(alone.generate(**ask), placed.generate(**ask))
        runner = placed.components.core.runner
        placed.thread.run_drained(
            lambda: runner.move_layer(*runner.layers()[0], second)
        )  # a change that stops half way
        for engine in (alone, placed):
            engine.update_weights_from_disk(qwen3.folder, version=2)
        held_is(placed, third, qwen3.folder)
        assert placed.apply_placement(second) > 0
        held_is(placed, second, qwen3.folder)
        alike(alone.generate(**ask), placed.generate(**ask))
        with pytest.raises(PlacementError, match="max_replicas"):
            placed.apply_placement(rebalance(np.ones((3, 16)), num_instances=24, num_devices=4))
        with pytest.raises(InvalidRequestError, match="placement="):
            alone.apply_placement(second)
    with pytest.raises(PlacementError, match="num_devices=4, but tp_size=2"):
        Engine(str(qwen3.folder), tp_size=2, ep_size=2, placement=first, **args)


def held_is(engine, placement, folder):
    """Every device holds, layer by layer, the experts that the placement says, whole."""
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
            held = placement.physical_to_logical_map[:, device * own : (device + 1) * own]
            wanted = experts[path[-1]].reshape(3, 16, *leaf.shape[1:])[np.arange(3)[:, None], held]
            np.testing.assert_array_equal(np.asarray(shard.data).reshape(wanted.shape), wanted)


def alike(alone, shared):
    for one, other in zip(alone, shared, strict=True):
        assert one["output_ids"] == other["output_ids"]
        np.testing.assert_array_equal(*(extract_routed_experts_from_meta_info(told) for told in (one, other)))
        np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), rtol=0, atol=LOGPROB)


def _state(engine):
    return engine.components.core.runner.state


def refusals(folder):
    """What cannot be is said before a weight is loaded; a plan needs no device."""
    write_tiny_checkpoint(folder)
    args = dict(skip_tokenizer_init=True, **SIZES)
    for tp, said in (
        (3, "tp_size=3 does not divide 2 kv heads, .*; values that work for this model: 1, 2, 4"),
        (8, "4 query heads.*; values that work for this model: 1, 2, 4"),
    ):
        with pytest.raises(ConfigError, match=said):
            Engine(str(folder), tp_size=tp, **args)
    write_family(folder / "wide", "olmoe", num_attention_heads=8)
    with pytest.raises(ConfigError, match="tp_size=8 is above the 4 cpu devices here; lower it, or set XLA_FLAGS"):
        Engine(str(folder / "wide"), tp_size=8, **args)
    with pytest.raises(ConfigError, match=r"moe_backend='native' cannot run here: .* tp_size=2"):
        Engine(str(folder), tp_size=2, moe_backend="native", **args)
    plans = [inspect_model(ServerArgs(model_path=str(folder / "wide"), tp_size=tp)).memory_plan for tp in (1, 8)]
    assert "each of 8 devices" in plans[1][-1] and "device" in plans[0][-1] and plans[0][0] != plans[1][0]


def cases(folder):
    """Every case by name, in the order in which they share what is built."""
    for name in FAMILIES:
        yield name, functools.partial(family, folder / name, name)
    yield "dense", functools.partial(dense, folder / "dense")
    yield "refusals", functools.partial(refusals, folder / "refusals")
    qwen3 = functools.cache(lambda: Qwen3(folder / "qwen3"))
    for name in ("answers", "gpu_kernels", "prefix_hits", "retraction"):
        yield name, lambda name=name: getattr(qwen3(), name)()
    served = functools.cache(lambda: Served(qwen3()))
    yield "memory", lambda: qwen3().memory(served().engines[1].components.core)
    yield "placement", lambda: placement(qwen3(), served().engines[0])
    for name in ("samplers", "replay", "new_weights"):
        yield name, lambda name=name: getattr(served(), name)()


def main(only):
    """Run the cases of these names, or all."""
    with tempfile.TemporaryDirectory() as folder:
        for name, case in cases(Path(folder)):
            if not only or name in only:
                print(json.dumps([name, _outcome(case)]), flush=True)


def _outcome(case):
    """None, or what went wrong."""
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    main(sys.argv[1:])
