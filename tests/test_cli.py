"""The command line: flags follow the dataclass, and what is wrong ends with a sentence and a code, never a
traceback."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import routed_experts
from replay.records import random_record
from routed_experts import ConfigError, Engine, ExpertOffloadConfig, SpeculativeConfig
from routed_experts.cli import (
    LoadBar,
    add_engine_flags,
    add_expert_flags,
    add_speculative_flags,
    engine_args,
    expert_args,
    main,
    speculative_args,
)
from routed_experts.core.server_args import ServerArgs
from routed_experts.demo import demo_model_path
from routed_experts.formats import record_from_meta_info
from routed_experts.formats.archive import encode_record
from support.file_permissions import run_under_permissions
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint
from support.xla_options import FAST_FLAGS

SRC = Path(routed_experts.__file__).parents[1]
OTHER = {  # a value that is not the default, as typed
    "revision": "v1",
    "tokenizer_path": "folder",
    "dtype": "float32",
    "attention_backend": "reference",
    "moe_backend": "grouped",
    "logprobs_mode": "raw",
    "quantization": "fp8_block",
    "kv_cache_dtype": "fp8_e4m3",
    "routed_experts_weights_dtype": "bfloat16",
    "mem_fraction_static": "0.5",
    "precompile_bs_paddings": "2 4",
    "precompile_token_paddings": "32 128",
}


def run(*argv, cwd=None, blocked=False):
    """The command in a process of its own that compiles fast, warnings as errors; `blocked`: without JAX."""
    cache = jax.config.jax_compilation_cache_dir or str(cwd)
    env = {**os.environ, "PYTHONPATH": str(SRC), "JAX_COMPILATION_CACHE_DIR": cache, "XLA_FLAGS": FAST_FLAGS}
    start = (
        ["-c", "import sys; sys.modules['jax'] = None; from routed_experts.cli import main; sys.exit(main())"]
        if blocked
        else []
    )
    command = [sys.executable, "-W", "error", *(start or ["-m", "routed_experts"]), *argv]
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", timeout=600, check=False, env=env, cwd=cwd
    )


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_args(parser.parse_args(argv))


def test_expert_parallel_is_as_many_devices_as_the_model_has():
    for typed, (tp, ep) in {"--tp-size 4 --enable-expert-parallel": (4, 4), "--tensor-parallel-size 2": (2, 1)}.items():
        args = ServerArgs(**parse(*typed.split()))
        assert (args.tp_size, args.ep_size) == (tp, ep)


def test_attention_by_data_rank_is_what_data_ranks_are():
    for typed in ("--tp-size 4 --dp-size 2", "--tp-size 4 --dp-size 2 --enable-dp-attention"):
        args = ServerArgs(**parse(*typed.split()))
        assert (args.tp_size, args.dp_size) == (4, 2)
    with pytest.raises(ConfigError, match="--enable-dp-attention without --dp-size"):
        parse("--tp-size", "4", "--enable-dp-attention")


def assert_refused(code, err, *, lines=3):
    assert code == 2
    assert 1 <= err.count("\n") <= lines
    assert "Traceback" not in err
    assert err.startswith("routed-experts")


def test_no_flags_leave_every_field_at_its_default():
    assert parse() == {}


@pytest.mark.parametrize("field", dataclasses.fields(ServerArgs), ids=lambda field: field.name)
def test_every_field_has_a_flag_that_sets_it(field):
    flag = f"--{field.name.replace('_', '-')}"
    values = [] if isinstance(field.default, bool) else OTHER.get(field.name, "64").split()
    parsed = parse(flag, *values)
    assert parsed.keys() == {field.name}
    value = parsed[field.name]
    assert value != field.default
    assert [str(x) for x in (value if isinstance(value, tuple) else [value])] == (values or ["True"])


def test_every_number_and_name_of_experts_on_the_host_has_a_flag():
    words = {"kt_method": "f32", "residency": "adaptive"}
    values = {field.name: words.get(field.name, "1") for field in dataclasses.fields(ExpertOffloadConfig)}
    parser = argparse.ArgumentParser()
    add_expert_flags(parser)
    assert expert_args(parser.parse_args([])) == ExpertOffloadConfig()
    argv = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
    parsed = dataclasses.asdict(expert_args(parser.parse_args(argv)))
    assert {name: str(parsed[name]) for name in values} == values


def drafts(*argv):
    parser = argparse.ArgumentParser()
    add_speculative_flags(parser)
    return speculative_args(parser.parse_args(argv))


def test_drafts_are_asked_for_in_the_words_of_sglang_or_of_vllm():
    assert drafts() is None
    flags = "--speculative-algorithm ngram --speculative-num-draft-tokens 4 --no-speculative-adaptive"
    windows = "--speculative-ngram-min-match-window-size 2 --speculative-ngram-max-match-window-size 6"
    expected = SpeculativeConfig(
        algorithm="ngram",
        num_draft_tokens=4,
        adaptive=False,
        ngram_min_match_window_size=2,
        ngram_max_match_window_size=6,
    )
    assert drafts(*flags.split(), *windows.split()) == expected
    assert drafts("--speculative-algorithm", "NGRAM", "--speculative-adaptive") == SpeculativeConfig()
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert drafts("--speculative-config", config) == SpeculativeConfig(num_draft_tokens=4)
    with pytest.raises(ConfigError, match="in two ways"):
        drafts("--speculative-config", config, "--speculative-algorithm", "NGRAM")
    with pytest.raises(ConfigError, match="draft_model_path='x', but NGRAM has no draft model"):
        drafts("--speculative-algorithm", "NGRAM", "--speculative-draft-model", "x")


def test_devices_of_drafts_are_those_of_the_model():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_speculative_flags(parser)
    words = ["--speculative-config", '{"method": "ngram", "draft_tensor_parallel_size": 2}']
    assert speculative_args(parser.parse_args([*words, "--tp-size", "2"])) == SpeculativeConfig()
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=2 is not tp_size=1"):
        speculative_args(parser.parse_args(words))


def test_every_field_of_drafts_has_a_flag():
    parser = argparse.ArgumentParser()
    add_speculative_flags(parser)
    names = {f"speculative_{field.name}" for field in dataclasses.fields(SpeculativeConfig)}
    assert {action.dest for action in parser._actions} - {"help", "speculative_config"} == names


def test_spellings_of_vllm_and_sglang_are_known():
    flags = "--tokenizer t --max-model-len 8 --max-num-seqs 4 --block-size 8 --gpu-memory-utilization 0.5"
    flags += " --no-enable-prefix-caching"
    expected = {
        "tokenizer_path": "t",
        "context_length": 8,
        "max_running_requests": 4,
        "page_size": 8,
        "mem_fraction_static": 0.5,
    }
    assert parse(*flags.split(), "--seed", "3") == {**expected, "disable_radix_cache": True, "random_seed": 3}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "COMMAND"),
        (("dance",), "dance"),
        (("generate",), "MODEL"),
        (("generate", "model"), "--prompt"),
        (("srve", "demo"), "did you mean serve?\nsee routed-experts --help"),
        (("serve", "--max-num-seq", "32"), "did you mean --max-num-seqs?\nsee routed-experts serve --help"),
        (("analyze", "stat", "a.jsonl"), "did you mean stats?\nsee routed-experts analyze --help"),
        (("serve", "--dtype=flaot32"), "did you mean float32?\nsee routed-experts serve --help"),
        (("serve", "demo", "--seeed=3"), "--seeed=3; did you mean --seed?\n"),
        (("generate", "model", "--promt", "x"), "unrecognized arguments: --promt; did you mean --prompt?\n"),
        (("analyze", "--layer=3"), "the following arguments are required: KIND\n"),
        (("generate", "--promt=x", "--", "--no-flag"), "unrecognized arguments: --promt=x; did you mean --prompt?\n"),
        (("bench", "serve", "--base-ur", "x"), "unrecognized arguments: --base-ur; did you mean --base-url?\n"),
        (("generate", "--enable-return-routed-experts"), "error: the following arguments are required: MODEL\n"),
        (("generate", "model", "--prompt", "a", "--page-sise", "8"), "--page-sise"),
        (("generate", "model", "--prompt", "a", "--page-size", "many"), "'many' is no integer; give one, such as 8"),
        (("generate", "model", "--prompt", "a", "--max-new-tokens", "abc"), "--max-new-tokens: 'abc' is no integer"),
        (("chat", "model", "--temperature", "warm"), "--temperature: 'warm' is no number; give one, such as 0.5"),
        (("generate", "model", "--prompt", "a", "--dtype", "float4"), "float4"),
        (
            ("generate", "model", "--prompt", "a", "--quantization", "awq"),
            "argument --quantization: invalid choice: 'awq'",
        ),
        (("generate", "model", "--prompt", "a", "--page-size", "0"), "--page-size 0 must be an integer of at least 1"),
        (
            ("generate", "model", "--prompt", "a", "--kt-num-gpu-experts", "4", "--kt-method", "AMXINT4"),
            "auto, bf16, f32",
        ),
        (
            ("generate", "model", "--prompt", "a", "--max-running-requests", "0", "--precompile-bs-paddings", "8"),
            "--max-running-requests 0 must be",
        ),
    ],
)
def test_a_wrong_use_is_refused_before_anything_starts(argv, message, capsys):
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert_refused(code, err)
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    "argv",
    [
        ("serve", "demo", "--port", "9" * 5000),
        ("serve", "demo", "--port", "9" * 4000),
        ("serve", "demo", "--port", "'\"" * 2500),
        ("serve", "demo", "--dtype", "'" + "x" * 4999),
        ("serve", "demo", "--routing-store-bytes", "x" * 5000),
        ("serve", "demo", "--port", "1", "x" * 5000),
        ("analyze", "x" * 5000),
        ("bench", "serve", "--base-url", "http://h", "--rounds", "9" * 4000),
        ("bench", "serve", "--base-url", "x" * 5000),
        ("bench", "buckets", "demo", "--most", "-" + "9" * 4000),
    ],
)
def test_long_values_are_shortened_in_errors(argv, capsys):
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    err = capsys.readouterr().err
    assert code == 2 and len(err) < 400 and ("000 characters)" in err or "an integer of 13288 bits" in err), err


def test_version_and_help_need_no_jax():
    assert run("--version", blocked=True).stdout.startswith("routed-experts ")
    result = run("generate", "--help", blocked=True)
    assert result.returncode == 0
    assert "--enable-return-routed-experts" in result.stdout


def test_a_model_that_is_not_there_is_refused(tmp_path, capsys):
    code = main(["generate", str(tmp_path / "nowhere"), "--prompt", "a"])
    err = capsys.readouterr().err
    assert_refused(code, err)
    assert "nowhere" in err


@pytest.mark.parametrize("command", ["generate", "inspect", "serve"])
def test_a_model_that_this_user_may_not_reach_is_named_with_the_reason(command, tmp_path):
    """It is not taken for an absent one: exit code 1 and the system's reason, as for any file."""
    (model := tmp_path / "locked" / "model").mkdir(parents=True)
    words = [command, str(model), *(["--prompt", "x"] if command == "generate" else [])]
    model.parent.chmod(0)
    try:
        code = "import sys; from routed_experts.cli import main; sys.exit(main())"
        result = run_under_permissions(code, *words, env={"JAX_COMPILATION_CACHE_DIR": str(tmp_path)})
    finally:
        model.parent.chmod(0o700)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"routed-experts {command}: error: Permission denied: '{model}'\n"


def test_an_output_that_cannot_be_written_is_reported_before_the_engine_starts(tmp_path, capsys):
    output = tmp_path / "no" / "folder.jsonl"
    code = main(["generate", str(tmp_path / "model"), "--prompt", "a", "--output", str(output)])
    err = capsys.readouterr().err
    assert code == 1
    assert err.count("\n") == 1
    assert "folder.jsonl" in err


def test_an_unknown_platform_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    done = run("generate", str(tmp_path / "model"), "--prompt", "a")
    assert done.returncode == 1 and "abacus" in done.stderr and done.stderr.count("\n") <= 3


def test_generate_writes_answers_with_their_records(tmp_path, capsys):
    """In a process of its own; then without a file, in this one."""
    model = write_tiny_checkpoint(tmp_path / "model")
    flags = [
        "--max-new-tokens",
        "5",
        "--temperature",
        "0",
        "--precompile-bs-paddings",
        "2",
        "--precompile-token-paddings",
        "64",
    ]
    flags += ["--return-routed-experts", "--enable-return-routed-experts-weights", "--output", "answers.jsonl"]
    done = run(
        "generate", str(model), "--prompt", "The cat", "--prompt", "Ein Satz mit Umlauten: äöü", *flags, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == ["The cat", "Ein Satz mit Umlauten: äöü"]
    num_rows = [record_from_meta_info(answer).num_rows for answer in answers]
    for answer in answers:
        record = record_from_meta_info(answer)
        assert record.num_rows == answer["meta_info"]["prompt_tokens"] + len(answer["output_ids"]) - 1
        assert record.weights.shape == record.ids.shape
    last = done.stderr.splitlines()[-1]
    assert last == f"wrote answers.jsonl: 2 answers, {sum(num_rows)} rows, 3 MoE layers, top-4"
    with lazy_compilation():
        assert main(["generate", str(model), "--prompt", "The cat", *flags[:-2]]) == 0
    out, err = capsys.readouterr()
    assert out == answers[0]["text"] + "\n"
    summary = f"1 answer, {num_rows[0]} rows, 3 MoE layers, top-4; --output FILE keeps the rows"
    assert err.splitlines()[-1] == summary


def test_the_bar_of_loading_is_drawn_over_itself_and_ends_its_line(capsys):
    bar = LoadBar()
    for done in (0, 10, 1_500_000_000, 3_000_000_000, 3_000_000_000):
        bar(done, 3_000_000_000)
    first, half, whole = capsys.readouterr().err.split("\r")[1:]
    assert first == f"loading [{'.' * 30}] 0.00 of 3.00 GB"
    assert half == f"loading [{'#' * 15}{'.' * 15}] 1.50 of 3.00 GB"
    assert whole == f"loading [{'#' * 30}] 3.00 of 3.00 GB\n"


def test_a_small_model_is_counted_in_megabytes(capsys):
    bar = LoadBar()
    bar(1_000_000, 13_000_000)
    assert capsys.readouterr().err.endswith("] 1.00 of 13.00 MB")


def test_the_engine_reports_loading_progress():
    calls = []
    sizes = dict(
        precompile_bs_paddings=(1,), precompile_token_paddings=(8,), max_total_tokens=64, skip_tokenizer_init=True
    )
    with lazy_compilation(), Engine(str(demo_model_path()), on_load=lambda *pair: calls.append(pair), **sizes):
        pass
    assert calls[-1][0] == calls[-1][1] > 5_000_000  # bytes of the demo model's tensors
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and len({total for _, total in calls}) == 1


@pytest.mark.parametrize(
    ("closed", "argv", "code", "words"),
    [
        (">&-", ["convert", "a.safetensors", "b.safetensors"], 0, ""),
        ("<&-", ["generate", "nosuch", "--input", "-"], 2, "no checkpoint folder"),
        ("2>&-", ["analyze", "stats", "nosuch.jsonl"], 2, ""),
        ("<&- >&- 2>&-", ["convert", "a.safetensors", "b.safetensors"], 0, ""),
    ],
)
def test_closed_standard_streams_are_no_error(closed, argv, code, words, tmp_path):
    """The shell gives the command no such descriptor, and Python has None for the stream."""
    (tmp_path / "a.safetensors").write_bytes(encode_record(random_record(np.random.default_rng(0), 8)))
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-W", "error", "-m", "routed_experts", *argv]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr and bool(words) == bool(done.stderr) and "Traceback" not in done.stderr
    assert (tmp_path / "b.safetensors").exists() == (code == 0)


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback():
    script = """
import runpy, sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "routed_experts.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
runpy.run_module("routed_experts", run_name="__main__")
"""
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, env=env)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_in_a_callback_of_the_collector_ends_the_command(tmp_path):
    """As while JAX starts, which has such a callback. The command waits for a pipe that nothing is written to."""
    script = """
import gc, signal, sys
from routed_experts.__main__ import run

def interrupt(phase, details):
    gc.callbacks.remove(interrupt)
    signal.raise_signal(signal.SIGINT)

def collect(event, arguments):
    if event == "open" and str(arguments[0]) == sys.argv[2]:
        gc.freeze()  # a collection of nothing
        gc.callbacks.append(interrupt)
        gc.collect()

signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()
sys.addaudithook(collect)
sys.exit(run())
"""
    os.mkfifo(tmp_path / "a.json")
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", script, "convert", "a.json", "b.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("SIGINT", "routed_experts.cli"),  # where SIGTERM ends the process
        *((name, module) for name in ("SIGINT", "SIGTERM") for module in ("jax", "routed_experts.engine.engine")),
    ],
)
def test_a_signal_that_an_import_swallows_ends_the_command(tmp_path, name, module):
    """As C++ does."""
    script = f"""
import contextlib, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.{name})
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
runpy.run_module("routed_experts", run_name="__main__")
"""
    env = {**os.environ, "PYTHONPATH": str(SRC), "XLA_FLAGS": FAST_FLAGS}
    command = [sys.executable, "-c", script, "generate", "demo", "--prompt", "x", "--max-new-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "") and "ready" not in done.stderr
