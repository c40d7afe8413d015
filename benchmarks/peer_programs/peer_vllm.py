"""vLLM's CPU build as a peer: python peer_vllm.py FOLDER DTYPE [DRAFTS]. Prefill is a run of one new token; no prefix
is cached."""

import os
import sys
import time

from protocol import serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import vllm  # reads the two above


def ngram(drafts: int) -> dict[str, object]:
    """Drafts by n-grams, with this project's windows."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 12,
    }


def main() -> None:
    """Load, then serve."""
    engine = vllm.LLM(
        model=sys.argv[1],
        dtype=sys.argv[2],
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=32,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=None if len(sys.argv) < 4 else ngram(int(sys.argv[3])),
    )

    def generate(prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - start, [list(out.outputs[0].token_ids) for out in outs]

    def run(prompts: list[list[int]], new: int) -> tuple[float, float, list[list[int]]]:
        first, _ = generate(prompts, 1)
        whole, tokens = generate(prompts, new)
        return first, whole - first, tokens

    serve("vllm", vllm.__version__, run)


if __name__ == "__main__":
    main()
