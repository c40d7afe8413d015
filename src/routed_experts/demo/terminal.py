"""Terminal output of the demo: tables, bars and tinted text; plain text in a pipe.

A model's text is made printable first, so that it cannot control the terminal."""

from collections.abc import Iterable, Sequence
from typing import IO

import numpy as np
from jaxtyping import Float64
from rich.console import Console
from rich.table import Table
from rich.text import Text

from routed_experts.analysis.colormaps import expert_palette, text_color
from routed_experts.analysis.metrics import balance, utilization
from routed_experts.analysis.routed_text import RoutedText, printable
from routed_experts.core.routed_experts import RoutedExperts

_PLAIN_WIDTH, _MAX_BARS, _MAX_LAYERS = 112, 64, 6
_BARS = "▁▂▃▄▅▆▇█"


class Screen:
    """Writes to one stream; colours only on a terminal (rich obeys NO_COLOR)."""

    def __init__(self, stream: IO[str]) -> None:
        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        width = console.width if console.is_terminal else _PLAIN_WIDTH
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._console.print()
        self._console.print(Text(text, style="bold"))

    def line(self, text: str, *, style: str = "") -> None:
        """Write one line, never broken: paths and numbers are not split."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def check(self, text: str, *, passed: bool) -> None:
        """Write a line that ends in ok or FAILED."""
        verdict = ("ok", "green") if passed else ("FAILED", "bold red")
        self._console.print(Text.assemble("  ", text, "  ", verdict), soft_wrap=True)

    def answer(self, text: RoutedText, column: int) -> None:
        """Write prompt and generated text, each token tinted by its first expert in MoE layer `column`."""
        grid = Table.grid(padding=(0, 2))
        prompt, total = text.record.num_prompt_tokens, text.record.num_tokens
        grid.add_row("  prompt", _tinted(text, range(prompt), column))
        grid.add_row("  generated", _tinted(text, range(prompt, total), column))
        self._console.print(grid)

    def experts(self, text: RoutedText, tokens: Iterable[int]) -> None:
        """Tabulate the experts of some tokens, best first, in the first MoE layers."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        layer_ids = text.record.layer_ids[:_MAX_LAYERS]
        for name in ("  token", "text", *(f"layer {layer}" for layer in layer_ids)):
            table.add_column(name, no_wrap=True)
        for token in tokens:
            token_text = repr(printable(text.pieces[token]))
            rows = [" ".join(map(str, text.experts(token, column))) or "no row" for column in range(len(layer_ids))]
            table.add_row(f"  {token}", token_text, *rows)
        self._console.print(table)

    def loads(self, records: Sequence[RoutedExperts]) -> None:
        """Tabulate the load of every MoE layer."""
        numbers, loads = balance(*records), utilization(*records)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("  layer", "max/mean", "entropy", "gini", "dead"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(f"load of each expert, 0 to {loads.max():.1f} × uniform", no_wrap=True)
        for row, layer in enumerate(records[0].layer_ids):
            columns = (
                f"{numbers.max_load[row]:.2f}",
                f"{numbers.entropy[row]:.3f}",
                f"{numbers.gini[row]:.2f}",
                str(numbers.dead[row]),
            )
            table.add_row(str(layer), *columns, bars(loads[row], top=float(loads.max())))
        self._console.print(table)


def bars(load: Float64[np.ndarray, " E"], *, top: float) -> str:
    """Draw one block an expert (the mean of neighbours beyond 64): · for no tokens, ? for unknown rows."""
    groups = np.array_split(load, min(len(load), _MAX_BARS))
    return "".join(_bar(float(group.mean()) / top) for group in groups)


def _bar(share: float) -> str:
    if np.isnan(share):
        return "?"
    return "·" if share == 0 else _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]


def _tinted(text: RoutedText, tokens: Iterable[int], column: int) -> Text:
    palette, tinted = expert_palette(text.record.num_experts), Text()
    for token in tokens:
        experts = text.experts(token, column)
        style = f"{text_color(palette[experts[0]])} on {palette[experts[0]]}" if experts else ""
        tinted.append(printable(text.pieces[token]), style=style)
    return tinted
