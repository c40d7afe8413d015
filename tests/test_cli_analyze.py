"""`routed-experts analyze`: its numbers are those of plain loops over the records, its pictures are of the records that
were given."""

import ast
import csv
import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from routed_experts.cli import main
from routed_experts.demo import demo_model_path
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.formats import encode_meta_info, record_from_meta_info
from routed_experts.formats.archive import encode_record
from support.tiny_checkpoint import write_tiny_checkpoint

PROMPTS = ("The cat sat", "experts", "one two three")


def run(capsys, *argv):
    code = main(["analyze", *(str(word) for word in argv)])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def files(tmp_path_factory, engine_factory):
    """Answers as `generate --output` writes them, another run that differs in two tokens, and a record alone."""
    folder = tmp_path_factory.mktemp("records")
    with engine_factory(enable_return_routed_experts=True) as engine:
        answers = engine.generate(list(PROMPTS), {"temperature": 0}, max_new_tokens=6, return_routed_experts=True)
    lines = [{"prompt": prompt, **answer} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    (folder / "out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "one.safetensors").write_bytes(encode_record(record_from_meta_info(answers[0])))
    write_tiny_checkpoint(folder / "model")
    return folder


@pytest.fixture(scope="module")
def records(files):
    return [record_from_meta_info(json.loads(line)) for line in (files / "out.jsonl").read_text().splitlines()]


def test_stats_are_those_of_a_loop(files, records, capsys):
    code, out, _ = run(capsys, "stats", files / "out.jsonl", "--json")
    stats = json.loads(out)
    rows = [row for record in records for row in record.ids.tolist()]
    assert (
        code == 0
        and stats["layers"] == [1, 2, 3]
        and (stats["records"], stats["rows"], stats["num_experts"]) == (3, len(rows), 16)
    )
    for layer in range(3):
        counts = Counter(expert for row in rows for expert in row[layer])
        shares = [counts[expert] / (len(rows) * 4) for expert in range(16)]
        assert stats["dead experts"][layer] == shares.count(0)
        assert stats["max / mean load"][layer] == pytest.approx(max(shares) * 16)
        assert stats["entropy"][layer] == pytest.approx(
            -sum(share * math.log(share) for share in shares if share) / math.log(16)
        )
        assert stats["std / mean"][layer] == pytest.approx(np.std(shares) / np.mean(shares))


def test_tables_and_csv_give_the_same_numbers(files, capsys):
    _, out, _ = run(capsys, "stats", files / "out.jsonl", "--csv")
    rows = list(csv.DictReader(out.splitlines()))
    _, printed, _ = run(capsys, "stats", files / "out.jsonl", "--json")
    assert [int(row["layer"]) for row in rows] == [1, 2, 3]
    assert [float(row["gini"]) for row in rows] == json.loads(printed)["gini"]
    _, table, _ = run(capsys, "stats", files / "out.jsonl")
    lines = table.splitlines()
    assert len(lines) == 6 and lines[-1].split()[0] == "mean" and f"{float(rows[0]['gini']):.4g}" in lines[2]


def test_a_difference_is_where_it_was_made(files, records, capsys, tmp_path):
    first = records[0]
    ids = first.ids.copy()
    free = next(expert for expert in range(16) if expert not in ids[2, 1])
    ids[2, 1, 3] = free  # one of four experts of one token and layer
    ids[4, 2, :2] = ids[4, 2, 1::-1]  # the same experts in another order
    (tmp_path / "b.safetensors").write_bytes(encode_record(dataclasses.replace(first, ids=ids)))
    code, out, _ = run(capsys, "diff", files / "one.safetensors", tmp_path / "b.safetensors", "--json")
    report, rows = json.loads(out), first.num_rows
    assert code == 0 and (report["tokens"], report["tokens that differ"]) == (rows, 1)
    assert report["flip rate"] == pytest.approx([0, 1 / rows, 0])
    assert report["overlap"] == pytest.approx([1, 1 - 0.25 / rows, 1])
    assert report["rank-1 agreement"] == pytest.approx([1, 1, 1 - 1 / rows])
    assert "1 tokens that differ" in run(capsys, "diff", files / "one.safetensors", tmp_path / "b.safetensors")[1]
    same = json.loads(run(capsys, "diff", files / "out.jsonl", files / "out.jsonl", "--json")[1])
    assert same["tokens that differ"] == 0 and same["records"] == 3 and same["overlap"] == [1, 1, 1]


def with_other_token(line, index, token=3):
    """An answer whose output has another token at `index`."""
    ids = list(line["output_ids"])
    ids[index] = token if ids[index] != token else token + 1
    return {**line, "output_ids": ids}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_from_the_first_different_token_on_are_left_out(files, records, capsys, tmp_path):
    lines = [json.loads(line) for line in (files / "out.jsonl").read_text().splitlines()]
    rows, end = [record.num_rows for record in records], records[1].num_prompt_tokens + 2
    other = write_lines(tmp_path / "other.jsonl", [lines[0], with_other_token(lines[1], 2), lines[2]])
    code, out, err = run(capsys, "diff", files / "out.jsonl", other, "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert (report["tokens"], report["rows left out"]) == (rows[0] + end + rows[2], rows[1] - end)
    assert f"{rows[1] - end} rows left out" in run(capsys, "diff", files / "out.jsonl", other)[1]
    other = write_lines(tmp_path / "other.jsonl", [lines[0], {**lines[1], "prompt": "Experts"}, lines[2]])
    report = json.loads(run(capsys, "diff", files / "out.jsonl", other, "--json")[1])
    assert (report["tokens"], report["rows left out"]) == (rows[0] + rows[2], rows[1])


def test_token_ids_of_a_record_alone_are_compared(files, records, capsys, tmp_path):
    record = records[0]
    token_ids = np.arange(record.num_tokens)
    other = token_ids.copy()
    other[[3, 5]] = 99  # the first is in the prompt
    for name, ids in (("a", token_ids), ("b", other), ("c", token_ids + 1)):
        (tmp_path / f"{name}.safetensors").write_bytes(encode_record(record, ids))
    report = json.loads(run(capsys, "diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")[1])
    assert (report["tokens"], report["rows left out"]) == (3, record.num_rows - 3)
    code, out, err = run(capsys, "diff", tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert (code, out) == (2, "") and "are of different tokens" in err and err.count("\n") == 1, err


def test_texts_of_other_prompts_are_refused(files, capsys, tmp_path):
    lines = [json.loads(line) for line in (files / "out.jsonl").read_text().splitlines()]
    other = write_lines(tmp_path / "other.jsonl", [{**line, "prompt": line["prompt"].upper()} for line in lines])
    code, out, err = run(capsys, "diff", files / "out.jsonl", other)
    assert (code, out) == (2, "") and "are of different tokens" in err and "two runs of the same tokens" in err, err


def test_tokens_that_no_file_holds_are_reported_as_not_compared(files, capsys):
    code, out, err = run(capsys, "diff", files / "one.safetensors", files / "one.safetensors", "--json")
    assert code == 0 and json.loads(out)["rows left out"] == 0
    assert "the tokens of 1 of 1 records are not compared" in err
    assert run(capsys, "diff", files / "out.jsonl", files / "out.jsonl")[2] == ""


def test_outputs_are_compared_where_no_prompt_is_known(files, records, capsys, tmp_path):
    line, record = json.loads((files / "out.jsonl").read_text().splitlines()[0]), records[0]
    del line["prompt"]
    ours, end = write_lines(tmp_path / "ours.jsonl", [line]), record.num_prompt_tokens
    other = write_lines(tmp_path / "other.jsonl", [with_other_token(line, 2)])
    code, out, err = run(capsys, "diff", ours, other, "--json")
    report = json.loads(out)
    assert (code, report["tokens"], report["rows left out"]) == (0, end + 2, record.num_rows - end - 2)
    assert "the tokens of 1 of 1 records are not compared" in err
    rows = {"meta_info": encode_meta_info(record[end:], payload_format="int32", layers="moe")}
    ours = write_lines(tmp_path / "ours.jsonl", [{**line, **rows}])
    other = write_lines(tmp_path / "other.jsonl", [{**with_other_token(line, 0), **rows}])
    code, out, err = run(capsys, "diff", ours, other)
    assert (code, out) == (2, "") and "are of different tokens" in err, err


def test_records_that_share_no_known_row_count_for_nothing(files, records, capsys, tmp_path):
    first = records[0]
    known = np.zeros(first.num_rows, bool)
    for name, valid in (
        ("none", known),
        ("first", np.arange(first.num_rows) < 2),
        ("rest", np.arange(first.num_rows) >= 2),
    ):
        (tmp_path / f"{name}.safetensors").write_bytes(encode_record(dataclasses.replace(first, valid=valid)))
    for name in ("none", "rest"):
        code, _, err = run(capsys, "diff", tmp_path / "first.safetensors", tmp_path / f"{name}.safetensors")
        assert code == 2 and "no token has a known row in" in err, err
    assert (
        "2 rows of 1 answers" in run(capsys, "plot", tmp_path / "first.safetensors", "--output", tmp_path / "a.png")[1]
    )


@pytest.mark.parametrize("ids", [[-1], [10**9], [2**80], ["a"], [1.5], [[1]], [None], [True], "12", None])
def test_ids_that_are_no_tokens_are_refused(files, capsys, tmp_path, ids):
    (line, *_) = (files / "out.jsonl").read_text().splitlines()
    (tmp_path / "ids.jsonl").write_text(json.dumps({**json.loads(line), "output_ids": ids}))
    code, _, err = run(capsys, "tokens", tmp_path / "ids.jsonl", "--tokenizer", files / "model")
    assert code == 2 and "output_ids" in err and "token ids" in err and "Traceback" not in err, err


def test_tokens_stand_beside_their_experts(files, records, capsys):
    code, out, _ = run(capsys, "tokens", files / "out.jsonl", "--layer", 2, "--tokenizer", files / "model")
    blocks = out.split("# ")[1:]
    assert code == 0 and len(blocks) == 3
    for block, record, line in zip(blocks, records, (files / "out.jsonl").read_text().splitlines(), strict=True):
        lines = [cells.split(maxsplit=5) for cells in block.splitlines()[1:]]  # token, four experts, text
        assert [[int(word) for word in cells[1:5]] for cells in lines[:-1]] == record.ids[:, 1].tolist()
        assert lines[-1][1:3] == ["no", "row"], "the last token was never fed"
        assert "".join(ast.literal_eval(cells[5]) for cells in lines[:-1]).startswith(json.loads(line)["prompt"])
    squares = run(capsys, "tokens", files / "one.safetensors")[1]
    assert squares.count("▪") == records[0].num_tokens and "layer 2" in squares


def test_a_tokenizer_is_named_as_a_model_is(files, capsys, tmp_path):
    """`demo` too, with token ids that this vocabulary has another text for."""
    (line, *_) = (files / "out.jsonl").read_text().splitlines()
    answer = json.loads(line)
    ids = [7] * answer["meta_info"]["prompt_tokens"]
    del answer["prompt"]
    (tmp_path / "ids.jsonl").write_text(json.dumps({**answer, "input_ids": ids}))
    code, out, err = run(capsys, "tokens", tmp_path / "ids.jsonl", "--tokenizer", "demo")
    text = Tokenizer.from_directory(demo_model_path()).token_text(7)
    assert code == 0, err
    assert [line.split(maxsplit=5)[5] for line in out.splitlines()[1 : 1 + len(ids)]] == [repr(text)] * len(ids)
    code, _, err = run(capsys, "tokens", tmp_path / "ids.jsonl", "--tokenizer", tmp_path / "no")
    assert code == 2 and "no checkpoint folder" in err


def test_pictures_and_pages_are_written(files, capsys, tmp_path):
    code, out, _ = run(
        capsys, "report", files / "out.jsonl", "--output", tmp_path / "a.html", "--tokenizer", files / "model"
    )
    page = (tmp_path / "a.html").read_text()
    assert (
        code == 0
        and "3 answers" in out
        and "3 texts" in page
        and "http://" not in page.replace("http://www.w3.org", "")
    )
    assert run(capsys, "plot", files / "out.jsonl", "--output", tmp_path / "a.png", "--layer", 3)[0] == 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run(capsys, "plot", files / "one.safetensors", "--output", tmp_path / "a.svg")[0] == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_errors_name_what_is_wrong(files, capsys, tmp_path):
    out = files / "out.jsonl"
    (tmp_path / "bare.jsonl").write_text('{"text": "no rows"}\n')
    for argv, words in (
        (["stats", tmp_path / "bare.jsonl"], "bare.jsonl: line 1 holds no routed experts"),
        (["stats", files / "model" / "config.json"], "holds no routed experts"),
        (["diff", out, files / "one.safetensors"], "holds 3 records and"),
        (["plot", out, "--output", tmp_path / "a.gif"], "is none of .png, .svg, .pdf"),
        (["tokens", out, "--layer", 0], "--layer 0 has no routed experts; choose one of 1, 2, 3"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err, err
    code, _, err = run(capsys, "report", out, "--output", tmp_path / "no" / "a.html")
    assert code == 1 and "a.html" in err


def test_two_forms_of_one_output_are_refused(files, capsys):
    for kind, names in (("stats", ["out.jsonl"]), ("diff", ["out.jsonl", "out.jsonl"])):
        code, out, err = run(capsys, kind, *(files / name for name in names), "--json", "--csv")
        assert (code, out) == (2, "") and "--json and --csv are two forms" in err
