"""Data ranks: host time of scheduling them, and decode steps of an engine with ranks beside the same devices as one.

    python benchmarks/data_ranks.py --host [--ranks 4] [--batch 32]      # schedulers alone, no device
    python benchmarks/data_ranks.py [--tp 2] [--ranks 2] [--layers 8] [--batch 32] [--prompt 2048] [--new 96]
    python benchmarks/data_ranks.py --small                             # a model of 2 layers, 8 x 64 tokens

`--host`: microseconds a decode step of `DataRanks`, of as many schedulers one after another, and of one; `--batch`
requests in each rank. Without it: random weights with the shapes of DeepSeek-V2-Lite (its latent attention keeps one
row a token for all heads, so devices of one rank hold copies of it), cut to `--layers`; `--batch` requests in all, over
the ranks. Engines are built side by side and take turns; `idle` is a step with the requests of the first rank alone.
KV tokens are those that fit beside the weights, by the memory plan. On a CPU:
XLA_FLAGS=--xla_force_host_platform_device_count=2."""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Prompts, print_table, write_result

from routed_experts.core.buckets import Buckets
from routed_experts.core.model_worker_batch import ModelWorkerBatch, StepResult
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.build.memory_planning import abstract_arrays, plan_engine
from routed_experts.engine.control.served_model import create_sharding
from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.model_folder import ModelFolder
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.scheduling.scheduler import Scheduler

DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "max_position_embeddings": 8192,
    "rope_theta": 10_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "torch_dtype": "float32",
}
PAGE, CONTEXT, VOCABULARY = 16, 2048, 8192
WARM_UP = 8  # decode steps


def options() -> argparse.Namespace:
    """The command line; --small is a set of its other flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="--layers 2 --batch 8 --prompt 64 --new 24 --rounds 2")
    parser.add_argument("--name")
    args = parser.parse_args()
    if args.small:
        vars(args).update(layers=2, batch=8, prompt=64, new=24, rounds=2)
    args.ranks = args.ranks or (4 if args.host else 2)
    return args


class Schedulers:
    """Schedulers whose requests all decode, and results that a device would give."""

    def __init__(self, count: int, batch: int, *, together: bool) -> None:
        self._args = ServerArgs(
            page_size=PAGE,
            precompile_bs_paddings=(batch,),
            precompile_token_paddings=(1024,),
            disable_radix_cache=True,
            max_queued_requests=count * batch,
        )
        buckets = Buckets.from_args(self._args, context_length=CONTEXT)
        pages = batch * CONTEXT // PAGE + 1
        self._schedulers = [
            Scheduler(self._args, buckets, num_pages=pages, vocab_size=VOCABULARY) for _ in range(count)
        ]
        self._ranks = DataRanks(self._schedulers, self._args)
        self._together, self._batch = together, batch
        self._tokens = np.random.default_rng(0).integers(0, VOCABULARY, batch).astype(np.int32)

    def begin(self, prompts: Prompts, steps: int) -> None:
        """Feed the prompts of new requests that then decode `steps` tokens."""
        count = len(self._schedulers) * self._batch
        self._ranks.add(prompts.requests(count, prompt=16, new=steps + 1, ask=False))
        while any(
            scheduler.waiting or not all(req.is_prefilled for req in scheduler.running) for scheduler in self._ranks
        ):
            self._commit(self._schedule())

    def time_step(self) -> float:
        """Seconds in which the next step is scheduled; it is committed outside of them."""
        start = time.perf_counter()
        batches = self._schedule()
        seconds = time.perf_counter() - start
        self._commit(batches)
        return seconds

    def _schedule(self) -> tuple[ModelWorkerBatch, ...]:
        if self._together:
            batches = self._ranks.build([scheduler.choose() for scheduler in self._ranks], drafts_ahead=False)
        else:
            batches = tuple([scheduler.schedule() for scheduler in self._schedulers])
        assert batches is not None, "a step"
        return batches

    def _commit(self, batches: tuple[ModelWorkerBatch, ...]) -> None:
        for scheduler, batch in zip(self._schedulers, batches, strict=True):
            for req in scheduler.commit(batch, self._result()).advanced:
                if req.finish_reason is not None:
                    scheduler.release(req)

    def _result(self) -> StepResult:
        return StepResult(
            tokens=self._tokens,
            logprobs=np.zeros(self._batch, np.float32),
            top_logprobs=None,
            top_ids=None,
            prompt_logprobs=None,
            prompt_top_logprobs=None,
            prompt_top_ids=None,
            rows=None,
            weight_version=0,
        )


def measure_host(args: argparse.Namespace) -> list[dict[str, object]]:
    """Microseconds of scheduling a decode step, in turns; medians of the rounds' medians."""
    kinds = {
        "one scheduler": Schedulers(1, args.batch, together=False),
        f"{args.ranks} schedulers, one after another": Schedulers(args.ranks, args.batch, together=False),
        f"DataRanks of {args.ranks}": Schedulers(args.ranks, args.batch, together=True),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    prompts = Prompts(vocabulary=VOCABULARY)
    for number in range(args.rounds + 1):
        for kind, schedulers in kinds.items():
            schedulers.begin(prompts, args.new)
            taken = [schedulers.time_step() for _ in range(args.new - 1)]
            while any(scheduler.running for scheduler in schedulers._ranks):
                schedulers.time_step()
            if number:  # the first round warms up
                seconds[kind].append(statistics.median(taken))
    apart = list(seconds)[1]
    return [
        {
            "kind": kind,
            "us": 1e6 * statistics.median(own),
            "over schedulers apart": statistics.median(a / b for a, b in zip(own, seconds[apart], strict=True)),
        }
        for kind, own in seconds.items()
    ]


class Decoder:
    """A core whose requests decode."""

    def __init__(self, folder: str, args: argparse.Namespace, ranks: int) -> None:
        self.batch, self.new = args.batch // ranks, args.new
        length = args.prompt + args.new + 1
        self.args = ServerArgs(
            model_path=folder,
            tp_size=args.tp,
            ep_size=args.tp,
            dp_size=ranks,
            context_length=length,
            max_total_tokens=self.batch * (-(-length // PAGE) * PAGE) + PAGE,
            precompile_bs_paddings=(self.batch,),
            precompile_token_paddings=(min(2048, max(64, args.prompt)),),
            disable_radix_cache=True,
            enable_return_routed_experts=True,
        )
        self.core = build_engine(self.args, load_format="dummy").core

    def step_s(self, requests: list[Req]) -> float:
        """The median seconds of a decode step of these requests, the next one in flight."""
        core: EngineCore = self.core
        core.add(requests)
        while not all(req.is_prefilled for req in requests):
            core.step()
        seconds = list[float]()
        since = time.perf_counter()
        for _ in range(self.new - 4):
            core.step()
            now = time.perf_counter()
            seconds.append(now - since)
            since = now
        while not core.is_idle:
            core.step()
        return statistics.median(seconds[WARM_UP:])


def held_tokens(folder: str, args: ServerArgs) -> int:
    """KV tokens that fit on the devices beside the weights, of all ranks."""
    free = dataclasses.replace(args, max_total_tokens=None, max_running_requests=None, context_length=None)
    free = dataclasses.replace(free, precompile_bs_paddings=(4096,), precompile_token_paddings=(8192,))
    source = ModelFolder.open(folder, load_format="dummy")
    config, (_, attention) = source.config, DEFAULT_BACKENDS.choose(free, source.config.needs)
    arrays = abstract_arrays(source, config, "auto")
    plan = plan_engine(free, config, arrays, create_sharding(free, config), attention)
    return plan.memory.pool.num_slots * args.dp_size


def in_rank(requests: list[Req], rank: int) -> list[Req]:
    """The same requests, for one data rank."""
    return [Req(dataclasses.replace(req.source, data_parallel_rank=rank)) for req in requests]


def measure_devices(args: argparse.Namespace) -> list[dict[str, object]]:
    """Decode steps of both engines in turns."""
    length = {"num_hidden_layers": args.layers, "max_position_embeddings": max(8192, args.prompt + args.new + 1)}
    config: dict[str, Any] = DEEPSEEK_V2_LITE | (SMALL if args.small else {}) | length
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        one, ranked = (Decoder(folder, args, ranks) for ranks in (1, args.ranks))
        tokens = {engine: held_tokens(folder, engine.args) for engine in (one, ranked)}
        prompts = Prompts(vocabulary=int(config["vocab_size"]))

        def requests(count: int) -> list[Req]:
            return prompts.requests(count, prompt=args.prompt, new=args.new, ask=True)

        cases: dict[str, tuple[int, Callable[[], float]]] = {
            "one rank": (args.batch, lambda: one.step_s(requests(args.batch))),
            f"{args.ranks} ranks": (args.batch, lambda: ranked.step_s(requests(args.batch))),
            f"{args.ranks} ranks, idle": (ranked.batch, lambda: ranked.step_s(in_rank(requests(ranked.batch), 0))),
        }
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for number in range(args.rounds + 1):
            for case, (_, time_steps) in cases.items():
                taken = time_steps()
                if number:
                    seconds[case].append(taken)
        first = next(iter(seconds.values()))
        return [
            {
                "case": case,
                "requests": cases[case][0],
                "step ms": 1e3 * statistics.median(own),
                "tokens/s": cases[case][0] / statistics.median(own),
                "tokens/s over one rank": statistics.median(
                    cases[case][0] / mine / (args.batch / base) for mine, base in zip(own, first, strict=True)
                ),
                "KV tokens": tokens[one if case == "one rank" else ranked],
            }
            for case, own in seconds.items()
        ]


def main() -> None:
    """Measure, print, write."""
    args = options()
    rows = measure_host(args) if args.host else measure_devices(args)
    print_table(rows)
    name = args.name or ("data_ranks_host_cpu" if args.host else "data_ranks")
    shape = {} if args.host else {"tp": args.tp, "layers": args.layers, "prompt": args.prompt}
    print(write_result(name, rows, ranks=args.ranks, batch=args.batch, rounds=args.rounds, **shape))


if __name__ == "__main__":
    main()
