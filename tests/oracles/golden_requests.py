"""Two hundred mixed requests to the demo model in deterministic mode, and what an engine answers.

    python tests/oracles/golden_requests.py OUT.json

The committed file was written by the engine of the commit before speculative decoding. Tokens, logprobs and a hash of
the rows of each request are kept; another processor may round otherwise, so a few requests may differ there."""

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import routed_experts
from routed_experts import Engine, extract_routed_experts_from_meta_info

DEMO_MODEL = Path(routed_experts.__file__).parent / "demo_model"
GOLDEN = Path(__file__).parent / "golden_requests.json"
COUNT, VOCABULARY = 200, 2000
ENGINE = {
    "deterministic": True,
    "enable_return_routed_experts": True,
    "precompile_bs_paddings": (8,),
    "precompile_token_paddings": (64,),
    "context_length": 256,
    "max_total_tokens": 4096,
}
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.0, "presence_penalty": 0.6},
    {"temperature": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {"40": 2.0, "77": -3.0}},
    {"temperature": 0.0, "stop": [" the", "\n"]},
    {"temperature": 1.0, "min_new_tokens": 9, "stop_token_ids": list(range(30, 70))},
)


def requests():
    """Arguments of `Engine.generate`, one dict a request: random prompts, and prompts that repeat themselves."""
    rng, made = np.random.default_rng(2024), []
    for index in range(COUNT):
        ids = rng.integers(0, VOCABULARY, int(rng.integers(1, 60)))
        if index % 3 == 0:
            ids = np.tile(ids[:12], 5)
        sampling = SAMPLING[index % len(SAMPLING)] | {"seed": index, "max_new_tokens": int(rng.integers(1, 33))}
        sampling["max_new_tokens"] = max(sampling["max_new_tokens"], sampling.get("min_new_tokens", 0))
        options = {"return_logprob": True, "return_routed_experts": True}
        if index % 7 == 0:
            options["top_logprobs_num"] = 3
        if index % 5 == 0:
            options["routed_experts_include_last"] = True
        made.append({"input_ids": ids.tolist(), "sampling_params": sampling, **options})
    return made


def answer(output):
    """What is kept of one answer."""
    meta = output["meta_info"]
    rows = np.ascontiguousarray(extract_routed_experts_from_meta_info(meta))
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    top = meta.get("output_top_logprobs")
    return {
        "tokens": output["output_ids"],
        "finish": meta["finish_reason"],
        "logprobs": logprobs,
        "top": None if top is None else [[entry[1] for entry in row] for row in top],
        "rows": hashlib.sha256(repr(rows.shape).encode() + rows.astype(np.int32).tobytes()).hexdigest(),
    }


def answers(engine):
    """The answers of an engine to all requests, eight at once."""
    with ThreadPoolExecutor(8) as pool:
        return [answer(output) for output in pool.map(lambda options: engine.generate(**options), requests())]


if __name__ == "__main__":
    with Engine(str(DEMO_MODEL), **ENGINE) as made_by:
        Path(sys.argv[1]).write_text(json.dumps(answers(made_by), separators=(",", ":")))
