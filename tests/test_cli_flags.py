"""Command lines and --config files with the flags of other servers: translated, ignored in one line, or refused."""

import argparse
import json
import logging

import pytest

from routed_experts.cli import main, make_parser
from routed_experts.cli.config_file import with_config
from routed_experts.cli.flags import dist_args, engine_args, load_format, log_ignored_flags
from routed_experts.cli.serve import add_file_flags
from routed_experts.core.errors import ConfigError
from routed_experts.core.keywords import FLAG_NAMES
from routed_experts.core.server_args import ServerArgs


def parse(*words, command="serve"):
    return make_parser().parse_args([command, *words])


def args_of(*words):
    return ServerArgs(**engine_args(parse("MODEL", *words)))


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        parse("MODEL", *words)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_line_of_sglang_starts(caplog):
    options = parse(
        *"--model-path MODEL --trust-remote-code --tp 2 --mem-fraction-static 0.7 --chunked-prefill-size -1".split(),
        *"--schedule-policy lpm --attention-backend fa3 --disable-cuda-graph --cuda-graph-bs 1 2 4".split(),
        *"--log-requests --skip-server-warmup --max-running-requests 256 --stream-interval 8 --device cuda".split(),
        *"--nccl-init-addr 10.0.0.1:5000 --nnodes 1 --node-rank 0 --kv-cache-dtype auto --pp-size 1".split(),
        *"--enable-deterministic-inference --log-level INFO --enable-metrics --watchdog-timeout 600".split(),
    )
    args = ServerArgs(**engine_args(options))
    assert (args.tp_size, args.mem_fraction_static, args.chunked_prefill_size) == (2, 0.7, None)
    assert (args.attention_backend, args.device, args.deterministic) == ("auto", "cuda", True)
    assert args.running_limit == args.batch_paddings[-1] == 256
    assert not dist_args(options).is_group and options.log_level == "info" and "stream_interval" not in options
    log_ignored_flags(options)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage() == (
        "routed-experts serve: accepted without effect: --trust-remote-code, --attention-backend=fa3, "
        "--disable-cuda-graph, --cuda-graph-bs, --log-requests, --skip-server-warmup, --stream-interval=8, "
        "--enable-metrics (docs/flags.md says why)"
    )


def test_a_line_of_vllm_starts():
    options = parse(
        *"MODEL -tp 4 --max_model_len 512 --max-num-seqs 128 --max-num-batched-tokens 8192 --dtype half -O3".split(),
        *"--gpu-memory-utilization 0.9 --enforce-eager --no-enable-prefix-caching --no-enable-chunked-prefill".split(),
        *"--compilation-config.mode 3 -cc.level=2 --limit-mm-per-prompt.image 0 --disable-log-stats".split(),
        *"--generation-config vllm --scheduling-policy fcfs --logprobs-mode raw_logprobs --seed 3".split(),
        *("--compilation-config", '{"mode": 3}', "--hf-overrides", "{}", "--no-enable-lora"),
    )
    args = ServerArgs(**engine_args(options))
    assert (args.tp_size, args.context_length, args.running_limit, args.prefill_limit) == (4, 512, 128, 8192)
    assert (args.dtype, args.mem_fraction_static, args.disable_radix_cache) == ("float16", 0.9, True)
    assert (args.logprobs_mode, args.random_seed) == ("raw", 3)
    assert options.ignored_flags == (
        *("-O3", "--enforce-eager", "--no-enable-chunked-prefill", "--compilation-config.mode", "-cc.level"),
        *("--limit-mm-per-prompt.image", "--disable-log-stats", "--compilation-config"),
    )


def test_a_line_of_sgl_jax_starts():
    args = args_of(
        *"--trust-remote-code --dist-init-addr=0.0.0.0:10011 --nnodes=1 --tp-size=1 --device=tpu".split(),
        *"--node-rank=0 --random-seed=3 --mem-fraction-static=0.8 --max-prefill-tokens=8192".split(),
        *"--download-dir= --dtype=bfloat16".split(),
        *"--skip-server-warmup --max-running-requests 64 --page-size 64 --disable-overlap-schedule".split(),
        *"--precompile-bs-paddings 1 64 --precompile-token-paddings 8192 --moe-backend epmoe".split(),
    )
    assert args.batch_paddings == (1, 64) and args.token_paddings == (8192,) and args.device == "tpu"


@pytest.mark.parametrize("many", [2, 64, 128, 1000])
def test_any_number_of_running_requests_starts(many):
    for flag in ("--max-num-seqs", "--max-running-requests"):
        args = args_of(flag, str(many))
        assert args.running_limit == args.batch_paddings[-1] == many


def test_a_unit_that_differs_is_not_taken_for_ours():
    """Tokens with SGLang and vLLM, seconds here: a whole number is theirs."""
    assert parse("MODEL", "--stream-interval", "1").ignored_flags == ("--stream-interval=1",)
    assert parse("MODEL", "--stream-interval=16").ignored_flags == ("--stream-interval=16",)
    for seconds in ("0", "0.05", "1.0"):
        options = parse("MODEL", "--stream-interval", seconds)
        assert options.stream_interval == float(seconds) and options.ignored_flags == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--torchao-config", "int8wo"),
            "argument --torchao-config: 'int8wo' is refused: quantised checkpoints are recognised by",
        ),
        (("-q", "awq"), "argument --quantization: invalid choice: 'awq'"),
        (("--torchao-config=int8wo",), "argument --torchao-config: 'int8wo' is refused"),
        (("--enable-lora",), "argument --enable-lora is refused: adapters are not served; merge the adapter"),
        (("--enable_lora",), "argument --enable_lora is refused"),
        (("--lora-modules", "a=b", "c=d"), "--lora-modules"),
        (
            ("--load-format", "pt"),
            "'pt' is not supported; choose one of auto, dummy: weights are",
        ),
        (("-pp", "2"), "give the devices to --tp-size"),
        (("--schedule-policy", "random"), "lpm and fcfs mean the same here"),
        (("--chat-template", "x.jinja"), "the chat template is the folder's"),
        (("--speculative-draft-model-revision", "main"), "--speculative-draft-model-path"),
        (("--hf-overrides", '{"a": 1}'), "config.json says what it is"),
        (("--hf-overrides.a", "1"), "config.json says what it is"),
        (("--quantization",), "argument --quantization: expected one argument"),
        (("--quantization", "--enforce-eager"), "argument --quantization: expected one argument"),
        (("--enforce-eagre",), "did you mean --enforce-eager?"),
        (("--trust-remote-cod",), "did you mean --trust-remote-code?"),
        (("--max-runing-requests", "3"), "did you mean --max-running-requests?"),
        (("--of-nobody", "3"), "unrecognized arguments: --of-nobody 3"),
    ],
)
def test_what_is_refused_names_the_flag_and_what_to_use(capsys, words, message):
    assert message in refusal(capsys, *words)


def test_all_refused_flags_are_named_in_one_error(capsys, tmp_path):
    words = "--enable-lora --trust-remote-code --torchao-config int8wo --port 1 -pp 2 --tp 2 --enable-lora"
    lines = refusal(capsys, *words.split()).splitlines()
    heads = ["argument --enable-lora is", "argument --torchao-config: 'int8wo' is", "argument -pp: '2' is"]
    assert [
        line.removeprefix("routed-experts serve: error: ").partition(" refused: ")[0] for line in lines[:-1]
    ] == heads
    assert lines[-1] == "see routed-experts serve --help"
    content = {"model": "MODEL", "enable-lora": True, "dtype": "half", "torchao-config": "int8wo"}
    both = r"serve\.json: enable-lora is refused: .*; torchao-config: 'int8wo' is refused: "
    with pytest.raises(ConfigError, match=both):
        read(tmp_path, content)


def test_words_after_two_dashes_and_values_are_left_alone():
    assert parse("--", "MODEL").model_path == "MODEL"
    options = parse("MODEL", "--prompt=--trust-remote-code", command="generate")
    assert options.prompt == ["--trust-remote-code"] and options.ignored_flags == ()
    assert parse("--cuda-graph-sizes", "1", "-1", "--enforce-eager", "MODEL").model_path == "MODEL"


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "inspect"])
def test_commands_with_an_engine_share_the_table(command):
    more = ("--prompt", "a") if command == "generate" else ()
    options = parse("MODEL", "--trust-remote-code", "--tp", "2", *more, command=command)
    assert options.ignored_flags == ("--trust-remote-code",) and options.tp_size == 2
    assert load_format(options) == "auto"
    for given in ("auto", "safetensors", "dummy"):
        named = load_format(parse("MODEL", "--load-format", given, *more, command=command))
        assert named == ("dummy" if given == "dummy" else "auto")


def test_other_commands_have_no_such_flags(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["analyze", "stats", "x", "--enforce-eager"])
    assert "unrecognized arguments: --enforce-eager" in capsys.readouterr().err


def test_every_flag_of_the_table_is_taken_with_its_values():
    """No flag leaves a value behind that would become the model's name."""
    serve = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices["serve"]
    for name in (*FLAG_NAMES.no_effect, *FLAG_NAMES.refused):
        arity, flag = FLAG_NAMES.arity(name), f"--{name.replace('_', '-')}"
        refused = name in FLAG_NAMES.refused
        given = {"switch": [f"--no-{flag[2:]}" if refused else flag], "value": [flag, "none"], "list": [f"{flag}=none"]}
        options = serve.parse_args([*given[arity], "MODEL"])
        assert options.model_path == "MODEL", name
        assert (options.ignored_flags == ()) == refused, name


def read(tmp_path, content, *words):
    (tmp_path / "serve.json").write_text(json.dumps(content))
    options = parse(*words, "--config", str(tmp_path / "serve.json"))
    return with_config(options, options.config, add_file_flags)


def test_a_file_has_the_same_names(tmp_path):
    content = {
        **{"model": "MODEL", "trust-remote-code": True, "enforce_eager": False, "max-num-seqs": 64, "tp": 2},
        **{"cuda-graph-sizes": [1, 2], "compilation-config": {"mode": 3}, "torchao-config": None, "swap-space": 4},
        **{"enable-lora": False, "hf-overrides": {}, "dtype": "half"},
    }
    options = read(tmp_path, content, "--log-requests")
    args = ServerArgs(**engine_args(options))
    assert (args.model_path, args.running_limit, args.tp_size, args.dtype) == ("MODEL", 64, 2, "float16")
    assert options.ignored_flags == (
        *("--trust-remote-code", "--enforce_eager", "--cuda-graph-sizes", "--compilation-config", "--swap-space"),
        "--log-requests",
    )
    for wrong in ({"torchao-config": "x"}, {"enable-lora": True}, {"hf-overrides": {"a": 1}}, {"lora-paths": ["x"]}):
        with pytest.raises(ConfigError, match=r"serve\.json: .* is refused: "):
            read(tmp_path, {"model": "MODEL"} | wrong)
    with pytest.raises(ConfigError, match=r"serve\.json: trust-remote-cod is no flag of serve"):
        read(tmp_path, {"trust-remote-cod": True})


def test_the_command_ends_with_two_lines(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "MODEL", "--enable-lora"])
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("page_size=0 must be", "--page-size 0 must be"),
        ("set deterministic=True too", "set --deterministic too"),
        ("raise max_total_tokens, or", "raise --max-total-tokens, or"),
        ("mode='reroute' needs", "--placement-mode 'reroute' needs"),
        ("(dp_size=2)", "(--dp-size 2)"),
        ("deterministic=False is", "deterministic=False is"),
        ("Engine(..., page_size=8)", "Engine(..., page_size=8)"),
        ("/models/page_size/page_size.json", "/models/page_size/page_size.json"),
        ("'page_size=0' and head_dim=5", "'page_size=0' and head_dim=5"),
        ("prompt 'a seed=3, page_size=5' ends", "prompt 'a seed=3, page_size=5' ends"),
        ("page_size=3 fails; use Engine(..., page_size=4)", "--page-size 3 fails; use Engine(..., page_size=4)"),
        ("the engine's page_size=3 and tp_size=2", "the engine's --page-size 3 and --tp-size 2"),
        ("capacity_factor=None is", "capacity_factor=None is"),
    ],
)
def test_errors_of_commands_name_flags(text, expected):
    assert make_parser().command_parser("serve").name_flags(text) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--max-num-seqs", "0"), "--max-num-seqs 0"),
        (("--max-running-requests", "0"), "--max-running-requests 0"),
        (("--max-num-seqs", "4", "--max-running-requests=0"), "--max-running-requests 0"),
        (("--max-running-requests=4", "--max_num_seqs=0"), "--max-num-seqs 0"),
        (("--max-model-len", "-5"), "--max-model-len -5"),
        (("--block-size", "0"), "--block-size 0"),
        (("-tp", "0"), "--tensor-parallel-size 0"),
        (("--tp=0",), "--tp 0"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "inspect"])
def test_an_error_names_the_flag_that_was_given(capsys, command, words, named):
    assert main([command, "no-model", *words]) == 2
    assert f"error: {named} " in capsys.readouterr().err
