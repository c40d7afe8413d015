"""The playground at /: what it may load, how it treats text of a model, and that the server answers its requests.
No browser runs here; scripts/compat_clients/page_browser.mjs drives one."""

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


SCRIPT = re.search(r"<script>(.*?)</script>", HTML, re.DOTALL)[1]
STYLE = re.search(r"<style>(.*?)</style>", HTML, re.DOTALL)[1]


class Elements(HTMLParser):
    """Collects what loads or runs something, and tags, ids and form fields without a label."""

    def __init__(self):
        super().__init__()
        self.loads, self.handlers, self.tags, self.ids, self.stored_fields, self.unlabelled = [], [], [], [], [], []
        self._open_labels = 0

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open_labels += tag == "label"
        names = dict(attributes)
        if tag in ("input", "textarea", "select") and not self._open_labels and "aria-label" not in names:
            self.unlabelled.append(names)
        if "data-keep" in names:
            self.stored_fields.append(names.get("id", names.get("name")))
        for name, value in attributes:
            if name in ("src", "href", "action", "data", "poster", "srcset"):
                self.loads.append((tag, value))
            if name.startswith("on") or name == "style":
                self.handlers.append((tag, name))
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        self._open_labels -= tag == "label"


@pytest.fixture(scope="module")
def page():
    elements = Elements()
    elements.feed(HTML)
    return elements


def test_nothing_is_loaded_from_anywhere(page):
    assert page.loads == [] and page.handlers == []
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", HTML.replace("${origin}", ""))
    assert not {"iframe", "object", "embed", "link", "base", "form", "img"} & set(page.tags)
    assert len(HTML.encode()) < 60_000


def test_text_is_never_markup():
    ways = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( createContextualFragment setAttribute"
    assert [way for way in ways.split() if way in SCRIPT] == []
    urls = set(re.findall(r'(?:fetch|post)\("([^"]+)"', SCRIPT))
    assert urls == {"/v1/models", "/health", "/generate", "/tokenize", "/tokenizer_info"}


def test_every_element_that_the_script_names_is_there(page):
    assert set(re.findall(r'\$\("(\w+)"\)', HTML)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    names = set(re.findall(r'picked\("(\w+)"\)', SCRIPT))
    assert names and names == set(re.findall(r'<input type="radio" name="(\w+)"', HTML))


def test_every_field_has_a_label_and_every_state_a_voice(page):
    assert page.unlabelled == []
    assert HTML.count('role="status"') >= 2 and HTML.count('role="alert"') >= 2
    assert {"main", "header", "h1", "aside", "template"} <= set(page.tags)
    for key in ("Enter", "Escape", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"):
        assert re.search(rf"\b{key}\b", SCRIPT), key


def test_both_themes_and_still_pictures_are_offered():
    assert "color-scheme: light dark" in STYLE and "prefers-color-scheme: dark" in SCRIPT
    motion = STYLE[STYLE.index("@media (prefers-reduced-motion: no-preference)") :]
    assert "animation" in motion and "animation" not in STYLE.removesuffix(motion)


def test_a_key_is_never_stored(page):
    assert {"prompt", "prompt2", "tokens", "temperature", "topp", "seed", "seed2", "compare", "mode"} <= set(
        page.stored_fields
    )
    assert "key" not in page.stored_fields
    assert len(re.findall("sessionStorage|localStorage", SCRIPT)) == 4  # form and theme: read, written
    assert not re.search(r"(?:session|local)Storage\.", SCRIPT.replace("window[area]", ""))


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
                (source,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
                assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_requests_of_the_page_are_served_as_it_reads_them(server, engine):
    """The bodies that `stream()` sends, and the fields that `Run.add()` reads."""
    messages = [{"role": "user", "content": "The router"}]
    chat = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    sampling = {"max_new_tokens": 6, "temperature": 0.7, "top_p": 0.9, "seed": 1, "ignore_eos": True}
    for prompt in ({"text": "The router"}, {"input_ids": chat}):
        body = {
            **prompt,
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
            "routed_experts_stream": True,
            "routed_experts_layers": "moe",
            "sampling_params": sampling,
        }
        events = stream(server, "/generate", body)
        expected = engine.generate(
            prompt.get("text"), sampling, input_ids=prompt.get("input_ids"), return_routed_experts=True
        )
        rows = {}
        for data in events:
            meta = data["meta_info"]
            layout, payload = meta["routed_experts_info"], base64.b64decode(meta["routed_experts"])
            ids = np.frombuffer(payload, "<i4").reshape(layout["shape"])
            rows.update({layout["start"] + index: row for index, row in enumerate(ids)})
        first, last = events[0]["meta_info"], events[-1]["meta_info"]
        assert last["finish_reason"]["type"] == "length" and first["prompt_tokens"] == len(
            first["input_token_logprobs"]
        )
        tokens = [*first["input_token_logprobs"], *last["output_token_logprobs"]]
        assert all(isinstance(token_id, int) and isinstance(text, str) for _, token_id, text in tokens)
        assert len(tokens) == len(rows) + 1
        if "text" in prompt:
            assert "".join(text for _, _, text in tokens).startswith("The router")
        assert np.array_equal(np.stack([rows[index] for index in sorted(rows)]), record_from_meta_info(expected).ids)
    assert server.client.get("/health").json().keys() >= {"state", "phase", "running", "waiting"}
    assert server.client.get("/tokenizer_info").json()["chat_template"]
    refused = server.client.post("/generate", json={"text": "The router", "sampling_params": {"top_p": 7}}).json()
    assert refused["error"]["param"] == "top_p" and "7" in refused["error"]["message"]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_code_of_the_page_gives_the_rows_of_its_run(server, route):
    """The fields of `codeRequest()`, with which curl and the OpenAI client repeat a run."""
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
    messages = [{"role": "user", "content": "The router"}]
    routing = {"return_routed_experts": True, "routed_experts_format": "int32"}
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    chat = route == "chat/completions"
    prompt = {"messages": messages} if chat else {"prompt": "The router"}
    body = {"model": model, **prompt, "max_tokens": 6, **sampling, **routing}
    meta = server.client.post(f"/v1/{route}", json=body).json()["choices"][0]["meta_info"]
    ids = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"] if chat else None
    run = {"input_ids": ids} if chat else {"text": "The router"}
    run |= {"sampling_params": {**sampling, "max_new_tokens": 6}, **routing}
    expected = server.client.post("/generate", json=run).json()["meta_info"]
    assert meta["routed_experts"] == expected["routed_experts"]
    assert meta["routed_experts_info"]["shape"] == expected["routed_experts_info"]["shape"]
