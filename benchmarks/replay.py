"""What replay costs: a training step with replayed routing over the same step live, and decode + align of a long
record.

    python benchmarks/replay.py [--small | --schedules 1000]

Steps are forward and backward of the benchmark model, interleaved pair by pair in one process, medians and the
median ratio given. The record is 32,768 tokens of 48 layers and top-8 of 128 experts (12.6 MB): read from the bytes
of its .npy, checked, and laid out as a batch; `base64_ms` is what the text form would add. `..._copies`: the most
memory that a stage held beside its input, in sizes of the record: reading copies nothing, and laying out writes the
batch, the one array that goes to the device. --schedules runs so many random schedules of the engine instead
(chunks, prefix hits, n > 1, retraction, aborts and continuation, flushes, weight updates) and compares each row with
a tap before the experts. Dims: B sequences, S tokens of a sequence."""

import argparse
import io
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
import pybase64
from common import benchmark_config, benchmark_model, print_table, write_result
from flax import nnx

from oracles.schedules import ScheduleSetup, run_schedule
from oracles.testbeds import other_weights, tiny_testbed
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.metadata import to_metadata
from routed_experts.formats.wire import npy_bytes, record_from_npy
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.replay import RoutedBatch, Sample, align, canary, forward
from support.tiny_checkpoint import VOCAB_SIZE


def small_model() -> FamilyDecoder:
    """Two layers of the same form, to see whether this script runs."""
    sizes = dict(vocab_size=64, hidden_size=32, head_dim=8, moe_intermediate_size=16, num_hidden_layers=2)
    return FamilyDecoder(benchmark_config(**sizes), rngs=nnx.Rngs(0), dtype=jnp.dtype("float32"))


def step_times(model: FamilyDecoder, batch: int, length: int, pairs: int) -> dict[str, object]:
    """Milliseconds of a training step, live and replayed."""
    spec = model.config.capture_spec
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, model.config.vocab_size, (batch, length)), jnp.int32)

    def compute_loss(state, tokens, routed):
        out = forward(nnx.merge(graphdef, state), tokens, routed=routed)
        logprobs = jax.nn.log_softmax(out.logits[:, :-1])
        loss = -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))
        return loss, None if routed is None else canary(out.slot_miss, routed)

    step = jax.jit(jax.value_and_grad(compute_loss, has_aux=True))
    record = jax.jit(lambda state, tokens: forward(nnx.merge(graphdef, state), tokens, return_routed=True).ids)
    ids = record(state, tokens)
    assert ids.shape == (batch, length, spec.num_moe_layers, spec.top_k)
    kinds = {
        "live": None,
        "replayed": RoutedBatch(ids, jnp.ones((batch, length), bool), jnp.zeros((batch, length), bool)),
    }
    for routed in kinds.values():
        jax.block_until_ready(step(state, tokens, routed))
    times = {name: [] for name in kinds}
    for pair in range(pairs):
        for name in (*kinds,) if pair % 2 else (*reversed(kinds),):
            start = time.perf_counter()
            jax.block_until_ready(step(state, tokens, kinds[name]))
            times[name].append(time.perf_counter() - start)
    ratios = [replayed / live for live, replayed in zip(times["live"], times["replayed"], strict=True)]
    return {
        "what": f"training step, {batch} x {length} tokens",
        "live_ms": statistics.median(times["live"]) * 1e3,
        "replayed_ms": statistics.median(times["replayed"]) * 1e3,
        "ratio": statistics.median(ratios),
        "pairs": pairs,
    }


def long_record(tokens: int, layers: int, top_k: int, experts: int) -> RoutedExperts:
    """Random routes of one sequence, distinct in each row."""
    rng = np.random.default_rng(1)
    few = rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (1024, 1)), axis=1)[:, :top_k]
    ids = few[rng.integers(0, len(few), (tokens - 1, layers))]
    return RoutedExperts(
        ids=ids,
        start=0,
        num_tokens=tokens,
        num_prompt_tokens=tokens // 2,
        layer_ids=tuple(range(layers)),
        num_hidden_layers=layers,
        num_experts=experts,
        version_spans=((0, tokens - 1, 0),),
    )


def align_times(tokens: int, layers: int, top_k: int, experts: int, repeats: int) -> dict[str, object]:
    """Milliseconds from bytes to a batch on the host."""
    record = long_record(tokens, layers, top_k, experts)
    spec = CaptureSpec(num_hidden_layers=layers, layer_ids=record.layer_ids, num_experts=experts, top_k=top_k)
    encoded, info = npy_bytes(record.ids), to_metadata(record, payload_format="npy").to_json() | {"sha256": None}
    text = pybase64.b64encode(encoded)

    def aligned(read: RoutedExperts) -> RoutedBatch:
        return align([Sample(read, tokens)], layout="pad_right", seq_len=tokens, spec=spec)

    def copied_bytes(stage: Callable[[], object]) -> float:
        tracemalloc.start()
        stage()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / record.ids.nbytes

    assert np.array_equal(np.load(io.BytesIO(encoded), allow_pickle=False), record.ids)
    times = {"decode_ms": [], "align_ms": [], "base64_ms": []}
    for _ in range(repeats):
        start = time.perf_counter()
        read = record_from_npy(encoded, info)
        decoded = time.perf_counter()
        batch = aligned(read)
        done = time.perf_counter()
        pybase64.b64decode(text, validate=True)
        times["base64_ms"].append((time.perf_counter() - done) * 1e3)
        times["decode_ms"].append((decoded - start) * 1e3)
        times["align_ms"].append((done - decoded) * 1e3)
        assert batch.valid.sum() == tokens - 1
    copies = {
        "decode_copies": copied_bytes(lambda: record_from_npy(encoded, info)),
        "align_copies": copied_bytes(lambda: aligned(read)),
    }
    both = [decode_ms + align_ms for decode_ms, align_ms in zip(times["decode_ms"], times["align_ms"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    total = {"decode_and_align_ms": statistics.median(both), "best_ms": min(both)}
    return {"what": f"record of {tokens} x {layers} x {top_k}", **medians, **total, **copies}


def judge_schedules(count: int) -> dict[str, object]:
    """Random schedules of the tiny MoE; how many rows were compared and which schedules had a wrong one."""
    setup = ScheduleSetup(tiny_testbed(moe_backend="probed").bench, VOCAB_SIZE, other_weights)
    rows, wrong, start = 0, list[str](), time.perf_counter()
    for seed in range(count):
        try:
            rows += run_schedule(setup, seed)
        except AssertionError as error:
            wrong.append(f"{seed}: {error}"[:300])
    return {
        "what": f"{count} random schedules",
        "rows compared": rows,
        "wrong": wrong,
        "s": time.perf_counter() - start,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few tokens and one pair: does it run; writes nothing")
    parser.add_argument(
        "--schedules", type=int, default=0, help="random schedules whose rows are judged, and nothing else"
    )
    args = parser.parse_args()
    if args.schedules:
        judged = judge_schedules(args.schedules)
        print_table([judged])
        print(write_result("replay_schedules_cpu", [judged]))
        raise SystemExit(1 if judged["wrong"] else 0)
    model = small_model() if args.small else benchmark_model(jnp.dtype("float32"))
    steps = step_times(model, *((2, 16, 1) if args.small else (4, 256, 15)))
    record = align_times(*((64, 3, 8, 128, 1) if args.small else (32_768, 48, 8, 128, 9)))
    for row in (steps, record):
        print_table([row])
    print(write_result("replay_cpu", [steps, record]))


if __name__ == "__main__":
    main()
