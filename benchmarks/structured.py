"""What structured output costs: decode throughput with a schema on all requests over that without, and time of a mask.

    python benchmarks/structured.py [--batch 8] [--rounds 11] [--new 160] [--loads strings records]
    python benchmarks/structured.py --masks-alone [--vocabulary 151936]

Decode: the benchmark model in float32, capture on; its core answers the same prompts in turn, with and without a
schema. A figure is the median over rounds of the ratio of neighbouring runs, with quartiles, from the last prompt token
to the last answer: of tokens a second, and of tokens a second of processor time, which says more where other processes
use the same cores. "strings": an array of any strings, where nearly every token is a choice. "records": an array of
objects in compact JSON, whose keys are forced: several tokens a step. Both have more items than the answer has tokens,
so that all answers are as long. Masks: along random walks through several grammars, by a byte-level BPE of `vocabulary`
entries: the host's work for one token of one request (forced tokens, mask, moving on), as CPU time of the thread."""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from common import VOCABULARY, Prompts, benchmark_model, build, print_table, progress, write_result

from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.core.grammar_state import CompiledGrammar
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.grammar.compiler import GrammarCompiler
from routed_experts.scheduling.schedule_batch import Req

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
FIELDS = {"identifier": {"type": "integer"}, "description": {"type": "string"}, "is_valid": {"type": "boolean"}}
RECORD = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
LOADS = {
    "strings": COMPACT | {"type": "array", "items": {"type": "string"}, "minItems": 1000},
    "records": COMPACT | {"type": "array", "items": RECORD, "minItems": 1000},
}
GRAMMARS = {
    "any object": GrammarSpec.json_object(),
    "records, any spaces": GrammarSpec.json_schema({"type": "array", "items": RECORD}),
    "records, compact": GrammarSpec.json_schema(LOADS["records"]),
    "enum of 1,000": GrammarSpec.json_schema({"type": "array", "items": {"enum": [f"value {n}" for n in range(1000)]}}),
    "regex": GrammarSpec.regex("([A-Z][a-z]{1,12} ){3,20}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "arithmetic": GrammarSpec.grammar('start: term (("+" | "-") term)*\nterm: /[0-9]+/ | "(" start ")"'),
}
ALPHABET = 'etaoinshrdlucmfwypvbgkjqxz    {}[]":,.0123456789ETAOIN_-\n'


def synthetic_tokenizer(folder: Path, size: int) -> Tokenizer:
    """A byte-level BPE of `size` entries: bytes, then merges of pairs that are drawn at random, short ones mostly."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    rng = np.random.default_rng(0)
    specials = ["<|end|>", "<|pad|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    parts = [to_bytes(character)[0][0] for character in dict.fromkeys(ALPHABET)]
    num_characters = len(parts)
    known, merges = set(tokens), list[tuple[str, str]]()
    while len(tokens) < size:
        left = parts[int(len(parts) * rng.random() ** 3)]
        right = parts[int(num_characters * rng.random())]
        if left + right not in known and len(left) < 14:
            known.add(left + right)
            tokens.append(left + right)
            parts.append(left + right)
            merges.append((left, right))
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return Tokenizer.from_directory(folder)


def compiler_for(folder: Path, size: int) -> GrammarCompiler:
    """A compiler over the synthetic tokenizer."""
    return GrammarCompiler(synthetic_tokenizer(folder, size), vocab_size=size, eos_token_ids=(0,))


def time_masks(
    compiler: GrammarCompiler, vocabulary: int, *, walks: int = 12, length: int = 200
) -> list[dict[str, Any]]:
    """Seconds of the host for one token, for each grammar."""
    rows: list[dict[str, Any]] = []
    for name, spec in GRAMMARS.items():
        began = time.perf_counter()
        compiled = compiler.compile(spec)
        compile_s, seconds = time.perf_counter() - began, list[float]()
        for seed in range(walks):
            seconds += walk(compiled, vocabulary, np.random.default_rng(seed), length)
        micro = np.array(seconds) * 1e6
        rows.append(
            {
                "grammar": name,
                "tokens": len(seconds),
                "median us": float(np.median(micro)),
                "mean us": float(micro.mean()),
                "99 % us": float(np.quantile(micro, 0.99)),
                "worst us": float(micro.max()),
                "compile ms": compile_s * 1e3,
            }
        )
    return rows


def walk(compiled: CompiledGrammar, vocabulary: int, rng: np.random.Generator, length: int) -> list[float]:
    """Seconds of each token of a random walk; choosing the token is not counted."""
    state, seconds = compiled.start(), list[float]()
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    while len(seconds) < length and not state.is_complete:
        began = time.thread_time()
        forced = state.forced_tokens()
        if not forced:
            state.fill(words, keep_end=True)
        filled = time.thread_time()
        bits = () if forced else np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        chosen = forced or (int(rng.choice(bits)),)
        accepting = time.thread_time()
        for token in chosen:
            state.accept(token)
        spent = (filled - began + time.thread_time() - accepting) / len(chosen)
        seconds += [spent] * len(chosen)
    return seconds


def decode_rates(core: EngineCore, reqs: list[Req]) -> tuple[float, float]:
    """Tokens a second from the last prompt token to the last answer, and a second of processor time."""
    core.add(reqs)
    while not all(req.is_prefilled for req in reqs):
        core.step()
    known, began, began_cpu = sum(req.num_known for req in reqs), time.perf_counter(), time.process_time()
    while not core.is_idle:
        core.step()
    count = sum(req.num_known for req in reqs) - known
    return count / (time.perf_counter() - began), count / (time.process_time() - began_cpu)


def compare(
    core: EngineCore, compiler: GrammarCompiler, load: str, args: argparse.Namespace, *, temperature: float
) -> dict[str, Any]:
    """Ratios of neighbouring runs."""
    prompts, grammar = Prompts(), compiler.compile(GrammarSpec.json_schema(LOADS[load]))
    ratios, cpu_ratios, rates = list[float](), list[float](), {"none": list[float](), load: list[float]()}

    def reqs(*, masked: bool) -> list[Req]:
        made = prompts.requests(args.batch, prompt=args.prompt, new=args.new, ask=True, temperature=temperature)
        return [Req(dataclasses.replace(req.source, grammar=grammar)) if masked else req for req in made]

    for number in range(args.rounds + 1):
        order = list(rates)[:: 1 if number % 2 else -1]
        pair = {name: decode_rates(core, reqs(masked=name != "none")) for name in order}
        if number:  # the first warms up
            ratios.append(pair[load][0] / pair["none"][0])
            cpu_ratios.append(pair[load][1] / pair["none"][1])
            for name, (rate, _) in pair.items():
                rates[name].append(rate)
        progress(f"{load}, temperature {temperature:g}: round {number} of {args.rounds}")
    figures = {"ratio": statistics.quantiles(ratios, n=4), "cpu ratio": statistics.quantiles(cpu_ratios, n=4)}
    return {
        "load": load,
        "temperature": temperature,
        "none tok/s": statistics.median(rates["none"]),
        "schema tok/s": statistics.median(rates[load]),
        **{name: middle for name, (_, middle, _) in figures.items()},
        "quartiles": ", ".join(f"{low:.3f} to {high:.3f}" for low, _, high in figures.values()),
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--masks-alone", action="store_true")
    parser.add_argument("--small", action="store_true", help="masks alone, of 2,000 entries")
    parser.add_argument("--name", default="structured_cpu")
    args = parser.parse_args()
    if args.small:
        args.vocabulary, args.masks_alone = 2_000, True
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        compiler = compiler_for(Path(folder) / "large", args.vocabulary)
        compiler.compile(GrammarSpec.regex("a"))
        print(f"vocabulary of {args.vocabulary:,} read in {time.perf_counter() - began:.1f} s")
        masks = time_masks(compiler, args.vocabulary)
        print_table(masks)
        if args.masks_alone:
            print("masks alone: no result is written")
            return
        core = build(benchmark_model(jnp.dtype("float32")), capture=True, precompile_bs_paddings=(args.batch,)).core
        began = time.perf_counter()
        num_samplers = core.runner.compile_masked()
        print(f"{num_samplers} samplers with masks compiled in {time.perf_counter() - began:.1f} s")
        small = compiler_for(Path(folder) / "small", VOCABULARY)
        rows = [
            compare(core, small, load, args, temperature=temperature)
            for load in args.loads
            for temperature in (0.0, 1.0)
        ]
        print_table(rows)
        print(write_result(args.name, rows, masks=masks))


if __name__ == "__main__":
    main()
