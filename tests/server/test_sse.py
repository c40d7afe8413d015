"""EventStream: what it sends, and that no error on the way is lost."""

import asyncio
import json

import pytest

from routed_experts.server import sse
from routed_experts.server.errors import ClientGone
from routed_experts.server.sse import DONE, EventStream, event


def send_all(chunks, *, fail_on=None, hold=False):
    """The messages of a stream of these chunks; `fail_on`: sending bytes with this prefix raises; `hold`: the last
    chunk waits for that event."""
    sent = []

    async def run():
        failed = asyncio.Event()

        async def events():
            for chunk in chunks[:-1] if hold else chunks:
                yield chunk
            if hold:
                await failed.wait()
                yield chunks[-1]

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            if fail_on is not None and message.get("body", b"").startswith(fail_on):
                failed.set()
                raise OSError("the wire broke")
            sent.append(message)

        stream = EventStream(events(), on_close=lambda: None, on_timeout=lambda: None, timeout_s=20, headers={})
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 20)

    asyncio.run(run())
    return [(message["body"], message["more_body"]) for message in sent[1:]]


@pytest.mark.parametrize("text", ["a\x85b", "\u2028\u2029", "é\u2028\x85\x1c\x0b\n\r日"])
def test_a_text_is_one_line_also_by_the_rules_of_unicode(text):
    line, *rest = event({"text": text}).decode().splitlines()
    assert rest == [""] and json.loads(line.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("together", [False, True])
def test_the_last_words_are_one_message(together):
    chunks = [event({"a": 1}), event({"a": 2})]
    if together:
        assert send_all([chunks[0], chunks[1] + DONE]) == [(chunks[0], True), (chunks[1] + DONE, False)]
    else:
        assert send_all(chunks) == [(chunks[0], True), (chunks[1], True), (DONE, False)]


def test_an_error_of_a_comment_is_sent(monkeypatch, caplog):
    monkeypatch.setattr(sse, "SSE_COMMENT_S", 0.0)
    (first, _), (error, _), last = send_all([event({"a": 1}), event({"a": 2})], fail_on=b": waiting", hold=True)[-3:]
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] and last == (DONE, False)
    assert first == event({"a": 2}) and "the wire broke" in caplog.text


def test_a_client_that_leaves_is_noticed_while_a_backlog_is_sent():
    """Neither the events nor their sending ever wait, as with a queue that is full and a connection that is gone."""
    sent = []

    async def run():
        has_left = asyncio.Event()

        async def events():
            for number in range(1000):
                yield event({"number": number})

        async def receive():
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            has_left.set()

        stream = EventStream(events(), on_close=lambda: None, on_timeout=lambda: None, timeout_s=20, headers={})
        with pytest.raises(ClientGone):
            await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert len(sent) < 100
