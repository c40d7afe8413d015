"""Every family at one size beside other engines, and each decode step beside the bytes that it must read.

    python benchmarks/families.py [--families GptOss Qwen3Next ...] [--batches 1 8 32] [--dtype float32] [--rounds 3]
        [--peer NAME=PYTHON ...]

NAME is transformers, vllm or llama_cpp (peer_programs/), PYTHON the interpreter of an environment that has it; without
--peer, transformers of this environment. llama_cpp also needs torch, transformers and LLAMA_CPP=FOLDER, the source of
llama.cpp. A peer that cannot run a family is named below the table with its last error.

A family is its published architecture with hidden 512, 6 layers (Qwen3-Next 8), 32 experts of width 256, top-4 and a
vocabulary of 8,192; random weights, routers wide enough that routing is diverse. This engine runs as a user calls it:
Engine.generate with the rows of every request. Each peer runs with its own defaults, in a process of its own; rounds
alternate and a ratio is that of one round. The peer `capture off` is this engine without the feature. `same` is the
share of greedy tokens before the first difference. `floor` is the time to read a decode step's weights (of experts
those that its rows name) and keys and values once from memory, at the rate that this machine's cores read it;
`step / floor` is the multiple of it."""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import VOCABULARY, print_table, progress, write_result
from peers import REST_S, Peer, PeerEnded, Timing, measure_engine, table

from routed_experts import Engine, extract_routed_experts_from_meta_info

SIZES: dict[str, object] = dict(
    vocab_size=VOCABULARY,
    hidden_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=1024,
    max_position_embeddings=1024,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_LATENT = dict(
    num_key_value_heads=8, kv_lora_rank=128, q_lora_rank=192, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64
)
_LOCAL = dict(num_local_experts=32, intermediate_size=256)
_GROUPED = dict(n_routed_experts=32, n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2)
FAMILIES: dict[str, dict[str, object]] = {  # class of the config in transformers, and what differs from SIZES
    "Qwen3Moe": dict(norm_topk_prob=True),
    "Olmoe": dict(intermediate_size=256, head_dim=64),  # norms are as wide as the model
    "Glm4Moe": dict(n_routed_experts=32, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True),
    "MiniMaxM2": dict(_LOCAL, rotary_dim=64),
    "Mixtral": dict(_LOCAL),
    "DeepseekV3": {**_LATENT, **_GROUPED, "head_dim": 32},
    "Glm4MoeLite": {**_LATENT, "n_routed_experts": 32, "head_dim": 32},
    "Dots1": dict(n_routed_experts=32, n_shared_experts=1, first_k_dense_replace=1, norm_topk_prob=True),
    "ExaoneMoe": dict(num_shared_experts=1, first_k_dense_replace=1, sliding_window=64),
    "HunYuanMoEV1": dict(moe_topk=4, intermediate_size=256, moe_intermediate_size=256),
    "Qwen3Next": dict(
        num_hidden_layers=8,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        shared_expert_intermediate_size=256,
    ),
    "BailingHybrid": {
        **_LATENT,
        **_GROUPED,
        "head_dim": 64,
        "layer_group_size": 3,
        "num_hidden_layers": 6,
        "num_mtp_layers": 0,
        "num_local_experts": 32,
        "q_lora_rank": None,
    },
    "Lfm2Moe": dict(
        layer_types=["conv", "conv", "full_attention"] * 2, num_hidden_layers=6, num_dense_layers=1, head_dim=64
    ),
    "GptOss": dict(_LOCAL, sliding_window=64),
    "Gemma4": dict(
        num_hidden_layers=6,
        head_dim=64,
        global_head_dim=128,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        top_k_experts=4,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "Qwen2Moe": dict(shared_expert_intermediate_size=256, head_dim=64),  # vLLM divides the hidden size by the heads
    "GraniteMoe": dict(_LOCAL, head_dim=64),
    "Ernie4_5_Moe": dict(moe_num_experts=32, moe_k=4, moe_num_shared_experts=1, moe_layer_start_index=1),
}
_CONFIGS = {"Gemma4": "Gemma4TextConfig"}
_EXPERTS = (".experts.", ".input_linear.", ".output_linear.")  # in names of tensors; the last two are Granite's
OFF = "capture off"
SMALL: dict[str, object] = dict(num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=32)


def write_family(name: str, folder: Path, *, small: bool) -> Path:
    """A checkpoint with random weights in the family's own format."""
    import torch
    import transformers

    settings = {**SIZES, **(SMALL if small else {}), **FAMILIES[name]}
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if label.endswith(
                (
                    "mlp.gate.weight",
                    "gate.wg.weight",
                    "feed_forward.gate.weight",
                    "router.weight",
                    "router.proj.weight",
                    "block_sparse_moe.gate.weight",
                    "layer.weight",
                )
            ):
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def read_rate(num_bytes: int = 1 << 29, threads: int = 2, rounds: int = 5) -> float:
    """Bytes a second that threads read from memory together, each its own part; the best of some rounds."""
    parts = np.array_split(np.ones(num_bytes // 4, np.int32), threads)
    seconds = []
    for _ in range(rounds):
        team = [threading.Thread(target=part.max) for part in parts]
        start = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds)


class StepBytes:
    """What a decode step reads: dense weights, the experts of its rows, keys and values."""

    def __init__(self, engine: Engine, folder: Path, itemsize: int) -> None:
        from safetensors import safe_open

        sizes: dict[str, int] = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as tensors:
                sizes |= {name: int(np.prod(tensors.get_slice(name).get_shape())) for name in tensors.keys()}  # noqa: SIM118
        experts = sum(size for name, size in sizes.items() if any(part in name for part in _EXPERTS))
        embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
        capture = engine.components.capture
        assert capture is not None
        self.dense = itemsize * (sum(sizes.values()) - experts - embedding)
        self.expert = itemsize * experts / (capture.num_experts * capture.num_moe_layers)
        self.token = engine.components.plan.kv / engine.components.kv_tokens
        self._shape = (-1, capture.num_hidden_layers, capture.top_k)

    def measure(self, outputs: list[dict], prompt: int) -> float:
        """Mean bytes of the decode steps of one call, whose requests run together."""
        rows = np.stack([extract_routed_experts_from_meta_info(out).reshape(self._shape) for out in outputs], axis=1)
        decoded = rows[prompt:]  # [steps, requests, layers, K]
        chosen = [len(np.unique(layer[layer >= 0])) for step in decoded for layer in step.swapaxes(0, 1)]
        tokens = len(outputs) * (prompt + len(decoded) / 2)
        return self.dense + sum(chosen) / len(decoded) * self.expert + tokens * self.token


def open_peers(name: str, folder: Path, args: argparse.Namespace) -> tuple[list[Peer], list[dict[str, str]]]:
    """The peers' processes, and those that cannot run the family."""
    peers, refused = [], []
    for peer in args.peer or [f"transformers={sys.executable}"]:
        label, python = peer.split("=", 1)
        try:
            peers.append(Peer(label, python, folder, args.dtype))
        except PeerEnded as error:
            refused.append({"family": name, "peer": label, "why": str(error)})
    return peers, refused


def measure_family(
    name: str, folder: Path, args: argparse.Namespace, rate: float, versions: dict[str, str]
) -> tuple[list[dict[str, object]], list[dict[str, str]]]:
    """Rows of one family's table, and the peers that cannot run it; the others' versions are added to `versions`."""
    peers, refused = open_peers(name, folder, args)
    noise, rows = np.random.default_rng(0), []

    def build(*, capture: bool) -> Engine:
        return Engine(
            str(folder),
            dtype=args.dtype,
            enable_return_routed_experts=capture,
            skip_tokenizer_init=True,
            max_total_tokens=16_384,
            max_running_requests=max(args.batches),
        )

    with build(capture=True) as engine, build(capture=False) as engine_off:
        step_bytes = StepBytes(engine, folder, 4 if args.dtype == "float32" else 2)
        for batch in args.batches:
            ours: list[Timing] = []
            theirs: dict[str, list[Timing]] = {OFF: [], **{peer.name: [] for peer in peers}}
            floors: list[float] = []
            for turn in range(-1, args.rounds):  # the first round warms up
                progress(f"{name}, batch {batch}, round {turn + 1} of {args.rounds}")
                new = args.new if turn >= 0 else 8
                prompts = noise.integers(0, VOCABULARY, (batch, args.prompt)).tolist()
                first, second = (engine, engine_off) if turn % 2 == 0 else (engine_off, engine)
                measured = {}
                for each in (first, second):
                    time.sleep(REST_S)
                    measured[each] = measure_engine(each, prompts, new, ask=each is engine)
                (own, outputs), answers = measured[engine], {OFF: measured[engine_off][0]}
                for peer in list(peers):
                    time.sleep(REST_S)
                    try:
                        answers[peer.name] = peer.run(prompts, new)
                    except PeerEnded as error:  # it loaded the family and cannot run it
                        peers.remove(peer)
                        theirs.pop(peer.name)
                        refused.append({"family": name, "peer": peer.name, "why": str(error)})
                if turn >= 0:
                    ours.append(own)
                    floors.append(step_bytes.measure(outputs, args.prompt) / rate)
                    for label, answer in answers.items():
                        theirs[label].append(answer)
            floor = statistics.median(floors)
            step = batch / statistics.median(timing.decode for timing in ours)
            for row in table(batch, ours, theirs):
                decode = {"floor ms": floor * 1e3, "step / floor": step / floor} if row["phase"] == "decode" else {}
                rows.append({"family": name, **row, "floor ms": "", "step / floor": "", **decode})
    for peer in peers:
        versions[peer.name] = peer.version
        peer.close()
    return rows, refused


def without_rates(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows of a small run, whose phases are too short to be timed: no rate, ratio or floor."""
    return [{name: row[name] for name in ("family", "batch", "phase", "peer", "same")} for row in rows]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peer", action="append", metavar="NAME=PYTHON")
    small = "tiny models, one round: whether a family runs, and `same`; no rates, no result"
    parser.add_argument("--small", action="store_true", help=small)
    args = parser.parse_args()
    if args.small:
        args.batches, args.rounds, args.prompt, args.new = [2], 1, 8, 4
    rate, rows, refused, versions = read_rate(), [], [], dict[str, str]()
    sizes = json.loads(json.dumps(SIZES))
    how = {"rounds": args.rounds, "prompt": args.prompt, "new": args.new, "dtype": args.dtype, "sizes": sizes}
    for name in args.families:
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_family(name, Path(temporary), small=args.small)
            own, without = measure_family(name, folder, args, rate, versions)
        print_table(without_rates(own) if args.small else own)
        rows, refused = rows + own, refused + without
        more = {"read_gb_per_s": rate / 1e9, "peers": versions, "refused": refused, **how}
        written = write_result(f"families_{args.dtype}_cpu", rows, **more)  # after each: a run that is cut has its rows
    for entry in refused:
        print(f"{entry['peer']} does not run {entry['family']}: {entry['why']}")
    if args.small:
        print(f"{', '.join(args.families)}: run; a small model is not timed, see `same`")
    print(f"this machine's cores read {rate / 1e9:.0f} GB/s")
    print(written)


if __name__ == "__main__":
    main()
