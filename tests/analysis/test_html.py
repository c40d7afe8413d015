"""The page as a reader of HTML sees it: nothing is fetched, text stays text, colours and ids are those of the
records."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from analysis.records import build_text
from routed_experts.analysis import routing_page, utilization
from routed_experts.analysis.colormaps import CIVIDIS, colour_at, expert_palette, scale_top

EVIL = [
    "<script>",
    "alert(1)",
    "</script>",
    "<img src=x onerror=y>",
    "&amp;",
    "{{routing}}",
    "\"'`",
    "\x1b[2J\x00",
    "\n",
    "",
    "漢",
    "end",
]
VOID = {"meta", "link", "input", "rect", "path", "stop"}


class Page(HTMLParser):
    """Elements in order: (tag, attributes, own text), and a check that they nest."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements, self.open = [], []
        self.feed(source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])
        if tag not in VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open[-1][0] == tag, (tag, self.open)
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.elements[self.open[-1][1]][2] += data

    def all(self, tag, **expected):
        return [
            (attrs, text) for name, attrs, text in self.elements if name == tag and expected.items() <= attrs.items()
        ]

    def tokens(self):
        return [(attrs, text) for attrs, text in self.all("span") if "data-kind" in attrs]


@pytest.fixture
def texts():
    return [
        build_text(EVIL, 1, title="<b>evil</b>"),
        build_text(["a ", "b ", "c ", "d"], 2, cached_tokens=1, valid=np.array([True, True, False])),
    ]


@pytest.fixture
def source(texts):
    return routing_page(texts, title="A <i>title</i>", column=1)


def test_nothing_is_fetched_from_anywhere(source):
    assert not re.search(r"https?:|//[\w.]+\.|url\((?!#)|@import|<iframe|srcdoc", source)
    for tag, attrs, _ in Page(source).elements:
        assert not {"src", "srcset", "action", "data"} & attrs.keys(), (tag, attrs)
        assert attrs.get("href", "data:,") == "data:,"
    policy = Page(source).all("meta", **{"http-equiv": "Content-Security-Policy"})[0][0]["content"]
    assert policy.startswith("default-src 'none'")


def test_text_of_a_model_is_text_never_markup(source, texts):
    page = Page(source)
    assert len(page.all("script")) == 2
    assert not page.all("img")
    assert [text for _, text in page.all("b")] == ["bold"]  # the legend's own
    assert not any(name.startswith("on") for _, attrs, _ in page.elements for name in attrs)
    rendered = [text for _, text in page.tokens()]
    expected = [*EVIL[:7], "␛[2J␀", "↵\n", "·", "漢", "end", *texts[1].pieces]
    assert rendered == expected
    assert page.all("h2")[0][1] == "<b>evil</b>"
    assert page.all("title")[0][1] == page.all("h1")[0][1] == "A <i>title</i>"


def test_tokens_wear_the_colour_of_their_first_expert(source, texts):
    palette, tokens = expert_palette(7), iter(Page(source).tokens())
    for text in texts:
        for token in range(len(text.pieces)):
            attrs, _ = next(tokens)
            experts = text.experts(token, 1)
            assert attrs.get("style", "").startswith(f"background:{palette[experts[0]]}" if experts else "")
            assert ("u" in attrs["class"].split()) == (not experts)
            assert attrs["data-kind"].startswith("generated" if token >= text.record.num_prompt_tokens else "prompt")
            assert ("prefix cache" in attrs["data-kind"]) == (token < text.cached_tokens)


@pytest.mark.parametrize("experts", [7, 300])
def test_the_script_contains_the_ids_of_the_records(experts):
    texts = [
        build_text("abcdef", 3, experts=experts),
        build_text("abc", 4, experts=experts, start=0, valid=np.array([False, True])),
    ]
    data = json.loads(Page(routing_page(texts, title="t")).all("script", id="routing")[0][1])
    assert (data["layers"], data["top_k"], len(data["palette"])) == ([1, 2, 3], 3, experts)
    for text, entry in zip(texts, data["texts"], strict=True):
        dtype = {1: "<u1", 2: "<u2"}[entry["id_bytes"]]
        ids = np.frombuffer(base64.b64decode(entry["ids"]), dtype).reshape(entry["rows"], 3, 3)
        np.testing.assert_array_equal(ids, text.record.ids)
        assert entry["start"] == 0
    assert [entry["known"] for entry in data["texts"]] == [None, "01"]


def test_cells_of_the_heat_map_show_the_utilization_on_one_scale(source, texts):
    loads = [
        utilization(*(text.record.prompt for text in texts)),
        utilization(*(text.record.generated for text in texts)),
    ]
    top, cells = scale_top(*loads), iter(Page(source).all("rect", **{"class": "cell"}))
    for load in loads:
        for layer, expert in np.ndindex(load.shape):
            attrs, _ = next(cells)
            assert attrs["data-at"] == f"{layer} {expert}"
            assert attrs["fill"] == colour_at(load[layer, expert] / top, CIVIDIS)
    assert next(cells, None) is None
    assert "1 = uniform" in source
    assert "T = 6 rows of prompts and 7 of generated tokens" in source


def test_a_text_without_generated_rows_is_shown_as_unknown():
    page = Page(routing_page([build_text("abc", prompt=2)], title="t"))
    assert [attrs["fill"] for attrs, _ in page.all("rect", **{"class": "cell"})].count("var(--none)") == 21
