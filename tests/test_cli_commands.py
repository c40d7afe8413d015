"""Commands that read, check, copy and convert: run in this process, against the library's results for the same
model."""

import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from routed_experts import formats
from routed_experts.cli import generate, main
from routed_experts.cli.record_files import read_answers
from routed_experts.demo import demo_model_path
from routed_experts.formats import record_from_meta_info
from routed_experts.formats.archive import (
    ArchivedAnswer,
    decode_record,
    decode_record_and_tokens,
    encode_answers,
    encode_record,
)
from routed_experts.formats.wire import encode_meta_info
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

SIZES = ["--precompile-bs-paddings", "4", "--precompile-token-paddings", "32"]


def run(capsys, *argv):
    with lazy_compilation():
        code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_inspect_reads_shapes_without_weights(tmp_path, capsys, engine_factory):
    folder = write_tiny_checkpoint(tmp_path / "model")
    code, out, _ = run(capsys, "inspect", folder, "--json", "--enable-return-routed-experts", *SIZES)
    report = json.loads(out)
    assert code == 0
    assert (report["num_layers"], report["moe_layer_ids"], report["num_experts"], report["top_k"]) == (
        4,
        [1, 2, 3],
        16,
        4,
    )
    assert (report["vocab_size"], report["context_length"], report["row_bytes"], report["dtype"]) == (
        313,
        512,
        12,
        "float32",
    )
    with engine_factory(enable_return_routed_experts=True) as engine:  # the same model and flags, loaded
        assert report["memory_plan"] == engine.memory_plan
        assert report["kv_tokens"] == (engine.components.plan.pool.num_pages - 1) * engine.server_args.page_size
    (folder / "model.safetensors").unlink()
    plan = "\n".join(report["memory_plan"])
    assert "slots of 12 bytes, 1 an id" in plan and "rows of two steps" in plan
    code, out, _ = run(capsys, "inspect", folder, "--config-only")
    assert "12 bytes a token; capture is off (--enable-return-routed-experts)" in out
    assert len(re.findall(r"^capture, (?:device|host) .* off$", out, re.M)) == 2 and " an id" not in out
    assert code == 0 and "3 MoE (1-3) × 16 experts top-4" in out and "bfloat16" in out
    code, out, _ = run(capsys, "inspect", folder, "--config-only", "--tp-size", "2", "--dp-size", "2")
    assert code == 0 and re.search(r"KV [\d,]+ tokens in each of 2 data ranks\n", out)
    code, _, err = run(capsys, "inspect", folder)
    assert code == 2 and "safetensors" in err
    code, _, err = run(capsys, "inspect", folder, "--config-only", "--max-total-tokens", str(10**12))
    assert code == 1 and "--max-total-tokens" in err


def test_tiny_writes_a_checkpoint_that_is_served(tmp_path, capsys):
    code, out, _ = run(capsys, "tiny", tmp_path / "model")
    assert code == 0 and "routed-experts serve" in out
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == {
        file.name: file.read_bytes() for file in filter(Path.is_file, demo_model_path().iterdir())
    }
    code, _, err = run(capsys, "tiny", tmp_path / "model")
    assert code == 2 and "empty folder" in err
    assert run(capsys, "inspect", tmp_path / "model")[0] == 0


def test_random_weights_need_no_file_of_weights(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    flags = ["--prompt", "a", "--max-new-tokens", 3, *SIZES]
    code, _, err = run(capsys, "generate", folder, *flags)
    assert code == 2 and "model.safetensors" in err
    code, _, err = run(capsys, "generate", folder, *flags, "--load-format", "dummy")
    assert code == 0, err
    assert run(capsys, "inspect", folder, "--load-format", "dummy")[0] == 0


def test_doctor_tests_capture_against_replay(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    assert out.count("ok    ") == 4 and "all checks passed" in out and "jax " in out


def test_chat_answers_lines_until_they_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/new\n" + "a " * 2000 + "\nhello\n/quit\nnever\n"))
    folder = write_tiny_checkpoint(tmp_path)
    code, out, err = run(capsys, "chat", folder, "--temperature", "0", "--max-new-tokens", "8", *SIZES)
    half = len(out) // 2
    assert code == 0 and half > 1 and out[:half] == out[half:], "forgotten, the same question gets the same answer"
    assert "/new starts a new conversation" in err and "Ctrl-D" not in out


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--speculative-algorithm EAGLE3", "give the folder of its head"),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 64", "in 2..32"),
        ("--speculative-num-steps 3", "without --speculative-algorithm"),
    ],
)
def test_drafts_that_cannot_be_made_are_refused_by_each_command(capsys, command, flags, words):
    prompt = ["--prompt", "a"] if command == "generate" else []
    code, out, err = run(capsys, command, "demo", *prompt, *flags.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_chat_answers_with_drafts_as_without(tmp_path, capsys, monkeypatch):
    folder, answers = write_tiny_checkpoint(tmp_path), []
    for flags in ([], ["--speculative-algorithm", "NGRAM", "--no-speculative-adaptive"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello hello hello\n"))
        code, out, _ = run(capsys, "chat", folder, "--temperature", "0", "--max-new-tokens", "16", *flags, *SIZES)
        answers.append((code, out))
    assert answers[0] == answers[1] and answers[0][0] == 0


def test_chat_on_a_terminal_begins_with_its_commands(tmp_path, capsys, monkeypatch):
    terminal = io.StringIO("hello\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    folder = write_tiny_checkpoint(tmp_path)
    code, out, _ = run(capsys, "chat", folder, "--temperature", "0", "--max-new-tokens", "2", *SIZES)
    assert code == 0 and re.match(r"/new .*Ctrl-C .*/quit or Ctrl-D ends the chat\n> ", out) and out.endswith("> \n")


def test_generate_reads_json_lines(tmp_path, capsys, engine_factory):
    folder = write_tiny_checkpoint(tmp_path / "model")
    lines = [{"prompt": "The cat"}, {"input_ids": [5, 6, 7], "tag": 1}, {"text": "One two"}]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    flags = [
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
        "--max-new-tokens",
        4,
        "--temperature",
        0,
    ]
    code, _, err = run(capsys, "generate", folder, *flags, *SIZES)
    assert code == 0 and f"wrote {tmp_path / 'out.jsonl'}: 3 answers\n" in err, err
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.get("prompt") for line in answers] == ["The cat", None, "One two"] and answers[1]["tag"] == 1
    with engine_factory() as engine:
        for line, answer in zip(lines, answers, strict=True):
            prompt = line.get("prompt", line.get("text"))
            expected = engine.generate(prompt, {"temperature": 0, "max_new_tokens": 4}, line.get("input_ids"))
            assert answer["output_ids"] == expected["output_ids"]
    rows = ["--return-routed-experts", "--output", tmp_path / "out.safetensors"]
    assert run(capsys, "generate", folder, *flags, *SIZES, *rows)[0] == 0
    archived = read_answers([tmp_path / "out.safetensors"])
    for entry, answer in zip(archived, answers, strict=True):
        assert {name: entry.answer[name] for name in ("text", "output_ids")} == {
            name: answer[name] for name in ("text", "output_ids")
        }
        tokens = [*entry.answer["input_ids"], *entry.answer["output_ids"]]
        with engine_factory(enable_return_routed_experts=True) as engine:
            assert engine.score(tokens).routed_experts[: len(tokens) - 1].ids.tolist() == entry.record.ids.tolist()
    assert archived[1].answer["tag"] == 1 and archived[1].answer["input_ids"] == [5, 6, 7]
    assert run(capsys, "convert", tmp_path / "out.safetensors", tmp_path / "b.safetensors", "--line", 2)[0] == 0
    assert decode_record((tmp_path / "b.safetensors").read_bytes()) == archived[1].record
    assert run(capsys, "convert", tmp_path / "out.safetensors", tmp_path / "b.safetensors", "--line", 4)[0] == 2
    code, out, _ = run(capsys, "analyze", "tokens", tmp_path / "out.safetensors", "--tokenizer", folder)
    assert code == 0 and "'The'" in out and out.count("# answer") == 3
    for bad in ({"texts": "b"}, {}):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(bad), encoding="utf-8")
        code, _, err = run(capsys, "generate", folder, "--input", tmp_path / "bad.jsonl", *SIZES)
        assert code == 2 and "line 2 must be an object with prompt (or text) or input_ids" in err
        assert ("it has 'texts': did you mean text?" in err) == ("texts" in bad)
    half = '{"prompt": "a", "tag": "\\ud800"}'
    for bad, message in (
        (half, "half a character"),
        ('{"prompt": 5}', "as text"),
        ('{"input_ids": ["a"]}', "token ids"),
    ):
        (tmp_path / "bad.jsonl").write_text(bad + "\n", encoding="utf-8")
        code, _, err = run(
            capsys, "generate", folder, "--input", tmp_path / "bad.jsonl", "--output", tmp_path / "never.jsonl", *SIZES
        )
        assert code == 2 and message in err and "line 1" in err and "ready" not in err


def test_a_file_that_is_not_there_is_named_without_a_number(tmp_path, capsys):
    for argv in (
        ("generate", "demo", "--input", tmp_path / "nosuch"),
        ("analyze", "stats", tmp_path / "nosuch.jsonl"),
        ("convert", tmp_path / "nosuch.safetensors", tmp_path / "b.json"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and err.count("\n") == 1 and "Errno" not in err
        assert "nosuch" in err and "cannot be read (No such file or directory); name a file" in err


def test_answers_outlive_a_refusal_and_an_interrupt(tmp_path, capsys, monkeypatch):
    folder = write_tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(generate, "BATCH_SIZE", 1)
    lines = [{"prompt": "The cat"}, {"input_ids": [5, 6]}, {"input_ids": [10**6]}]  # the last is no token of the model
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    flags = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2]
    code, _, err = run(capsys, "generate", folder, *flags, *SIZES)
    (partial,) = tmp_path.glob(".*.part.jsonl")
    assert code == 2 and f"2 answers so far are kept, a line each, in {partial}" in err
    assert [len(json.loads(line)["output_ids"]) for line in partial.read_text(encoding="utf-8").splitlines()] == [2, 2]
    assert not (tmp_path / "out.jsonl").exists()


def test_a_queue_that_is_shorter_than_the_prompts_takes_them_in_turn(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    lines = [{"input_ids": [5, 6 + number], "id": number} for number in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    flags = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2]
    code, _, err = run(capsys, "generate", folder, *flags, *SIZES, "--max-queued-requests", 2)
    assert code == 0, err
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(answer["id"], len(answer["output_ids"])) for answer in answers] == [(number, 2) for number in range(5)]
    assert [line for line in err.splitlines() if "of 5 prompts" in line] == [f"{n} of 5 prompts" for n in (2, 4, 5)]


@pytest.mark.parametrize(("written", "left"), [("", None), ('{"a": 1}\n{"b"', '{"a": 1}\n')])
def test_an_interrupt_leaves_whole_lines(tmp_path, capsys, written, left):
    def interrupted():
        with generate._new_lines(tmp_path / "out.jsonl") as part:
            part.write_text(written)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    partial = list(tmp_path.iterdir())
    assert [file.read_text() for file in partial] == ([] if left is None else [left])
    err = capsys.readouterr().err
    assert all(f"1 answers so far are kept, a line each, in {file}" in err for file in partial) and bool(err) == bool(
        partial
    )


def test_lines_end_at_line_feeds_alone(answers, capsys, tmp_path):
    folder, record = answers
    parsed = json.loads((folder / "a.json").read_text(encoding="utf-8"))
    first = {"text": "a\u2028 b\u2029 c\x85 d", "meta_info": {}}
    text = "\r\n".join(json.dumps(answer, ensure_ascii=False) for answer in (first, parsed)) + "\n"
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8", newline="")
    assert run(capsys, "convert", tmp_path / "a.jsonl", tmp_path / "b.safetensors", "--line", 2)[0] == 0
    assert decode_record((tmp_path / "b.safetensors").read_bytes()) == record
    (tmp_path / "one.jsonl").write_text(
        json.dumps({**parsed, "text": first["text"]}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert [answer.record for answer in read_answers([tmp_path / "one.jsonl"])] == [record]


@pytest.fixture(scope="module")
def answers(tmp_path_factory, engine_factory):
    """A folder with one answer of /generate, and one with a choice of OpenAI's form."""
    folder = tmp_path_factory.mktemp("answers")
    with engine_factory(enable_return_routed_experts=True) as engine:
        result = engine.generate("The cat sat", {"max_new_tokens": 5, "seed": 1}, return_routed_experts=True)
    (folder / "a.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "openai.json").write_text(
        json.dumps({"choices": [{"index": 0, "meta_info": result["meta_info"]}]}), encoding="utf-8"
    )
    (folder / "many.jsonl").write_text("\n".join([json.dumps({"meta_info": {}}), json.dumps(result)]), encoding="utf-8")
    (folder / "listed.json").write_text(json.dumps([{"meta_info": {}}, result]), encoding="utf-8")
    return folder, record_from_meta_info(result)


def test_convert_goes_through_every_file_and_form(answers, capsys, tmp_path):
    folder, record = answers
    for source, flags in (
        ("a.json", ()),
        ("openai.json", ()),
        ("many.jsonl", ("--line", 2)),
        ("listed.json", ("--choice", 1)),
    ):
        code, out, err = run(capsys, "convert", folder / source, tmp_path / "r.safetensors", *flags)
        assert code == 0, err
        assert decode_record((tmp_path / "r.safetensors").read_bytes()) == record
        assert f"{record.num_rows} rows" in out
    for form in ("int32", "npy", "list"):
        for layers in ("all", "moe"):
            flags = ("--format", form, "--layers", layers)
            assert run(capsys, "convert", tmp_path / "r.safetensors", tmp_path / "b.json", *flags)[0] == 0
            assert record_from_meta_info(json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))) == record
    for name in ("sglang", "vllm", "verl", "slime", "nemo_rl", "tunix", "maxtext"):
        assert run(capsys, "convert", tmp_path / "r.safetensors", tmp_path / "b.npy", "--to", name)[0] == 0
        written = np.load(tmp_path / "b.npy", allow_pickle=False)
        expected = import_module(f"routed_experts.formats.{name}").encode(record)
        assert written.dtype == expected.dtype and np.array_equal(written, expected)
    assert run(capsys, "convert", tmp_path / "r.safetensors", tmp_path / "b.npz", "--to", "megatron")[0] == 0
    with np.load(tmp_path / "b.npz", allow_pickle=False) as parts:
        layers, mask = formats.megatron.encode(record)
        assert np.array_equal(parts["mask"], mask) and np.array_equal(parts["layer_2"], layers[2])


def test_convert_names_what_is_wrong(answers, capsys, tmp_path):
    folder, _ = answers
    (tmp_path / "no.json").write_text("{", encoding="utf-8")
    for source, target, flags, code in (
        (folder / "a.json", "b.txt", (), 2),
        (folder / "many.jsonl", "b.json", (), 2),
        (folder / "many.jsonl", "b.json", ("--line", 9), 2),
        (folder / "a.json", "b.npy", ("--to", "megatron"), 2),
        (tmp_path / "no.json", "b.json", (), 2),
        (folder / "nowhere.json", "b.json", (), 2),
        (folder / "listed.json", "b.json", ("--choice", 5), 2),
    ):
        status, _, err = run(capsys, "convert", source, tmp_path / target, *flags)
        assert status == code and err.count("\n") == 1, err


def test_convert_keeps_the_token_ids_of_a_source_that_has_them(answers, capsys, tmp_path):
    _, record = answers
    token_ids = np.arange(record.num_tokens, dtype=np.int32) + 7
    (tmp_path / "one.safetensors").write_bytes(encode_record(record, token_ids))
    fields = {"text": "", "meta_info": {"prompt_tokens": 3}}
    answer = ArchivedAnswer(answer=fields, token_ids=token_ids, record=record)
    (tmp_path / "many.safetensors").write_bytes(encode_answers([answer]))
    for name in ("one", "many"):
        code, _, err = run(capsys, "convert", tmp_path / f"{name}.safetensors", tmp_path / "out.safetensors")
        written, ids = decode_record_and_tokens((tmp_path / "out.safetensors").read_bytes())
        assert code == 0 and written == record and ids.tolist() == token_ids.tolist(), err


@pytest.mark.parametrize(
    ("source", "target", "flags", "words"),
    [
        ("r.safetensors", "b.json", ("--choice", 0), "--choice 0 has no effect on SOURCE, a .safetensors source"),
        ("r.safetensors", "b.json", ("--line", 1), "--line 1 has no effect on SOURCE, which holds one record"),
        ("a.json", "b.npy", ("--line", 2), "--line 2 has no effect on SOURCE, which is no .jsonl file"),
        ("a.json", "b.json", ("--to", "verl"), "--to 'verl' has no effect on TARGET, a .json target"),
        ("a.json", "b.npz", ("--to", "verl"), "is written as .npy; TARGET ends in .npz; name a file such as b.npy"),
        ("a.json", "b.json", ("--missing", "gate"), "--missing 'gate' has no effect on TARGET, a .json target"),
        ("a.json", "b.npy", ("--format", "list"), "--format 'list' has no effect on TARGET, a .npy target"),
        ("a.json", "b.npz", ("--layers", "moe"), "--layers 'moe' has no effect on TARGET, a .npz target"),
        ("a.json", "b.safetensors", ("--format", "npy"), "--format 'npy' has no effect on TARGET"),
        ("a.json", "b.npy", ("--missing", "gate"), "--missing gate has no effect on --to sglang"),
        ("empty.json", "b.npy", (), "SOURCE holds no answer"),
    ],
)
def test_convert_refuses_flags_without_effect(answers, capsys, tmp_path, source, target, flags, words):
    folder, record = answers
    (tmp_path / "r.safetensors").write_bytes(encode_record(record))
    (tmp_path / "empty.json").write_text("[]")
    source, target = (tmp_path if (tmp_path / source).exists() else folder) / source, tmp_path / target
    code, out, err = run(capsys, "convert", source, target, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and not target.exists()
    assert words.replace("SOURCE", str(source)).replace("TARGET", str(target)) in err


def test_answers_go_to_files_that_other_commands_read(capsys, tmp_path):
    for name in ("out.txt", "out.json", "out"):
        argv = ("generate", tmp_path / "no model", "--prompt", "a", "--output", tmp_path / name)
        code, _, err = run(capsys, *argv)
        assert code == 2 and "name a file that ends in .jsonl (JSON lines) or .safetensors (an archive)" in err, err
    code, _, err = run(capsys, *argv[:-1], "/dev/null")
    assert code == 2 and "no checkpoint folder" in err, err


def test_other_commands_refuse_flags_without_effect(capsys, tmp_path):
    network = ("--nnodes", 2, "--dist-init-addr", "127.0.0.1:5000")
    (tmp_path / "key").write_text("a-key-for-tests")
    for argv, words in (
        (("doctor", "--model", "demo", *network), "--model demo has no effect with --nnodes 2"),
        (("serve", "demo", "--api-key", "abcdefgh", "--api-key-file", tmp_path / "key"), "and --api-key are one key"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and words in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (("generate",), ('{"prompt": "text"}', '"text"', '"input_ids"', "the answers: JSON lines (.jsonl)")),
        (("analyze", "report"), ("--output FILE.html", "the page to write")),
        (("analyze", "plot"), ("--output PICTURE", "the picture to write: .png, .svg, .pdf")),
        (("convert",), ("SOURCE TARGET", "SOURCE  an answer (.json)", "TARGET  .safetensors (the record)")),
        (("serve",), ("checkpoint folder, Hugging Face id (org/name), or demo", "--revision NAME")),
    ],
)
def test_help_names_files_and_their_forms(capsys, command, texts):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(text.split()) in shown for text in texts), shown


# --- lines of --input


def test_a_field_named_choices_is_a_field_and_no_response(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    line = {"prompt": "The cat", "choices": ["1", "2"]}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    flags = ["--input", tmp_path / "in.jsonl", "--output", out, "--max-new-tokens", 3, "--return-routed-experts"]
    assert run(capsys, "generate", folder, *flags, *SIZES)[0] == 0
    (entry,) = read_answers([out])
    assert entry.answer["choices"] == ["1", "2"] and entry.record == record_from_meta_info(entry.answer)
    assert run(capsys, "convert", out, tmp_path / "a.safetensors")[0] == 0
    assert decode_record((tmp_path / "a.safetensors").read_bytes()) == entry.record
    code, text, err = run(capsys, "analyze", "stats", out)
    assert code == 0 and "1 records" in text, err
    code, _, err = run(capsys, "convert", out, tmp_path / "a.safetensors", "--choice", 1)
    assert code == 2 and f"--choice 1, but {out}, line 1 is one answer without choices; leave --choice out" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a", "meta_info": 1}', "has a field meta_info, which is one of its answer; rename it"),
        (b'{"input_ids": [1], "output_ids": []}', "has a field output_ids"),
        (b'{"prompt": "a", "score": NaN}', "holds NaN, Infinity or a value too deep"),
        (b'{"prompt": "a", "score": [1e999]}', "holds NaN, Infinity"),
        (b'{"prompt": ""}', "holds an empty prompt"),
        (b'{"input_ids": []}', "holds an empty prompt"),
        (b'{"prompt": "\xff"}', "is no JSON ('utf-8' codec"),
    ],
)
def test_a_line_that_cannot_be_answered_is_refused_before_the_model_is_loaded(tmp_path, capsys, line, words):
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    code, out, err = run(capsys, "generate", tmp_path / "no-model", "--input", tmp_path / "in.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"in.jsonl, line 2 {words}" in err


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ({"prompt": "a", "text": "b"}, "prompt and text"),
        ({"text": "a", "input_ids": [1]}, "text and input_ids"),
        ({"input_ids": [1], "text": "a", "prompt": "b"}, "prompt and text and input_ids"),
    ],
)
def test_a_line_with_two_prompts_is_refused_by_their_names(tmp_path, capsys, line, fields):
    (tmp_path / "in.jsonl").write_text(json.dumps(line), encoding="utf-8")
    code, _, err = run(capsys, "generate", tmp_path / "no-model", "--input", tmp_path / "in.jsonl")
    assert code == 2 and f"in.jsonl, line 1 has {fields}, each of which is its prompt; give one of them" in err


@pytest.mark.parametrize("source", ["in.jsonl", "link.jsonl", "hard.jsonl", "-"])
@pytest.mark.parametrize("output", ["in.jsonl", "link.jsonl"])
def test_answers_do_not_replace_their_prompts(tmp_path, source, output):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    (tmp_path / "link.jsonl").symlink_to("in.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(prompts)
    command = [sys.executable, "-m", "routed_experts", "generate", "no-model", "--input", source, "--output", output]
    env = {**os.environ, "PYTHONPATH": str(Path(generate.__file__).parents[2])}
    with prompts.open("rb") as stdin:
        done = subprocess.run(command, stdin=stdin, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 2 and done.stderr == (
        f"routed-experts generate: error: --output {output} is the file of --input, and the answers would replace the "
        "prompts; name another file\n"
    )
    assert prompts.read_text(encoding="utf-8") == '{"prompt": "a"}\n'


def test_prompts_and_answers_may_be_one_device(tmp_path, capsys):
    code, _, err = run(capsys, "generate", tmp_path / "no-model", "--input", "/dev/null", "--output", "/dev/null")
    assert code == 2 and "no checkpoint folder" in err


def test_standard_input_that_is_no_utf8_is_refused(tmp_path, capsys, monkeypatch):
    encoded = io.TextIOWrapper(io.BytesIO(b'{"prompt": "\xff"}\n'), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", encoded)
    code, _, err = run(capsys, "generate", tmp_path / "no-model", "--input", "-")
    assert code == 2 and "-, line 1 is no JSON ('utf-8' codec" in err and err.count("\n") == 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    code, _, err = run(capsys, "chat", write_tiny_checkpoint(tmp_path / "model"), *SIZES)
    assert code == 2 and "standard input is no UTF-8" in err and err.count("\n") == 1


def test_a_prompt_that_the_model_refuses_is_named_by_its_line(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "model")
    lines = [{"prompt": "a"}, {"prompt": "word " * 2000}, {"input_ids": [10**6]}]
    (tmp_path / "in.jsonl").write_text("\n" + "\n".join(map(json.dumps, lines)), encoding="utf-8")
    code, _, err = run(capsys, "generate", folder, "--input", tmp_path / "in.jsonl", *SIZES)
    assert code == 2 and "in.jsonl, line 3: prompt of " in err and "is longer than" in err
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines[::2])), encoding="utf-8")
    code, _, err = run(capsys, "generate", folder, "--input", tmp_path / "in.jsonl", *SIZES)
    assert code == 2 and "in.jsonl, line 2: input_ids holds the token id 1000000" in err
    code, _, err = run(capsys, "generate", folder, "--prompt", "a", "--prompt", "word " * 2000, *SIZES)
    assert code == 2 and "--prompt 2 of 2: prompt of " in err
    code, _, err = run(capsys, "generate", tmp_path / "no-model", "--prompt", "")
    assert code == 2 and "--prompt holds an empty prompt" in err


class _TerminatedStderr(io.StringIO):
    """Standard error of a process that gets SIGTERM when it reports the first batch."""

    def write(self, text):
        if text.startswith("1 of 3"):
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


@pytest.fixture
def unhandled_sigterm():
    """A handler that fails the test, where the default one would end the run."""

    def fail(number, frame):
        raise AssertionError("the command does not handle SIGTERM")

    before = signal.signal(signal.SIGTERM, fail)
    yield fail
    signal.signal(signal.SIGTERM, before)


def test_sigterm_keeps_the_answers_so_far_as_ctrl_c_does(tmp_path, monkeypatch, unhandled_sigterm):
    folder = write_tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(generate, "BATCH_SIZE", 1)
    stderr = _TerminatedStderr()
    monkeypatch.setattr("sys.stderr", stderr)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' * 3, encoding="utf-8")
    flags = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2, *SIZES]
    assert main(["generate", str(folder), *map(str, flags)]) == 130
    (partial,) = tmp_path.glob(".*.part.jsonl")
    assert f"1 answers so far are kept, a line each, in {partial}" in stderr.getvalue()
    assert partial.read_text(encoding="utf-8").count("\n") == 1 and not (tmp_path / "out.jsonl").exists()
    assert signal.getsignal(signal.SIGTERM) is unhandled_sigterm


# --- flags and files that are wrong


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-new-tokens", "-5"), "--max-new-tokens is -5"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0"),
        (("--temperature", "-1"), "--temperature is -1"),
        (("--temperature", "nan"), "--temperature is nan"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_wrong_sampling_flags_are_refused_at_the_start(tmp_path, capsys, command, flags, words):
    prompt = ["--prompt", "a"] if command == "generate" else []
    code, out, err = run(capsys, command, tmp_path / "no-model", *prompt, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_chat_advises_a_new_conversation_only_for_one_that_is_too_long(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\ud800\n" + "a " * 2000 + "\n"))
    code, out, err = run(capsys, "chat", write_tiny_checkpoint(tmp_path), *SIZES)
    surrogate, long = (line for line in err.splitlines() if line.startswith("("))
    assert code == 0 and out == ""
    assert "surrogate" in surrogate and "/new" not in surrogate and "/new starts a new conversation" in long


def test_convert_names_a_source_that_is_no_text_or_too_deep_or_empty(tmp_path, capsys):
    for name, content, words in (
        ("a.json", b"\xff", "a.json is no UTF-8"),
        ("b.jsonl", b"\xff\n", "b.jsonl is no UTF-8"),
        ("c.json", b"[" * 200_000, "c.json is no JSON"),
        ("d.jsonl", b"", "d.jsonl holds no answer"),
    ):
        (tmp_path / name).write_bytes(content)
        code, _, err = run(capsys, "convert", tmp_path / name, tmp_path / "out.safetensors")
        assert code == 2 and words in err and err.count("\n") == 1, err


def test_files_whose_metadata_cannot_be_are_refused_in_one_line(answers, capsys, tmp_path):
    _, record = answers
    token_ids = np.zeros(record.num_tokens, np.int32)
    fields = {"text": "", "meta_info": {"prompt_tokens": math.inf}}
    answer = ArchivedAnswer(answer=fields, token_ids=token_ids, record=record)
    (tmp_path / "infinite.safetensors").write_bytes(encode_answers([answer]))
    deep = save({"routed_experts": record.ids}, metadata={"routed_experts_info": "[" * 100_000})
    (tmp_path / "deep.safetensors").write_bytes(deep)
    meta_info = encode_meta_info(record, payload_format="int32", layers="moe")
    meta_info["routed_experts_info"]["num_hidden_layers"] = 10**9
    (tmp_path / "layers.json").write_text(json.dumps({"meta_info": meta_info}))
    (tmp_path / "nested.json").write_text("[" * 200_000)
    for name, words in (
        ("infinite.safetensors", "prompt_tokens is inf"),
        ("deep.safetensors", "are no record"),
        ("layers.json", "num_hidden_layers is 1000000000; expected 1 to 1024"),
        ("nested.json", "is no JSON"),
    ):
        target = tmp_path / "out.npy"
        for argv in (("analyze", "tokens", tmp_path / name), ("convert", tmp_path / name, target, "--to", "sglang")):
            code, _, err = run(capsys, *argv)
            assert code == 2 and words in err and err.count("\n") == 1, err


def test_a_sequence_of_a_length_that_no_model_has_is_refused(answers, capsys, tmp_path):
    _, record = answers
    long = dataclasses.replace(record, num_tokens=10**9)
    (tmp_path / "long.safetensors").write_bytes(encode_record(long))
    for argv in (
        ("analyze", "tokens", tmp_path / "long.safetensors"),
        ("convert", tmp_path / "long.safetensors", tmp_path / "a.npy", "--to", "maxtext"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and "num_tokens=1000000000" in err and err.count("\n") == 1


def test_a_key_file_that_cannot_be_read_is_named_with_its_flag(tmp_path, capsys):
    (tmp_path / "key").write_bytes(b"\xff\n")
    for name, status, words in (
        ("key", 2, "is no UTF-8"),
        ("nosuch", 1, "cannot be read (No such file or directory)"),
    ):
        for flag in ("--api-key-file", "--admin-api-key-file"):
            code, _, err = run(capsys, "serve", "demo", flag, tmp_path / name)
            assert code == status and f"{flag} {tmp_path / name} {words}" in err and err.count("\n") == 1, err


@pytest.mark.parametrize("value", ["12XB", "GiB", "-1", "1.5GiB", ""])
def test_a_number_of_bytes_that_is_none_is_refused_with_its_form(capsys, value):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "demo", f"--routing-store-bytes={value}"])
    err = capsys.readouterr().err
    assert caught.value.code == 2 and f"{value!r} is no number of bytes; write it as 4096, 16KiB" in err


def test_demo_refuses_an_output_that_is_a_file_before_it_starts(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    code, out, err = run(capsys, "demo", "--output", tmp_path / "taken")
    assert (code, out, err.count("\n")) == (1, "", 1) and f"--output {tmp_path / 'taken'}" in err
