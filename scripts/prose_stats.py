"""Print words a page and words a sentence of README, CONTRIBUTING, CHANGELOG and docs: python scripts/prose_stats.py

Code, tables, pictures and headings are no sentences. Words of tables count for the page."""

import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def sentences(text: str) -> list[int]:
    """Words of each sentence of a page of Markdown."""
    text = _FENCE.sub("\n\n", text)
    lines = [line if not re.match(r"\s*(\||#|!\[|---|:::)", line) else "" for line in text.splitlines()]
    lines = [re.sub(r"^\s*(\*|-|\d+\.) ", "\n", line) for line in lines]
    counts = list[int]()
    for paragraph in re.split(r"\n\s*\n|\n(?=\n)", "\n".join(lines)):
        for sentence in re.split(r"(?<=[.!?])[*)\"]*\s+", paragraph.strip()):
            counts += [len(sentence.split())] if len(sentence.split()) > 2 else []
    return counts


def main() -> None:
    """One line a page, then all together."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    every, print_row = list[int](), "{:<28} {:>6} {:>8} {:>8}".format
    print(print_row("page", "words", "median", "longest"))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        counts = sentences(text)
        every += counts
        words = len(_FENCE.sub("", text).split())
        print(print_row(str(page.relative_to(ROOT)), words, median(counts or [0]), max(counts, default=0)))
    print(print_row("all", "", median(every), max(every)))


if __name__ == "__main__":
    main()
