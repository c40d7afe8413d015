"""`serve --config FILE`: the file takes the flags of the command line, the command line wins, and errors name the file
and the key."""

import argparse
import json
import sys

import pytest

from routed_experts.cli import main, make_parser
from routed_experts.cli.config_file import with_config
from routed_experts.cli.serve import add_file_flags
from routed_experts.core.errors import ConfigError

TYPED = {  # a value of each kind of flag, as typed
    "host": "::1",
    "routing-store-bytes": "2MiB",
    "api-key-file": "keys/one",
    "metrics-compat": "vllm",
    "request-timeout": "2.5",
    "precompile-bs-paddings": "2 4",
    "dtype": "float32",
    "max-model-len": "64",
    "log-level": "debug",
}
SWITCHES = ("strict-fields", "enable-return-routed-experts", "no-enable-prefix-caching", "enable-expert-parallel")


def read(tmp_path, content, *typed, name="serve.yaml"):
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    options = make_parser().parse_args(["serve", *typed, "--config", str(tmp_path / name)])
    values = vars(with_config(options, options.config, add_file_flags))
    return {key: value for key, value in values.items() if key not in ("command", "run", "config")}


def typed(*words):
    return {
        key: value
        for key, value in vars(make_parser().parse_args(["serve", *words])).items()
        if key not in ("command", "run")
    }


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "a.json"])
def test_a_file_equals_the_same_flags(tmp_path, name):
    values = {key: [int(number) for number in value.split()] if " " in value else value for key, value in TYPED.items()}
    words = [word for key, value in TYPED.items() for word in (f"--{key}", *value.split())]
    expected = typed("MODEL", *words, *(f"--{switch}" for switch in SWITCHES))
    assert read(tmp_path, {"model": "MODEL", **values, **dict.fromkeys(SWITCHES, True)}, name=name) == expected
    spelled = {key.replace("-", "_"): value for key, value in values.items()} | dict.fromkeys(SWITCHES, True)
    assert read(tmp_path, {"model_path": "MODEL", **spelled}, name=name) == expected


def test_every_flag_of_serve_may_stand_in_a_file():
    parser = argparse.ArgumentParser()
    add_file_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    serve = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)).choices[
        "serve"
    ]
    known = {flag for action in serve._actions for flag in action.option_strings}
    assert known - flags == {"-h", "--help", "--config"}


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    content = "model: OTHER\nport: 1\nprecompile-bs-paddings: [2]\nstrict-fields: false\nlog-level: debug\n"
    assert read(tmp_path, content) == typed(
        "OTHER", "--port", "1", "--precompile-bs-paddings", "2", "--log-level", "debug"
    )
    values = read(tmp_path, content, "MODEL", "--port", "2", "--precompile-bs-paddings", "4", "8")
    assert values == typed("MODEL", "--port", "2", "--precompile-bs-paddings", "4", "8", "--log-level", "debug")
    assert read(tmp_path, "# nothing\n", "MODEL") == typed("MODEL")


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_switch_with_two_sides_is_on_or_off_as_the_file_says(tmp_path, name):
    for content, flag in (
        ({"speculative-adaptive": True}, "--speculative-adaptive"),
        ({"speculative_adaptive": False}, "--no-speculative-adaptive"),
        ({"no-speculative-adaptive": True}, "--no-speculative-adaptive"),
        ({"no_speculative_adaptive": False}, "--speculative-adaptive"),
    ):
        assert read(tmp_path, content, "MODEL", name=name) == typed("MODEL", flag), content


def test_an_object_is_the_json_of_its_flag(tmp_path):
    words = {"method": "ngram", "num_speculative_tokens": 3}
    expected = typed("MODEL", "--speculative-config", json.dumps(words))
    lines = "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n"
    for content in (lines, {"speculative_config": words}, {"speculative-config": json.dumps(words)}):
        assert read(tmp_path, content, "MODEL") == expected
    assert read(tmp_path, {"speculative-config": words}, "MODEL", name="a.json") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("speculative-config: {method: [ngram]}", "method of speculative-config is a list"),
        ("speculative-config: {a: {b: c}}", "a of speculative-config is an object"),
        ("speculative-config: [1]", "speculative-config is a list"),
        ("speculative-adaptive: 1", "true or false"),
        ("speculative-adaptive: true\nno-speculative-adaptive: true", "are one flag"),
        ("port: {[1]: 2}", "port is {"),
        ("prot: 1", "prot is no flag of serve; did you mean port?"),
        ("nonsense-of-mine: 1", "--help"),
        ("config: a.yaml", "config"),
        ("enable_return_routed_expert: true", "enable-return-routed-experts"),
        ("port: many", "port: 'many' is no integer; give one, such as 8"),
        ("port: true", "port is True"),
        ("port: [1, 2]", "port is a list"),
        ("port: {a: 1}", "port is {'a'"),
        ("strict-fields: maybe", "true or false"),
        ("strict-fields: 1", "true or false"),
        ("dtype: int3", "invalid choice: 'int3'"),
        ("port: 1\nport: 2", "port is written twice"),
        ("context-length: 1\nmax_model_len: 2", "context-length are one flag"),
        ("- port", "holds a list"),
        ("port: [", "is no YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is no YAML"),
        ("7", "holds a single value"),
        ("precompile-bs-paddings: [a]", "precompile-bs-paddings: 'a' is no integer"),
        ("torchao-config: int8wo", "torchao-config: 'int8wo' is refused"),
        ("enable_lora: true", "enable_lora is refused"),
        ("weights-root: ~", "weights-root has no value"),
        ("api-key:", "api-key has no value"),
        ("port: &a [*a]", "port is ["),
        ("port: " + "9" * 5000, f"port: '{'9' * 60}'... (5000 characters) is no integer"),
        ("port: [" + "1, " * 5000 + "true]", "port is a list of 5001; expected text or a number"),
        ("p" * 900 + ": 1", f"{'p' * 60}... (900 characters) is no flag of serve"),
    ],
)
def test_what_is_wrong_names_the_file_and_the_key(tmp_path, content, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content, "MODEL")
    assert message in str(caught.value) and str(tmp_path / "serve.yaml") in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_command_reads_it(tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text("model: /no/such/model\n")
    assert main(["serve", "--config", str(tmp_path / "serve.yaml")]) == 2
    assert "/no/such/model" in capsys.readouterr().err
    for name in ("serve.toml", "missing.yaml"):
        assert main(["serve", "MODEL", "--config", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert name in err and err.count("\n") == 1


def test_values_are_taken_as_they_are_written(tmp_path):
    for text in ("0123456", "1.10", "12:30", "1_0", "0x10", "2026-01-01", "1e3"):
        assert read(tmp_path, f"api-key: {text}\nmodel: {text}\n") == typed(text, "--api-key", text)
    content = '{\n\t"api-key": 1.10, "port": 80}'
    assert read(tmp_path, content, name="b.json") == typed("--api-key", "1.10", "--port", "80")


def test_json_that_is_wrong_is_named_and_needs_no_yaml(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert read(tmp_path, {"port": 1}, name="a.json") == typed("--port", "1")
    cases = (
        ("{", "is no JSON"),
        ("[]", "holds a list"),
        ('{"port": 1, "port": 2}', "twice"),
        ('{"port": {"a": 1}}', "port is {"),
        ('{"port": null}', "no value"),
        ('{"port": true}', "port is True"),
    )
    for content, message in cases:
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, content, name="a.json")
        assert message in str(caught.value) and "a.json" in str(caught.value)
    with pytest.raises(ConfigError, match=r"yaml is not installed; run .*\[serve\]"):
        read(tmp_path, "port: 1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("api-key: a", ("--api-key-file", "b")),
        ("api-key-file: a", ("--api-key", "b")),
        ("admin-api-key: a", ("--admin-api-key-file", "b")),
        ("admin-api-key-file: a", ("--admin-api-key", "b")),
        ("ep-size: 4", ("--enable-expert-parallel", "--tp-size", "2")),
        ("enable-expert-parallel: true", ("--ep-size", "2")),
    ],
)
def test_what_is_typed_wins_over_another_name_of_the_same_thing(tmp_path, content, words):
    assert read(tmp_path, content, *words) == typed(*words)
