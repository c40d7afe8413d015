"""Oracle of routed_experts.parsing: the same rules on the whole text at once, with regular expressions and json."""

import json
import re
from dataclasses import dataclass, field

STRING = r'"(?:[^"\\]|\\.)*"'
JSON_PARTS = re.compile(STRING + r'|"(?:[^"\\]|\\.)*\\?\Z|[\[\]{}<]', re.DOTALL)
NAME = r'[^\n<>{}"]{1,256}'


@dataclass
class Response:
    reasoning: str = ""
    content: str = ""
    calls: list = field(default_factory=list)  # [name, arguments]


class Pieces:
    """Content and calls in order; whitespace beside a call is dropped at the end."""

    def __init__(self):
        self.items = []

    def text(self, text):
        if self.items and isinstance(self.items[-1], str):
            self.items[-1] += text
        else:
            self.items.append(text)

    def call(self, name, arguments):
        self.items.append([name, arguments])

    @property
    def has_calls(self):
        return any(isinstance(item, list) for item in self.items)

    def response(self):
        response, items = Response(), self.items
        for index, item in enumerate(items):
            if isinstance(item, list):
                response.calls.append(item)
                continue
            if index and isinstance(items[index - 1], list):
                item = item.lstrip()
            if index + 1 < len(items) and isinstance(items[index + 1], list):
                item = item.rstrip()
            response.content += item
        return response


def skip(text, at):
    return at + len(text[at:]) - len(text[at:].lstrip())


def value_end(text, at):
    """The end of the JSON value at `at`, and whether it is whole."""
    if text[at] == '"':
        match = re.compile(STRING, re.DOTALL).match(text, at)
        return (match.end(), True) if match else (len(text), False)
    if text[at] not in "{[":
        end = re.compile(r'[^\s,}\]<:"]*').match(text, at).end()
        return end, end < len(text)
    depth = 0
    for match in JSON_PARTS.finditer(text, at):
        token = match[0]
        if token == "<":
            return match.start(), False
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token, 0)
        if depth == 0 and token in "}]":
            return match.end(), True
    return len(text), False


def arguments(raw, is_whole):
    if not is_whole or raw[:1] not in ('"', "n"):
        return raw if is_whole or raw[:1] != '"' else ""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return raw
    return "{}" if value is None else value


def json_member(text, at):
    """(key, value, where it ends, whether it is whole) of the member at `at`; key None if there is none."""
    key = re.compile(STRING, re.DOTALL).match(text, at)
    if not key:  # a string without an end is read to the end
        return None, "", (len(text) if text[at : at + 1] == '"' else at), False
    at = skip(text, key.end())
    if text[at : at + 1] != ":":
        return None, "", at, False
    at = skip(text, at + 1)
    if at == len(text) or text[at] in ",:}]<":
        return None, "", at, False
    end, is_whole = value_end(text, at)
    return decoded(key[0]) or "", text[at:end], end, is_whole


def decoded(string):
    try:
        return json.loads(string, strict=False) if string.startswith('"') else None
    except ValueError:
        return None


def json_object(text, at):
    """(call or None, where it ends) of the object at `at`, which is after the marker."""
    at = skip(text, at)
    if text[at : at + 1] != "{":
        return None, at
    name = raw = call = None
    at = skip(text, at + 1)
    while text[at : at + 1] != "}":
        key, value, end, is_whole = json_member(text, at)
        if key in ("arguments", "parameters") and raw is None:
            raw = arguments(value, is_whole)
            call = None if name is None else [name, raw]
        elif is_whole and key == "name" and name is None:
            name = decoded(value)
            if not name or len(name) > 256:
                return None, end
            call = None if raw is None else [name, raw]
        at = skip(text, end) if is_whole else end
        if not is_whole or text[at : at + 1] not in (",", "}"):
            return call, at
        at = skip(text, at + (text[at] == ","))
    return call or (None if name is None else [name, "{}"]), at + 1


def without_cut(text, markers):
    """The text without the beginning of one of the markers at its end."""
    cuts = [size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size])]
    return text[: len(text) - max(cuts, default=0)]


def no_call(pieces, text, start, at, *expected):
    """Add the text from `start` to `at`, which is no call; returns where it ends. Behind a call it is left out if the
    whole text ends there, or with the beginning of a marker."""
    if pieces.has_calls and is_cut(text, at, "", *expected):
        return len(text)
    pieces.text(text[start:at])
    return at


def last_text(pieces, text, markers):
    """The text behind the last marker: behind a call without the beginning of another."""
    return without_cut(text, markers) if pieces.has_calls else text


def parse_json(text, tools):
    pieces, at, closes = Pieces(), 0, False
    while match := re.compile(r"<tool_call>|</tool_call>" if closes else r"<tool_call>").search(text, at):
        pieces.text(text[at : match.start()])
        at = match.end()
        if match[0] == "</tool_call>":
            closes = False
            continue
        call, end = json_object(text, at)
        if call is None:
            end = no_call(pieces, text, match.start(), end)
        else:
            pieces.call(*call)
            closes = True
        at = end
    pieces.text(last_text(pieces, text[at:], ("<tool_call>", *(("</tool_call>",) if closes else ()))))
    return pieces.response()


def typed(text, schema):
    """The JSON of a value with the type of its schema."""
    kinds = {"integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list, "null": type(None)}
    allowed = None
    if schema is not None:
        allowed = schema.get("type") or [choice["type"] for choice in schema.get("anyOf", [])] or None
        allowed = [allowed] if isinstance(allowed, str) else allowed
    plain = text.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    if allowed == ["string"]:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(plain)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if re.search(r"\b(NaN|Infinity)\b", re.sub(STRING, "", plain)) or value == float("inf"):
        return json.dumps(text, ensure_ascii=False)  # Python reads them, JSON does not have them
    if allowed is None:
        return plain
    for kind in allowed:
        if kind in kinds and isinstance(value, kinds[kind]) and (kind == "boolean") == isinstance(value, bool):
            return plain
        if kind == "string" and isinstance(value, str):
            return plain
    return json.dumps(text, ensure_ascii=False)


def property_schema(tools, name, key):
    return (tools.get(name) or {}).get("properties", {}).get(key)


def tagged_value(text, at, end_marker, schema, has_lines):
    """(JSON, where it ends, whether it is whole)."""
    end = text.find(end_marker, at)
    is_whole = end >= 0
    value = text[at : end if is_whole else len(text)]
    value = value if is_whole else without_cut(value, (end_marker, "\n" + end_marker) if has_lines else (end_marker,))
    is_string = schema is not None and schema.get("type") == "string"
    if has_lines:
        value = value[1:] if value.startswith("\n") else value
        value = value[:-1] if is_whole and value.endswith("\n") else value
    if is_whole:
        return typed(value, schema), end + len(end_marker), True
    if is_string:
        return '"' + json.dumps(value, ensure_ascii=False)[1:-1], len(text), False
    return "", len(text), False


def is_cut(text, at, *markers):
    """Whether the text ends at `at`, or with the beginning of a marker."""
    return any(marker.startswith(text[at:]) for marker in markers)


def parse_xml(text, tools):
    pieces, at, ends = Pieces(), 0, ()
    while match := re.compile("|".join(map(re.escape, ("<tool_call>", "<function=", *ends)))).search(text, at):
        pieces.text(text[at : match.start()])
        at = match.end()
        if match[0] in ends:
            ends = () if match[0] == "</tool_call>" else ("</tool_call>",)
            continue
        if match[0] == "<tool_call>":
            at = skip(text, at)
            if not text.startswith("<function=", at):
                at = no_call(pieces, text, match.start(), at, "<function=")
                continue
            at += len("<function=")
        head = re.compile(rf"({NAME})>").match(text, at)
        if not head or not head[1].strip():
            at = re.compile(r'[^\n<>{}"]{0,256}').match(text, at).end()
            at = no_call(pieces, text, match.start(), at)
            continue
        name, at = head[1].strip(), head.end()
        members, closing, ends, rest = [], "", ("</tool_call>", "</function>"), ""
        while True:
            at = skip(text, at)
            if text.startswith("</function>", at):
                at, closing, ends = at + len("</function>"), "}", ("</tool_call>",)
                break
            if not text.startswith("<parameter=", at):
                at, closing = (len(text), "") if is_cut(text, at, "<parameter=", "</function>") else (at, "}")
                break
            start, at = at, at + len("<parameter=")
            key = re.compile(rf"({NAME})>").match(text, at)
            if not key or not key[1].strip():
                at = re.compile(r'[^\n<>{}"]{0,256}').match(text, at).end()
                closing, rest = ("", "") if at == len(text) else ("}", text[start:at])
                break
            at, label = key.end(), key[1].strip()
            value, at, is_whole = tagged_value(text, at, "</parameter>", property_schema(tools, name, label), True)
            members.append(json.dumps(label, ensure_ascii=False) + ": " + value)
            if not is_whole:
                break
        joined = "{" + ", ".join(members) if members or closing else ""
        pieces.call(name, joined + closing)
        pieces.text(rest)
    pieces.text(last_text(pieces, text[at:], ("<tool_call>", "<function=", *ends)))
    return pieces.response()


def parse_glm(text, tools):
    pieces, at, closes = Pieces(), 0, False
    while match := re.compile(r"<tool_call>|</tool_call>" if closes else r"<tool_call>").search(text, at):
        pieces.text(text[at : match.start()])
        at = match.end()
        if match[0] == "</tool_call>":
            closes = False
            continue
        at = skip(text, at)
        head = re.compile(r'[^\n<>{}"]{0,256}').match(text, at)
        name, at = head[0].strip(), head.end()
        follows, expected = None, ()
        if name and text[at : at + 1] in ("\n", "<"):
            at = skip(text, at)
            expected = ("<arg_key>", "</tool_call>")
            follows = re.compile("|".join(expected)).match(text, at)
        if not follows:
            at = no_call(pieces, text, match.start(), at, *expected)
            continue
        members, closing, closes = [], "", True
        while True:
            at = skip(text, at) if members else at
            if text.startswith("</tool_call>", at):
                at, closing, closes = at + len("</tool_call>"), "}", False
                break
            if not text.startswith("<arg_key>", at):
                at, closing = (len(text), "") if is_cut(text, at, "<arg_key>", "</tool_call>") else (at, "}")
                break
            key = re.compile(r"<arg_key>(.*?)</arg_key>\s*", re.DOTALL).match(text, at)
            if not key:
                at = len(text)
                break
            at, label = key.end(), key[1].strip()
            if not text.startswith("<arg_value>", at):
                at, closing = (len(text), "") if is_cut(text, at, "<arg_value>") else (at, "}")
                break
            at += len("<arg_value>")
            value, at, is_whole = tagged_value(text, at, "</arg_value>", property_schema(tools, name, label), False)
            members.append(json.dumps(label, ensure_ascii=False) + ": " + value)
            if not is_whole:
                break
        joined = "{" + ", ".join(members) if members or closing else ""
        pieces.call(name, joined + closing)
    pieces.text(last_text(pieces, text[at:], ("<tool_call>", *(("</tool_call>",) if closes else ()))))
    return pieces.response()


def parse_deepseek(text, tools, *, has_kind):
    begin, end, call_begin = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"
    call_end, separator = "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    pieces, at, stray = Pieces(), 0, ()
    while match := re.compile("|".join((begin, end, call_begin, *stray))).search(text, at):
        pieces.text(text[at : match.start()])
        at, stray = match.end(), ()
        if match[0] != call_begin:
            continue
        first = re.compile(r'[^\n<>{}"]{0,256}').match(text, at)
        at, name, missing = first.end(), None, ""
        if first[0].strip() and text[at : at + 1] == "<":
            missing = separator
        if missing and text.startswith(separator, at):
            at += len(separator)
            name = first[0].strip()
            if has_kind:
                second = re.compile(r'[^\n<>{}"`]{0,256}').match(text, at)
                at, name = second.end(), second[0].strip()
                name = None if text[at : at + 1] not in ("\n", "`", "{", "<") else name or None
                missing = ""
        at = skip(text, at)
        fence = "```json" if name is not None and has_kind else ""
        if fence and text.startswith(fence, at):
            at = skip(text, at + 7)
        if name is None or is_cut(text, at, fence):
            at = no_call(pieces, text, match.start(), at, missing, fence)
            continue
        if text[at] == "<":
            raw, is_whole = "{}", True
        else:
            stop, is_whole = value_end(text, at)
            raw, at = arguments(text[at:stop], is_whole), stop
        pieces.call(name, raw)
        at = skip(text, at)
        if is_whole and has_kind and text.startswith("```", at):
            at = skip(text, at + 3)
        elif is_whole and has_kind and is_cut(text, at, "```"):
            at = len(text)
        if text.startswith(call_end, at):
            at += len(call_end)
        else:
            stray = (call_end,)
    pieces.text(last_text(pieces, text[at:], (begin, end, call_begin, *stray)))
    return pieces.response()


def parse_deepseek_v3(text, tools):
    return parse_deepseek(text, tools, has_kind=True)


def parse_deepseek_v31(text, tools):
    return parse_deepseek(text, tools, has_kind=False)


CALLS = {
    "json": parse_json,
    "xml": parse_xml,
    "glm": parse_glm,
    "deepseek-v3": parse_deepseek_v3,
    "deepseek-v31": parse_deepseek_v31,
}


def parse_think(text, tools, calls, *, is_open):
    """Reasoning, and what `calls` (a format, or None) makes of the rest."""
    opener = {"deepseek-v3": "<｜tool▁calls▁begin｜>", "deepseek-v31": "<｜tool▁calls▁begin｜>"}.get(
        calls, "<tool_call>"
    )
    reasoning, content = "", text
    started = re.match(r"\s*<think>", text)
    if started or is_open:
        body = text[started.end() if started else 0 :]
        ends = "</think>" if calls is None else f"</think>|{opener}"
        end = re.search(ends, body)
        reasoning = (body[: end.start()] if end else without_cut(body, ends.split("|"))).strip()
        content = "" if not end else body[end.end() :].lstrip() if end[0] == "</think>" else body[end.start() :]
    response = Response(content=content) if calls is None else CALLS[calls](content, tools)
    response.reasoning = reasoning
    return response


def parse_harmony(text, *, prompt="", with_calls=True, with_reasoning=True):
    """Messages of GPT-OSS."""
    tail = prompt.rpartition("<|start|>")[2] if "<|start|>" in prompt else None
    if tail is not None and not re.search(r"<\|(end|call|return)\|>", tail):
        has_header = "<|message|>" in tail or text.startswith(("<|channel|>", "<|start|>", "<|message|>", " to="))
        whole = (tail if has_header else "<|message|>") + text
    else:
        has_header = text.startswith(("<|channel|>", "<|start|>", "<|message|>", " to="))
        whole = ("" if has_header else "<|message|>") + text
    prompt_text = ""
    if tail is not None and "<|message|>" in tail and whole.startswith(tail):
        prompt_text = tail.partition("<|message|>")[2]
    reasoning, content, calls = [], [], []
    for index, match in enumerate(
        re.finditer(
            r"(?s)(.*?)<\|message\|>(.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|<\|channel\|>|\Z)", whole
        )
    ):
        header, body = match[1], match[2]
        body = body[len(prompt_text) :] if index == 0 else body
        recipient = re.search(r"to=([^\s<]+)", header)
        channels = re.findall(r"<\|channel\|>\s*([^\s<]+)", header)
        if recipient and with_calls:
            calls.append([recipient[1].removeprefix("functions."), body.lstrip() or "{}"])
        elif not recipient and channels[-1:] == ["analysis"] and with_reasoning:
            reasoning.append(body)
        else:
            content.append(body)
    return Response("\n".join(filter(None, reasoning)), "\n".join(filter(None, content)), calls)
