"""One process of a group, for tests: `python -m support.group_process SPEC`, SPEC a JSON object.

    rank       0 leads and obeys commands, others follow; None: the same engine in one process
    path, engine, dist    the model and the keywords of Engine, follow and DistConfig
    lazy       compile the programs of greedy steps at the start, the others at their first run
    trap       a fault of this process alone: see `set_trap`
    tap        a file that receives the ids that enter the experts of this process: see `tap_experts`
The leader reads commands from standard input, a JSON line each: the name of a function in COMMANDS and its keywords. It
answers with a JSON line: the result, or class, code and text of the error."""

import dataclasses
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.experimental import io_callback

from routed_experts import (
    DistConfig,
    Engine,
    ExpertPlacement,
    PlacementConfig,
    SpeculativeConfig,
    extract_routed_experts_from_meta_info,
    follow,
)
from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.engine.build import runner_builder
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.engine.control import weight_control
from routed_experts.engine.follower import Follower
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.model_runner import ModelRunner
from routed_experts.execution.orders import Order, OrderKind
from support import lazy_compile


def main(spec):
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)
    if spec.get("lazy"):
        ModelRunner.compile = lazy_compile.compile_lazily
        ModelRunner.compile_in_order = _compile_lazily_in_order
    set_trap(spec.get("trap"), leads=not spec["rank"])
    if spec.get("tap"):
        tap_experts(spec["tap"].replace("RANK", str(spec["rank"])))
    engine_args = dict(spec["engine"])
    if "placement" in engine_args:
        engine_args["placement"] = _placement(engine_args["placement"])
    if "speculative" in engine_args:
        engine_args["speculative"] = SpeculativeConfig(**engine_args["speculative"])
    rank = spec["rank"]
    if rank is not None:
        engine_args["dist"] = DistConfig(node_rank=rank, **spec["dist"])
    if rank:
        follow(spec["path"], **engine_args)
        return
    with Engine(spec["path"], **engine_args) as engine:
        _say({"ready": True})
        for line in sys.stdin:
            name, arguments = json.loads(line)
            if name == "end":
                break
            try:
                _say({"result": COMMANDS[name](engine, **arguments)})
            except Exception as error:
                _say({"error": [type(error).__name__, getattr(error, "code", ""), str(error)]})
    _say({"result": "ended"})


def _say(message):
    print(json.dumps(message), flush=True)


def _compile_lazily_in_order(runner):
    """Programs of greedy steps now, which no watchdog times, the others at their first run."""
    lazy_compile.compile_lazily(runner)
    for key in runner._programs.jobs:
        if key[0] == "forward" or (key[0] == "sample" and key[-1] is SamplingMode.GREEDY):
            assert runner._programs[key] is not None
    return [f"{'0' * 12} {key}" for key in runner._programs.jobs]


def _placement(seed):
    """A placement of the tiny MoE with spare instances on two devices."""
    from routed_experts.placement import rebalance

    load = np.random.default_rng(seed).gamma(0.5, size=(3, 16))
    return PlacementConfig(plan=rebalance(load, num_instances=20, num_devices=2))


def set_trap(trap, *, leads):
    """Make this process go wrong: {"at": "load" | "compile" | a number of steps | "between", after 30 of them |
    "prepare", "does": "exit" | "kill" | "stop" | "sleep" | "flip" | "raise"}."""
    if trap is None:
        return
    at, does = trap["at"], trap["does"]

    def spring(order=None):
        print(f"TRAP {time.monotonic()}", file=sys.stderr, flush=True)
        if does == "exit":
            os._exit(9)
        if does in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if does == "kill" else signal.SIGSTOP)
        if does == "sleep":
            threading.Event().wait()
        if does == "raise":
            raise RuntimeError("a fault of the test")
        assert does == "flip" and order is not None
        packed = order.arrays[0].copy()
        packed[-1] ^= 1 << 20  # a page that this step does not read: no result changes
        return Order(kind=order.kind, seq=order.seq, head=order.head, arrays=(packed, *order.arrays[1:]))

    if at == "load":
        load = runner_builder.load_model
        runner_builder.load_model = lambda *args, **kwargs: (spring(), load(*args, **kwargs))[1]
    elif at == "compile":
        compile_in_order = ModelRunner.compile_in_order
        ModelRunner.compile_in_order = lambda runner: (spring(), compile_in_order(runner))[1]
    elif leads:
        _trap_leader(at, spring)
    else:
        _trap_follower(at, spring)


def _trap_leader(at, spring):
    if at == "prepare":
        weight_control.load_ready = lambda *args: spring()
    elif at == "between":
        step = EngineCore.step
        EngineCore.step = lambda core: (spring() if core.num_steps == 30 else None, step(core))[1]
    else:
        to_device, steps = ModelRunner._to_device, [0]

        def trapped(runner, *args):
            """After the order was sent, and before this process runs it."""
            steps[0] += 1
            if steps[0] == at:
                spring()
            return to_device(runner, *args)

        ModelRunner._to_device = trapped


def _trap_follower(at, spring):
    carry_out, count = Follower.carry_out, [0]

    def trapped(follower, order):
        is_step = order.kind is OrderKind.STEP
        count[0] += is_step
        hits = order.kind is OrderKind.PREPARE_WEIGHTS if at == "prepare" else is_step and count[0] == at
        carry_out(follower, (spring(order) or order) if hits else order)
        if at == "between" and is_step and count[0] == 30:
            spring()

    Follower.carry_out = trapped


def tap_experts(path):
    """Write the ids that enter the experts to a file, [N, K] int32 of each MoE layer of each step, of every device in
    turn: of one device a process, in order. Shares no code with capture: the ids pass through the host."""
    file = open(path, "wb")  # noqa: SIM115  # until the process ends
    choose = BackendRegistry.choose

    def record(ids):
        np.array([ids.shape[0], ids.shape[1]], np.int32).tofile(file)
        np.asarray(ids, np.int32).tofile(file)
        file.flush()
        return ids

    def tapped(run):
        def call_tapped(call, *shared):
            ids = io_callback(record, jax.ShapeDtypeStruct(call.ids.shape, call.ids.dtype), call.ids)
            return run(dataclasses.replace(call, ids=ids), *shared)

        return call_tapped

    def choose_tapped(registry, *args, **options):
        kernels, attention = choose(registry, *args, **options)
        assert kernels.layer_stack is None and kernels.fused_layer is None
        return dataclasses.replace(
            kernels, moe=dataclasses.replace(kernels.moe, run=tapped(kernels.moe.run))
        ), attention

    BackendRegistry.choose = choose_tapped


def generate(engine, prompts, params, **options):
    """Tokens, logprob bits and rows of answers, as comparable values; with combine weights where there are some."""
    if options.get("return_routed_experts") and engine.server_args.enable_return_routed_experts_weights:
        options = options | {"return_routed_experts_weights": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, **options)
    return [_observed(output) for output in (outputs if isinstance(outputs, list) else [outputs])]


def _observed(output):
    meta = output["meta_info"]
    rows = extract_routed_experts_from_meta_info(output) if "routed_experts" in meta else None
    bits = [
        _bits([entry[0] for entry in meta[name] if entry[0] is not None])
        for name in ("output_token_logprobs", "input_token_logprobs")
        if meta.get(name)
    ]
    top = [[entry[1] for entry in position or ()] for position in meta.get("output_top_logprobs") or ()]
    return {
        "tokens": output["output_ids"],
        "rows": None if rows is None else [rows.size // 16, rows.tobytes().hex(), meta.get("routed_experts_weights")],
        "bits": bits,
        "top": top,
        "cached": meta["cached_tokens"],
        "version": meta.get("weight_version"),
        "reason": meta["finish_reason"]["type"],
    }


def _bits(values):
    return np.array(values, np.float32).tobytes().hex()


def score(engine, sequences, replay=False):
    """Logprob bits and rows of scores; with `replay` of a second score on the rows of the first, rolled, and on their
    weights where there are some."""
    outputs, weights = engine.score(sequences), engine.server_args.enable_return_routed_experts_weights
    if replay:
        records = [output.routed_experts for output in outputs]
        routed = [dataclasses.replace(record, ids=np.roll(record.ids, 1, axis=0)) for record in records]
        outputs = engine.score(sequences, routed=routed, replay_weights=weights)
        if weights:
            for output, record in zip(outputs, records, strict=True):
                np.testing.assert_array_equal(output.routed_experts.weights, record.weights)
    return [[_bits(output.logprobs), output.routed_experts.ids.tobytes().hex()] for output in outputs]


def retract_often(engine, prompts, params, every=3):
    """`generate` while every third step sends a running request back to the queue."""
    core, count = engine.components.core, [0]
    step = core.step

    def retracting():
        count[0] += 1
        outs = step()
        if count[0] % every == 0 and core.ranks[0].running:
            engine.thread.deliver(core.drain().outs)
            if core.ranks[0].running:
                core.retract(core.ranks[0].running[-1])
        return outs

    engine.thread.run_between_steps(lambda: setattr(core, "step", retracting))
    try:
        return generate(engine, prompts, params, return_routed_experts=True)
    finally:
        engine.thread.run_between_steps(lambda: delattr(core, "step"))


def flush(engine):
    """Wait for all steps, and drop the cached prefixes."""
    engine.thread.run_drained(engine.components.core.flush_cache)


def abort_one(engine, prompt):
    """Abort a long request after some tokens; its tokens and rows so far."""
    stream = engine.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0.0, "ignore_eos": True},
        max_new_tokens=60,
        return_logprob=True,
        return_routed_experts=True,
        rid="long",
        stream=True,
    )
    last = next(stream)
    engine.abort("long")
    for output in stream:
        last = output
    observed = _observed(last)
    count = len(observed["tokens"])
    return {
        "is_abort": observed["reason"] == "abort",
        "count": count,
        "rows": observed["rows"],
        "tokens": observed["tokens"],
    }


def pause_and_resume(engine, mode, prompt):
    """A request that waits through a pause."""
    engine.pause(mode=mode)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.extend(generate(engine, [prompt], {"temperature": 0.0, "max_new_tokens": 5}))
    )
    thread.start()
    engine.resume()
    thread.join()
    return answers


def release_and_resume(engine):
    """Give the pool back and take it again."""
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation()
    return list(engine.released)


def release_weights(engine):
    """Give the weights back."""
    engine.release_memory_occupation(["weights"])
    return list(engine.released)


def resume_memory(engine):
    engine.resume_memory_occupation()
    return list(engine.released)


def update_weights(engine, path, version):
    engine.update_weights_from_disk(path, version=version)
    return dataclasses.astuple(engine.get_weight_version())


def update_in_memory(engine):
    engine.update_weights({}, version=99)


def resume_with_state(engine):
    engine.resume_memory_occupation({}, version=99)


def set_version(engine, version):
    engine.update_weight_version(version)
    return dataclasses.astuple(engine.get_weight_version())


def move_experts(engine, seed):
    """Apply another placement; how many instances were copied."""
    return engine.apply_placement(_placement(seed).initial)


def identity(engine):
    return engine.apply_placement(ExpertPlacement.identity(3, 16, 2))


def overwrite_pool(engine):
    """Poison the pool."""
    engine.thread.run_drained(engine.components.core.runner.overwrite_pool)


def count_unordered(engine):
    """From now on, count dispatches with and without the order held, and name their threads."""
    runner, order = engine.components.core.runner, engine.components.group._order
    counts = engine.dispatch_counts = {"ordered": 0, "unordered": 0, "threads": []}

    def counted(program):
        def call(*args, **kwargs):
            counts["ordered" if order._is_owned() else "unordered"] += 1
            counts["threads"] = sorted({*counts["threads"], threading.current_thread().name})
            return program(*args, **kwargs)

        return call

    class CountedPrograms:
        def __init__(self, programs):
            self._programs = programs

        def __getitem__(self, key):
            return counted(self._programs[key])

    scores = engine.scorer._programs
    scores._forward, scores._score_prompt = counted(scores._forward), counted(scores._score_prompt)
    engine.thread.run_between_steps(lambda: setattr(runner, "_programs", CountedPrograms(runner._programs)))


def dispatch_counts(engine):
    return engine.dispatch_counts


def program_digests(engine):
    """Key and digest of every program before XLA."""
    jobs = engine.components.core.runner._jobs()
    return [[str(key), hashlib.sha256(job().as_text().encode()).hexdigest()[:16]] for key, job in jobs.items()]


def info(engine):
    return {name: engine.get_server_info().get(name) for name in ("nnodes", "followers")}


def stats(engine):
    actual = engine.stats()
    return {"preemptions": actual.preemptions, "steps": actual.num_steps}


def integrity(engine):
    return [str(violation) for violation in engine.check_integrity()]


def phases(engine):
    """Seconds of the phases of the start."""
    return {phase.name: phase.seconds for phase in engine.phases}


def threads(engine):
    return sorted(thread.name for thread in threading.enumerate())


def descriptors(engine):
    """Open sockets of this process."""
    links = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    ]
    return sum(link.startswith("socket:") for link in links)


def resident_bytes(engine):
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


COMMANDS = {
    function.__name__: function
    for function in (
        generate,
        score,
        retract_often,
        flush,
        abort_one,
        pause_and_resume,
        release_and_resume,
        release_weights,
        resume_memory,
        update_weights,
        update_in_memory,
        resume_with_state,
        set_version,
        move_experts,
        identity,
        overwrite_pool,
        count_unordered,
        dispatch_counts,
        program_digests,
        info,
        stats,
        integrity,
        phases,
        threads,
        descriptors,
        resident_bytes,
    )
}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
