"""The page at /: what it may load, what it may do with text, and that the requests it makes are served. No browser runs
here."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest

from routed_experts.formats import record_from_meta_info
from support.http_server import running, stream

HTML = (files("routed_experts.server") / "playground.html").read_text(encoding="utf-8")


class Links(HTMLParser):
    """Attributes that load or run something, and the tags there are."""

    def __init__(self):
        super().__init__()
        self.loads, self.handlers, self.tags, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "action", "data", "poster", "srcset"):
                self.loads.append((tag, value))
            if name.startswith("on") or name == "style":
                self.handlers.append((tag, name))
            if name == "id":
                self.ids.append(value)


@pytest.fixture(scope="module")
def page():
    links = Links()
    links.feed(HTML)
    return links


def test_nothing_is_loaded_from_anywhere(page):
    assert page.loads == [] and page.handlers == []
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", HTML.replace("${origin}", ""))
    assert not {"iframe", "object", "embed", "link", "base", "form", "img"} & set(page.tags)


def test_text_is_never_markup():
    script = re.search(r"<script>(.*?)</script>", HTML, re.DOTALL)[1]
    ways = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( createContextualFragment setAttribute"
    assert [way for way in ways.split() if way in script] == []
    fetched = set(re.findall(r'fetch\("([^"]+)"', script))
    assert fetched == {"/v1/models", "/health", "/generate"}


def test_every_element_that_the_script_names_is_there(page):
    assert set(re.findall(r'\$\("(\w+)"\)', HTML)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_the_policy_names_the_script_and_style_of_the_file_alone(server, engine):
    with running(engine, api_key="a-key-for-tests") as guarded:
        for response in (server.client.get("/"), guarded.client.get("/", headers={"authorization": ""})):
            assert response.status_code == 200 and response.text == HTML
            assert response.headers["content-type"].startswith("text/html")
            policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
            assert (
                policy["default-src"] == "'self'" and policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
            )
            for tag in ("script", "style"):
                (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
                assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_what_the_page_asks_for_is_served_as_it_reads_it(server, engine):
    """The body that `request()` makes, and the fields that `take()` reads."""
    body = {
        "text": "The router",
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_routed_experts": True,
        "routed_experts_stream": True,
        "routed_experts_layers": "moe",
        "sampling_params": {"max_new_tokens": 6, "temperature": 0.7, "seed": 1, "ignore_eos": True},
    }
    events = stream(server, "/generate", body)
    whole = engine.generate("The router", {**body["sampling_params"]}, return_routed_experts=True)
    rows = {}
    for said in events:
        meta = said["meta_info"]
        info, raw = meta["routed_experts_info"], base64.b64decode(meta["routed_experts"])
        ids = np.frombuffer(raw, "<i4").reshape(info["shape"])
        rows.update({info["start"] + place: row for place, row in enumerate(ids)})
    prompt, generated = events[0]["meta_info"]["input_token_logprobs"], events[-1]["meta_info"]["output_token_logprobs"]
    texts = [one[2] for one in (*prompt, *generated)]
    assert "".join(texts).startswith("The router") and len(texts) == len(rows) + 1
    assert np.array_equal(np.stack([rows[place] for place in sorted(rows)]), record_from_meta_info(whole).ids)
    assert server.client.get("/health").json().keys() >= {"state", "running", "waiting"}
