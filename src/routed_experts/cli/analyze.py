"""`routed-experts analyze stats|plot|report|diff|tokens FILE...`: numbers and pictures of recorded routing.

Loads no model but a tokenizer, for the text of tokens. `routed-experts placement` evaluates plans on the same files."""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from routed_experts import analysis
from routed_experts.analysis import RoutedText, RoutingDifference
from routed_experts.cli.flags import MODEL_HELP
from routed_experts.cli.record_files import SUFFIXES, RecordFile, read_answers, read_records
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, RoutingAlignmentError, RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import check_num_tokens
from routed_experts.models.loading.model_source import find_model

if TYPE_CHECKING:
    from routed_experts.engine.requests.tokenizer import Tokenizer

Table = dict[str, Sequence[float]]  # columns, a value for each MoE layer
_PICTURES = (".png", ".svg", ".pdf")
_UNKNOWN = "▪"  # for a token without known text
_LARGEST_ID = 2**31 - 1  # token ids are int32
_DIFF_PURPOSE = (
    "where two runs of the same tokens chose other experts; rows from the first different token on are left out"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The kinds of `analyze` with their flags."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)

    def add(
        name: str, purpose: str, run: Callable[[argparse.Namespace], None], files: str | int
    ) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        kind.set_defaults(analyse=run)
        kind.add_argument(
            "files", type=Path, nargs=files, metavar="FILE", help=f"recorded routing: {', '.join(SUFFIXES)}"
        )
        return kind

    stats = add("stats", "how evenly each layer spreads its load over experts", run_stats, "+")
    diff = add("diff", _DIFF_PURPOSE, run_diff, 2)
    for kind in (stats, diff):
        kind.add_argument("--json", action="store_true", help="one JSON object")
        kind.add_argument("--csv", action="store_true", help="comma-separated values")
    plot = add("plot", "texts tinted by expert over the load of layers and experts, as a picture", run_plot, "+")
    plot.add_argument(
        "--output", type=Path, required=True, metavar="PICTURE", help=f"the picture to write: {', '.join(_PICTURES)}"
    )
    report = add("report", "the same as an interactive page, in one HTML file", run_report, "+")
    report.add_argument("--output", type=Path, required=True, metavar="FILE.html", help="the page to write")
    tokens = add("tokens", "the experts of each token, a line each", run_tokens, "+")
    for kind in (plot, report, tokens):
        kind.add_argument(
            "--layer", type=int, default=None, metavar="L", help="hidden layer to show (default: the middle MoE layer)"
        )
        kind.add_argument(
            "--tokenizer",
            default=None,
            metavar="MODEL",
            help=f"the model that generate had, for text of what it wrote: {MODEL_HELP}",
        )


def run(options: argparse.Namespace, start_time: float) -> int:
    """Run one kind of analysis."""
    options.analyse(options)
    return 0


def run_stats(options: argparse.Namespace) -> None:
    """Balance of each layer over all records."""
    _check_form(options)
    records = read_records(options.files)
    balance, rows = analysis.balance(*records), len(analysis.known_rows(*records))
    columns: Table = {
        "max / mean load": balance.max_load.tolist(),
        "gini": balance.gini.tolist(),
        "std / mean": balance.variation.tolist(),
        "entropy": balance.entropy.tolist(),
        "dead experts": balance.dead.tolist(),
    }
    first = records[0]
    totals = {"records": len(records), "rows": rows, "num_experts": first.num_experts, "top_k": first.top_k}
    _show(totals, first.layer_ids, columns, options)


def run_diff(options: argparse.Namespace) -> None:
    """Differences of two files, record by record, on the tokens that both sequences begin with."""
    _check_form(options)
    a, b = options.files
    ours, theirs = read_answers([a]), read_answers([b])
    if len(ours) != len(theirs):
        raise RoutingAlignmentError(
            f"{a} holds {len(ours)} records and {b} {len(theirs)}; give two runs of the same tokens"
        )
    differences: list[RoutingDifference] = []
    num_left_out = num_unchecked = 0
    for left, right in zip(ours, theirs, strict=True):
        end, is_checked = _shared_tokens(left, right)
        num_unchecked += not is_checked
        num_left_out += _num_known_from(left.record, right.record, end)
        if end <= max(left.record.start, right.record.start):
            continue
        difference = analysis.routing_difference(left.record[:end], right.record[:end])
        if len(difference.tokens):
            differences.append(difference)
    if not differences and num_left_out:
        text = f"{a} and {b} are of different tokens: no row is before the first different token of its record"
        raise RoutingAlignmentError(f"{text}; give two runs of the same tokens")
    if not differences:
        raise RoutingAlignmentError(f"no token has a known row in {a} and in {b}; give two runs of the same tokens")
    if num_unchecked:
        text = f"the tokens of {num_unchecked} of {len(ours)} records are not compared: {a} or {b} lacks their ids"
        print(f"{text}; .safetensors files of generate --output have them", file=sys.stderr)
    sizes = np.array([len(difference.tokens) for difference in differences], np.float64)
    overlap = np.concatenate([difference.overlap for difference in differences])
    jaccard = np.concatenate([difference.jaccard for difference in differences])
    rank1 = np.array([difference.rank1_agreement for difference in differences])
    columns: Table = {
        "overlap": overlap.mean(axis=0).tolist(),
        "jaccard": jaccard.mean(axis=0).tolist(),
        "rank-1 agreement": np.average(rank1, axis=0, weights=sizes).tolist(),
        "flip rate": (overlap < 1).mean(axis=0).tolist(),
    }
    differing = (overlap < 1).any(axis=1)
    totals = {
        "records": len(ours),
        "tokens": len(overlap),
        "tokens that differ": int(differing.sum()),
        "rows left out": num_left_out,
    }
    _show(totals, ours[0].record.layer_ids, columns, options)


def _shared_tokens(a: RecordFile, b: RecordFile) -> tuple[int, bool]:
    """The number of tokens that two sequences begin with alike, and whether their files hold what that needs: the ids
    of the output, and the ids or the text of the prompt. What they do not hold counts as alike."""
    limit = min(a.record.num_tokens, b.record.num_tokens)
    prompts = _ids(a, "input_ids"), _ids(b, "input_ids")
    outputs = _ids(a, "output_ids"), _ids(b, "output_ids")
    if outputs[0] is None or outputs[1] is None:
        return limit, False
    if prompts[0] is not None and prompts[1] is not None:
        return _common_length([*prompts[0], *outputs[0]], [*prompts[1], *outputs[1]]), True
    ends = [entry.record.num_prompt_tokens for entry in (a, b)]
    texts = [entry.answer.get("prompt") for entry in (a, b)]
    has_texts = all(isinstance(text, str) for text in texts)
    if has_texts and (texts[0] != texts[1] or ends[0] != ends[1]):
        return 0, True
    if ends[0] != ends[1]:
        return limit, False
    return ends[0] + _common_length(outputs[0], outputs[1]), has_texts


def _ids(entry: RecordFile, name: str) -> list[int] | None:
    """Token ids of the prompt or of the output, where the file has those that the record is of."""
    if name not in entry.answer:
        return None
    ids, record = _token_ids(entry.answer, name, _LARGEST_ID + 1), entry.record
    num_prompt_tokens = record.num_prompt_tokens
    expected = num_prompt_tokens if name == "input_ids" else record.num_tokens - num_prompt_tokens
    return ids if len(ids) == expected else None


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of entries that both begin with."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _num_known_from(a: RoutedExperts, b: RoutedExperts, first: int) -> int:
    """The number of rows of tokens `first` and later that both records know."""
    low, high = max(first, a.start, b.start), min(a.start + a.num_rows, b.start + b.num_rows)
    return int((a[low:high].known & b[low:high].known).sum()) if low < high else 0


def _check_form(options: argparse.Namespace) -> None:
    """Raise ConfigError for two forms of one output."""
    if options.json and options.csv:
        raise ConfigError("--json and --csv are two forms of one output; give one of them")


def run_plot(options: argparse.Namespace) -> None:
    """A picture of all records."""
    if options.output.suffix not in _PICTURES:
        raise ConfigError(f"--output {options.output} is none of {', '.join(_PICTURES)}; name such a file")
    texts = _texts(options)
    analysis.draw_routing(texts, options.output, title=_title(texts), column=_column(texts[0].record, options.layer))
    print(f"wrote {options.output}: {_title(texts)}")


def run_report(options: argparse.Namespace) -> None:
    """A page of all records."""
    texts = _texts(options)
    page = analysis.routing_page(texts, title=_title(texts), column=_column(texts[0].record, options.layer))
    with atomic_write(options.output) as part:
        part.write_text(page, encoding="utf-8")
    print(f"wrote {options.output}: {_title(texts)}, {len(page) / 1e3:,.0f} kB")


def run_tokens(options: argparse.Namespace) -> None:
    """Each token's position, experts and text."""
    for text in _texts(options):
        column = _column(text.record, options.layer)
        print(f"# {text.title}, layer {text.record.layer_ids[column]}")
        for token, piece in enumerate(text.pieces):
            experts = " ".join(f"{expert:3}" for expert in text.experts(token, column)) or "no row"
            print(f"{token:6}  {experts}  {analysis.printable(piece)!r}")


def _texts(options: argparse.Namespace) -> list[RoutedText]:
    """Every record with the text of its tokens, as far as it is known."""
    from routed_experts.engine.requests.tokenizer import Tokenizer

    folder = None if options.tokenizer is None else find_model(options.tokenizer, weights=False)
    tokenizer = None if folder is None else Tokenizer.from_directory(folder)
    recorded = read_answers(options.files)
    analysis.known_rows(*(answer.record for answer in recorded))  # refuses records of several models
    return [
        RoutedText(title=f"answer {number}", pieces=_pieces(answer, tokenizer), record=answer.record)
        for number, answer in enumerate(recorded, start=1)
    ]


def _pieces(recorded: RecordFile, tokenizer: "Tokenizer | None") -> tuple[str, ...]:
    """Text of each token in files of `generate --output`; squares in other files."""
    answer = recorded.answer
    check_num_tokens(recorded.record, "analyze")
    if tokenizer is None or "output_ids" not in answer or not ("prompt" in answer or "input_ids" in answer):
        return (_UNKNOWN,) * recorded.record.num_tokens
    prompt = (
        _token_ids(answer, "input_ids", tokenizer.vocab_size)
        if "input_ids" in answer
        else tokenizer.encode(str(answer["prompt"]))
    )
    output = _token_ids(answer, "output_ids", tokenizer.vocab_size)
    return analysis.token_texts(tokenizer.token_bytes(token) for token in [*prompt, *output])


def _token_ids(answer: Mapping[str, object], name: str, vocab_size: int) -> list[int]:
    """The token ids of a field of an answer. Raises RoutingFormatError for others."""
    ids = answer[name]
    is_list = isinstance(ids, list)
    for token in ids if is_list else ():
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RoutingFormatError(f"{name} holds {short_repr(token)}; expected token ids of 0 to {vocab_size - 1}")
    if not is_list:
        raise RoutingFormatError(f"{name} is {short_repr(ids)}; expected a list of token ids")
    return cast("list[int]", ids)


def _column(record: RoutedExperts, layer: int | None) -> int:
    """The column of a hidden layer, by default of the middle MoE layer. Raises ConfigError for a dense layer."""
    if layer is None:
        return len(record.layer_ids) // 2
    if layer not in record.layer_ids:
        raise ConfigError(
            f"--layer {short_repr(layer)} has no routed experts; choose one of {', '.join(map(str, record.layer_ids))}"
        )
    return record.layer_ids.index(layer)


def _title(texts: Sequence[RoutedText]) -> str:
    record = texts[0].record
    rows = len(analysis.known_rows(*(text.record for text in texts)))
    model = f"{len(record.layer_ids)} MoE layers × {record.num_experts} experts top-{record.top_k}"
    return f"{rows:,} rows of {len(texts)} answers, {model}"


def _show(totals: dict[str, int], layers: Sequence[int], columns: Table, options: argparse.Namespace) -> None:
    """As JSON, as CSV, or as a table with the mean of the layers."""
    if options.json:
        known = {name: [None if np.isnan(value) else value for value in values] for name, values in columns.items()}
        print(json.dumps({**totals, "layers": list(layers), **known}))
        return
    rows = [[layer, *values] for layer, values in zip(layers, zip(*columns.values(), strict=True), strict=True)]
    if options.csv:
        csv.writer(sys.stdout).writerows([["layer", *columns], *rows])
        return
    print(" · ".join(f"{value:,} {name}" for name, value in totals.items()))
    table = [["layer", *columns], *([str(row[0]), *(f"{value:.4g}" for value in row[1:])] for row in rows)]
    table.append(["mean", *(f"{np.mean(values):.4g}" for values in columns.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
