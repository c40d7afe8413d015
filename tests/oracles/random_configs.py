"""Configs of any family by chance, against transformers: sizes that no kernel likes, one expert or 257, scaled
positions of every kind, in either spelling of config.json.

    PYTHONPATH=src:tests python tests/oracles/random_configs.py [seconds [first seed [part of a name ...]]]

draws one after the other until the seconds are over and prints a line each; "Mixtral 17" in a line is `drawn("Mixtral",
17)`."""

import dataclasses
import json
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jax
import numpy as np

from oracles.families import CASES
from oracles.variations import compare

NAMES = tuple(name for name in CASES if name != "BailingMoeV2")  # its config class is defined here, not by transformers
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")
HEADS_THAT_FILL = (
    "Olmoe",
    "GraniteMoe",
    "Llama",
    "DeepseekV2",
    "DeepseekV3",
    "Glm4MoeLite",
    "Lfm2Moe",
)  # no head_dim of their own
CHOICES = {
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), (1, 5, 8, 13, 24)
    ),
    "rms_norm_eps": (1e-6, 1e-5, 1e-3),
    "tie_word_embeddings": (False, False, True),
    "intermediate_size": (1, 7, 13, 48),
    "sliding_window": (1, 3, 17, 40),
    "attention_chunk_size": (1, 7, 64),
    "floor_scale": (1, 16, 40),
    "use_qk_norm": (False, True),
    "clip_qkv": (None, 0.5),
    "kv_lora_rank": (1, 7, 24),
    "q_lora_rank": (None, 5, 20),
    "v_head_dim": (1, 10, 16),
    "linear_key_head_dim": (1, 5, 8),
    "linear_value_head_dim": (1, 12),
    "linear_conv_kernel_dim": (2, 3, 4),
    "conv_L_cache": (2, 3, 5),
    "kda_safe_gate": (False, True),
    "short_conv_kernel_size": (2, 3, 4),
    "conv_bias": (False, True),
    "use_expert_bias": (False, True),
    "attention_bias": (False, True),
    "lm_head_bias": (False, True),
    "router_jitter_noise": (0.01, 0.2),
    "routed_scaling_factor": (1.0, 2.5),
    "residual_multiplier": (0.3, 1.0),
    "norm_topk_prob": (False, True),
}
ALWAYS = ("rms_norm_eps", "tie_word_embeddings", "intermediate_size")
ONLY_SOME = {
    "norm_topk_prob": (
        *("Qwen3Moe", "Qwen2Moe", "Olmoe", "Qwen3Next", "DeepseekV3", "Glm4Moe", "Glm4MoeLite", "Dots1"),
        "ExaoneMoe",
    )
}


def pick(rng, options):
    """One of several."""
    return options[rng.integers(len(options))]


def draw_heads(name, rng):
    """Heads, kv heads, their size, and a hidden size that is a multiple of nothing where a family lets it."""
    heads = int(rng.integers(1, 7))
    fits = [kv for kv in range(1, heads + 1) if heads % kv == 0]
    size = pick(rng, (4, 6, 8, 10, 14, 24))
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in CASES[name].config else pick(rng, fits),
    }
    if name in HEADS_THAT_FILL:
        return sizes | {"hidden_size": heads * size}
    return sizes | {"head_dim": size, "hidden_size": heads * pick(rng, (5, 11, 16))}


def draw_experts(name, config, rng):
    """Any number of experts, but for those in groups, and for laws of one or two experts a token."""
    if config.get("n_group", 1) > 1 or not CASES[name].layer_ids:
        return {}
    count, few = (next(key for key in keys if key in config) for keys in (EXPERTS, PER_TOKEN))
    experts = pick(rng, (3, 5, 8, 13, 257))
    top_k = {"Phimoe": 2, "Llama4": 1}.get(name) or min(int(rng.integers(1, experts + 1)), 12)
    return {count: experts, few: top_k}


def draw_rope(name, config, rng):
    """rope_parameters of any kind, for the dims of a head that turn."""
    kinds = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
    kind = "default" if name == "Phimoe" else pick(rng, kinds[: -1 if name == "Gemma4" else None])
    scaling = {"rope_type": kind, "rope_theta": pick(rng, (100.0, 1e4, 5e5))}
    if kind not in ("default", "longrope"):
        scaling["factor"] = pick(rng, (1.0, 1.5, 4.0, 32.0))
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = pick(rng, (16, 64, 100))
    if kind == "yarn":
        scaling |= pick(
            rng,
            (
                {},
                {"attention_factor": 1.3},
                {"mscale": 1.0, "mscale_all_dim": 0.707},
                {"beta_fast": 8.0, "beta_slow": 0.5},
            ),
        )
    if kind == "llama3":
        scaling |= dict(
            zip(("low_freq_factor", "high_freq_factor"), pick(rng, ((1.0, 4.0), (1.0, 1.0), (0.5, 16.0))), strict=True)
        )
    if name in ("Glm4Moe", "Qwen3Next", "Qwen3_5Moe"):
        scaling["partial_rotary_factor"] = 0.5 if config["head_dim"] % 4 == 0 else 1.0
    if kind == "longrope":
        head = (
            config.get("qk_rope_head_dim")
            or config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"]
        )
        turned = int(head * scaling.get("partial_rotary_factor", 1.0)) // 2
        factors = {"short_factor": (1 + rng.random(turned)).tolist(), "long_factor": (4 + rng.random(turned)).tolist()}
        scaling |= factors | {"original_max_position_embeddings": 160}
    return {"rope_parameters": scaling}


def draw_gemma4(config, rng):
    """Heads and positions of full layers, beside those of sliding ones."""
    heads = config["num_attention_heads"]
    shared = {
        "attention_k_eq_v": pick(rng, (False, True)),
        "final_logit_softcapping": pick(rng, (None, 2.0)),
        "global_head_dim": pick(rng, (4, 8, 20, 34)),
        "num_global_key_value_heads": pick(rng, [kv for kv in range(1, heads + 1) if heads % kv == 0]),
    }
    full = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": pick(rng, (0.5, 0.75, 1.0))}
    sliding = draw_rope("Gemma4", config, rng)["rope_parameters"]
    return shared | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def in_the_old_spelling(folder):
    """rope_theta beside rope_scaling, as files were written before transformers 5."""
    values = json.loads((folder / "config.json").read_text())
    section = values.pop("rope_parameters")
    values |= {key: section.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in section}
    kind = section.pop("rope_type")
    values["rope_scaling"] = (
        {"type": kind, **section} if kind != "default" or "GptOss" in values["architectures"][0] else None
    )
    (folder / "config.json").write_text(json.dumps(values))


def drawn(name, seed):
    """A case of the family, always the same for a seed; its layers are those of the case that stands for the family."""
    rng, case = np.random.default_rng([seed, zlib.crc32(name.encode())]), CASES[name]
    varied = [key for key in CHOICES if key in (*case.config, *ALWAYS) or name in ONLY_SOME.get(key, ())]
    config = case.config | {key: pick(rng, CHOICES[key]) for key in varied}
    config |= draw_heads(name, rng)
    config |= draw_experts(name, config, rng)
    if name == "BailingHybrid":  # two places of theta, and a head that transformers never ties
        config |= draw_rope(name, config, rng)
        config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "tie_word_embeddings": False}
    elif name == "Gemma4":
        config |= draw_gemma4(config, rng)
    elif name == "MiniMaxM2":
        config["rotary_dim"] = 2 * int(rng.integers(1, config["head_dim"] // 2 + 1))
    else:
        config |= draw_rope(name, config, rng)
    plain = "rope_parameters" in config and case.vision is None and name != "Gemma4"
    rewrite = pick(rng, (None, in_the_old_spelling)) if plain else None
    return dataclasses.replace(case, config=config, seed=seed, rewrite=rewrite)


def main(seconds=60.0, seed=0, *parts):
    """Draw and compare until the time is over; the number of cases that differ is the exit status."""
    begun, bad, count = time.perf_counter(), 0, 0
    names = [name for name in NAMES if not parts or any(part in name for part in parts)]
    if not names:
        sys.exit(f"no case's name holds {' or '.join(parts)}; expected a part of one of {', '.join(NAMES)}")
    while time.perf_counter() - begun < seconds:
        name, number = names[count % len(names)], seed + count // len(names)
        count += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict = compare(drawn(name, number), Path(folder))
            except Exception as error:  # one config that cannot run must not hide the others
                verdict, bad = f"{type(error).__name__}: {str(error)[:300]}", bad + 1
            else:
                bad += not verdict.agrees
        jax.clear_caches()
        print(f"{name} {number}: {verdict}", flush=True)
    print(f"{count} configs, {bad} differ, {time.perf_counter() - begun:.0f} s")
    return bad


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3]), *sys.argv[3:]))
