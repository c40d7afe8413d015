"""What drafting by a model costs: steps of an engine whose prediction layer (NEXTN) rests, drafts, or is verified.

    python benchmarks/draft_models.py [--batches 1 8] [--rounds 5]
    python benchmarks/draft_models.py --published --layers 2 --batches 1 16 64 --name draft_models_h100     # a GPU
    python benchmarks/draft_models.py --small                # does it run

A GLM-4.5 model with random weights: of a size for two CPU cores in float32, or with --published GLM-4.5-Air in
bfloat16 with --layers of its 46. Milliseconds a step, the median over rounds of whole runs that take turns:

off        an engine without drafts
rest       the draft layer reads each token; steps overlap
draft      after each step three tokens are drafted, and none is verified; steps are joined, too
joined     the three drafts of each request are verified once the host has read them; random weights accept few
ahead      the same, before the host has read the step that made them
given      as ahead, with earlier drafts that are on the device: the draft layer does not run

`cost` is draft - off, and `cost ahead` ahead - given, both without what verifying costs; the second is less than the
device's time for drafting where `given` waits for the host. `floor`: the bytes of three passes over the draft layer and
the head, over the rate at which this device copies an array; of experts those that so many tokens choose on average.
Capture is on in all engines."""

import argparse
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
from common import Prompts, print_table, progress, write_result
from families_gpu import copy_rate
from family_configs import PUBLISHED, layer_bytes, read_family, small_keys

from capture import time_steps
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.feed_forward import Sparse

NUM_DRAFTS, STEPS, PROMPT = 3, 40, 64
MEDIUM = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
}


class FixedPolicy:
    """Drafts as often as it is told, and verifies all of them or none."""

    is_off = False

    def __init__(self) -> None:
        self.drafts = self.verifies = False

    def should_try(self, step: int) -> bool:
        """Whether to draft."""
        return self.drafts

    def choose(self, survivals: Any, num_requests: int) -> list[int]:
        """All drafts, or none."""
        return [survival.size if self.verifies else 0 for survival in survivals]

    def choose_ahead(self, survivals: Any, num_requests: int, *, joined_gain: float) -> list[int]:
        """All drafts, or none."""
        return self.choose(survivals, num_requests)

    def tried(self, **_: Any) -> None:
        """Nothing is learned."""

    def expect(self, *_: Any) -> bool:
        """Nothing is learned."""
        return False

    def renew(self) -> None:
        """Nothing is learned."""


class GivenDrafts:
    """Replaces the draft programs of an engine. While `given`, they return the drafts of their last real call and run
    nothing, so that a verify step reads about as many experts."""

    def __init__(self, core: EngineCore) -> None:
        self._programs = core.runner._programs  # type: ignore[attr-defined]
        self._own = {key: program for key, program in self._programs.items() if key[0] == "draft"}
        self._last = dict[Any, Any]()
        self.set(given=False)

    def set(self, *, given: bool) -> None:
        """Whether drafts are given from now on."""
        for key in self._own:
            self._programs[key] = functools.partial(self._give if given else self._draft, key)

    def _draft(self, key: Any, *inputs: Any) -> tuple[Any, Any]:
        pool, self._last[key] = self._own[key](*inputs)
        return pool, self._last[key]

    def _give(self, key: Any, weights: Any, target: Any, pool: Any, *_: Any) -> tuple[Any, Any]:
        del weights, target
        return pool, self._last[key]


def floor_ms(config: FamilyConfig, batch: int, rate: float, itemsize: int) -> float:
    """Three passes over the draft layer and the head."""
    assert config.predictor is not None
    layer, router = config.predictor.layer, None
    if isinstance(layer.feed, Sparse):
        router = layer.feed.router
    experts = None if router is None else router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** batch)
    projection = 2 * config.hidden_size**2 * itemsize
    head = config.hidden_size * config.vocab_size * itemsize
    scale = itemsize / 2  # layer_bytes counts two bytes a number
    return NUM_DRAFTS * (layer_bytes(layer, config, experts) * scale + projection + head) / rate * 1e3


def time_mode(core: EngineCore, batch: int, turn: int, vocabulary: int) -> float:
    """Seconds a step of a batch that decodes."""
    core.flush_cache()
    requests = Prompts(turn, vocabulary).requests(batch, prompt=PROMPT, new=STEPS * (NUM_DRAFTS + 1) + 16, ask=True)
    core.add(requests)
    while not all(req.is_prefilled and req.num_output > 3 for req in requests):
        core.step()
    seconds = time_steps(core, STEPS)
    for req in requests:
        core.abort(req.rid)
    while not core.is_idle:
        core.step()
    return seconds


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--published", action="store_true", help="GLM-4.5-Air, for a GPU")
    parser.add_argument("--layers", type=int, default=12, help="of the published model")
    parser.add_argument("--small", action="store_true", help="one short round")
    parser.add_argument("--name", default="draft_models_cpu", help="of the result")
    args = parser.parse_args()
    model = PUBLISHED["GLM-4.5-Air"]
    if args.small:
        args.batches, args.rounds = [2], 1
        keys = small_keys(model)
    else:
        keys = model.cut(args.layers) if args.published else {**model.config, **MEDIUM}
    keys = {**keys, "num_nextn_predict_layers": 1}
    config, dtype = read_family(keys), "bfloat16" if args.published else "float32"
    rate = copy_rate(1 << (22 if args.small else 28))
    rows = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(keys))
        for batch in args.batches:
            length = PROMPT + STEPS * (NUM_DRAFTS + 1) + 32
            server = ServerArgs(
                model_path=folder,
                dtype=dtype,
                precompile_bs_paddings=(batch,),
                precompile_token_paddings=(max(256, batch * PROMPT + batch),),
                context_length=length + 16,
                max_total_tokens=batch * (length + 32),
                mem_fraction_static=0.4,
                enable_return_routed_experts=True,
                skip_tokenizer_init=True,
            )
            speculative = SpeculativeConfig(algorithm="NEXTN", adaptive=False)
            progress(f"batch {batch}: building")
            plain = build_engine(server, load_format="dummy").core
            drafting = build_engine(server, load_format="dummy", speculative=speculative).core
            assert drafting.speculation is not None
            policy = drafting.speculation.policy = FixedPolicy()
            modes = {"off": (plain, False, False), "rest": (drafting, False, False)}
            modes |= {name: (drafting, True, name != "draft") for name in ("draft", "joined", "ahead", "given")}
            programs = GivenDrafts(drafting)
            (scheduler,) = drafting.ranks
            may_be_ahead = scheduler.may_be_ahead
            seconds: dict[str, list[float]] = {mode: [] for mode in modes}
            for turn in range(args.rounds + 1):
                progress(f"batch {batch}, round {turn} of {args.rounds}")
                for mode in reversed(modes) if turn % 2 else modes:  # "ahead" comes first: "given" has its drafts
                    core, policy.drafts, policy.verifies = modes[mode]
                    is_ahead = mode in ("ahead", "given")
                    scheduler.may_be_ahead = may_be_ahead if is_ahead else lambda: False
                    programs.set(given=mode == "given")
                    took = time_mode(core, batch, turn, config.vocab_size)
                    if turn:
                        seconds[mode].append(took * 1e3)
            medians = {mode: statistics.median(took) for mode, took in seconds.items()}
            cost = statistics.median(one - two for one, two in zip(seconds["draft"], seconds["off"], strict=True))
            floor = floor_ms(config, batch, rate, jax.numpy.dtype(dtype).itemsize)
            ratio = {
                "rest / off": medians["rest"] / medians["off"],
                "ahead / joined": medians["ahead"] / medians["joined"],
            }
            ahead = statistics.median(one - two for one, two in zip(seconds["ahead"], seconds["given"], strict=True))
            ratio |= {"cost ms": cost, "cost ahead ms": ahead, "floor ms": floor}
            rows.append(
                {
                    "batch": batch,
                    **{f"{mode} ms": value for mode, value in medians.items()},
                    **ratio,
                    "cost / floor": cost / floor,
                    "cost ahead / floor": ahead / floor,
                }
            )
            print_table(rows)
    print(write_result(args.name, rows, layers=config.num_layers, copy_rate=rate))


if __name__ == "__main__":
    main()
