"""Parsers of responses: deltas joined over random splits equal the oracle's reading of the whole text."""

import json
import random

import pytest

from oracles import responses as oracle
from routed_experts.core.errors import ConfigError
from routed_experts.parsing import (
    CallDelta,
    ContentDelta,
    ReasoningDelta,
    ResponseFormat,
    create_forced_parser,
    create_parser,
    detect_format,
    resolve_format,
)
from routed_experts.parsing.json_values import decode_string, property_types

NUM_SPLITS = 600
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "metric": {"type": "boolean"},
            "where": {"type": "object"},
            "tags": {"type": ["array", "null"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {},
}
FORMATS = ("json", "xml", "glm", "deepseek-v3", "deepseek-v31")
WORDS = ("Let me look. ", "Fine:\n\n", "a < b", "😀 Wetter in Köln ", "  ", "\n", "x", "<", "</", "```", "{", '"')
MARKERS = {
    "json": ("<tool_call>", "</tool_call>", "\n<tool_call>\n", "\n</tool_call>"),
    "xml": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "city"),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "now", "\n"),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "function",
        "```json\n",
        "now\n",
    ),
}
MARKERS["deepseek-v31"] = MARKERS["deepseek-v3"]
VALUES = (
    "Köln",
    "{not json}",
    'a "quoted" \\ word',
    "</tool",
    "line 1\nline 2\n",
    "\n",
    "",
    "3",
    "null",
    "true",
    "False",
    "1e999",
    "NaN",
    '{"a": [1, {"b": "}]<"}]}',
    "[1, 2]",
    "[NaN]",
    "2.5",
    '"text"',
    "<b>bold</b>",
    "😀",
)
JSON_VALUES = (
    '{"city": "Köln"}',
    '{"city": "a } ] { \\" </tool_call> \\\\", "days": 3}',
    "{}",
    "null",
    '"{\\"city\\": \\"Rome\\"}"',
    '"bad \\x escape"',
    "[1, 2]",
    "17",
    '{"where": {"lat": 1.5, "deep": [[{"x": "\\u00e4"}]]}}',
    "{\"city\": 'single'}",
    '{"city": "cut',
    '{"city": ["a", <',
    '{ "city" : "😀" , "tags" : [ ] }',
    "nul",
)


def render_call(kind, rng):
    """A call in the format, mostly well formed."""
    name = rng.choice(("get_weather", "write_file", "now", "unknown_tool", "", "bad\nname", "with space", "n" * 300))
    if kind in ("json", "deepseek-v3", "deepseek-v31"):
        value = rng.choice(JSON_VALUES)
        if kind == "deepseek-v3":
            fence = rng.choice(("\n```json\n", "```json", "\n", "\n```\n"))
            end = rng.choice(("\n```", "```", "", " x"))
            body = f"function<｜tool▁sep｜>{name}{fence}{value}{end}"
            return "<｜tool▁call▁begin｜>" + body + rng.choice(("<｜tool▁call▁end｜>", "", "\n<｜tool▁call▁end｜>"))
        if kind == "deepseek-v31":
            value = rng.choice((value, value, ""))
            return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{value}" + rng.choice(("<｜tool▁call▁end｜>", "", " "))
        members = [f'"name": {json.dumps(name)}', f'"{rng.choice(("arguments", "parameters"))}": {value}']
        members += [
            rng.choice(('"id": "call_1"', '"extra": {"a": [1]}', '"x" 1', "nonsense", '"name": 3', '"y": <'))
        ] * (rng.random() < 0.3)
        if rng.random() < 0.3:
            rng.shuffle(members)
        if rng.random() < 0.1:
            members = members[:1]
        space = rng.choice(("", "\n", " "))
        end = rng.choice(("}", "}", "}", "", "}}"))
        return f"<tool_call>{space}{{{', '.join(members)}{end}{space}" + rng.choice(
            ("</tool_call>", "</tool_call>", "")
        )
    keys = [
        rng.choice((*TOOLS["get_weather"]["properties"], "text", "other", "with space", 'q"'))
        for _ in range(rng.randrange(4))
    ]
    if kind == "glm":
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{rng.choice(VALUES)}</arg_value>\n" for key in keys]
        if pairs and rng.random() < 0.1:
            pairs[-1] = pairs[-1].replace(rng.choice(("</arg_key>", "<arg_value>", "</arg_value>")), "")
        return f"<tool_call>{name}{rng.choice(chr(10) + ' ')}{''.join(pairs)}" + rng.choice(
            ("</tool_call>", "</tool_call>", "", "x")
        )
    pairs = [f"<parameter={key}>\n{rng.choice(VALUES)}\n</parameter>\n" for key in keys]
    if pairs and rng.random() < 0.1:
        pairs[-1] = pairs[-1].replace(rng.choice((">", "</parameter>", "\n")), "")
    begin, end = rng.choice(
        (
            ("<tool_call>\n", "</function>\n</tool_call>"),
            ("", "</function>"),
            ("<tool_call>", ""),
            ("<tool_call>x", "y</function>"),
        )
    )
    return f"{begin}<function={name}>\n{''.join(pairs)}{end}"


def random_text(kind, rng):
    parts = [
        render_call(kind, rng) if rng.random() < 0.6 else rng.choice((*WORDS, *WORDS, *MARKERS[kind]))
        for _ in range(rng.randrange(1, 6))
    ]
    if kind.startswith("deepseek") and rng.random() < 0.7:
        parts = ["<｜tool▁calls▁begin｜>", *parts, "<｜tool▁calls▁end｜>"]
    text = "".join(parts)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


def split(text, rng):
    """The text in pieces: at any places, by the character, or whole."""
    if rng.random() < 0.3:
        return list(text)
    cuts = sorted(rng.sample(range(1, max(len(text), 2)), min(rng.randrange(12), max(len(text) - 1, 0))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(parser, pieces, *, is_cut=False):
    """The response of a parser, and all its deltas; each call starts with its name, in order."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(is_cut=is_cut)
    response = oracle.Response()
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text
                response.content += text
            case ReasoningDelta(text):
                assert text
                response.reasoning += text
            case CallDelta(index, name, arguments):
                if name is not None:
                    assert index == len(response.calls)
                    response.calls.append([name, ""])
                else:
                    assert arguments and index == len(response.calls) - 1
                response.calls[index][1] += arguments
    assert parser.num_calls == len(response.calls)
    return response


@pytest.mark.parametrize("kind", FORMATS)
def test_deltas_of_any_split_join_to_what_the_oracle_reads(kind):
    rng = random.Random(kind)
    num_calls = num_texts = 0
    for _ in range(NUM_SPLITS):
        text = random_text(kind, rng)
        pieces = split(text, rng)
        expected = oracle.CALLS[kind](text, TOOLS)
        response = read(create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS), pieces, is_cut=True)
        assert response == expected, (text, pieces)
        num_calls += len(expected.calls)
        num_texts += bool(expected.content)
    assert num_calls > NUM_SPLITS / 2 and num_texts > NUM_SPLITS / 4, (num_calls, num_texts)


@pytest.mark.parametrize("calls", [None, "json", "deepseek-v31"])
def test_reasoning_of_any_split_is_what_the_oracle_reads(calls):
    rng = random.Random(f"think {calls}")
    num_reasoning = 0
    for _ in range(NUM_SPLITS):
        text = random_text(calls or "json", rng)
        head = rng.choice(("<think>\nI think. ", "<think>", "", " \n<think>", "a <think>", "Hm, so\n"))
        text = (
            head
            + rng.choice(("deep </thin thought", "\n\n", "x"))
            + rng.choice(("</think>\n\n", "</think>", "", "</thi"))
            + text
        )
        text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text
        prompt = rng.choice(("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n"))
        expected = oracle.parse_think(text, TOOLS, calls, is_open=prompt.endswith("<think>\n"))
        parser = create_parser(ResponseFormat(tool_calls=calls, reasoning="think"), prompt=prompt, tools=TOOLS)
        assert read(parser, split(text, rng), is_cut=True) == expected, (prompt, text)
        num_reasoning += bool(expected.reasoning)
    assert num_reasoning > NUM_SPLITS / 4, num_reasoning


@pytest.mark.parametrize("with_calls", [True, False])
@pytest.mark.parametrize("with_reasoning", [True, False])
def test_messages_of_harmony_of_any_split_are_what_the_oracle_reads(with_calls, with_reasoning):
    rng = random.Random(f"harmony {with_calls} {with_reasoning}")
    headers = (
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        " to=functions.now<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=browser.search code<|message|>",
        "<|channel|>odd<|message|>",
        "<|channel|>",
        "no header",
        "",
    )
    bodies = ('{"city": "Köln <|x|> }"}', "  ", "", "Let me see.\n", "a <| b |> c", "😀", "<|mess")
    ends = ("<|end|>", "<|call|>", "<|return|>", "<|end|>\n", "")
    kinds = [0, 0, 0]
    for _ in range(NUM_SPLITS):
        messages = [
            "<|start|>assistant" + rng.choice(headers) + rng.choice(bodies) + rng.choice(ends)
            for _ in range(rng.randrange(1, 5))
        ]
        text = "".join(messages)
        prompt = rng.choice(
            (
                "<|start|>user<|message|>hi<|end|><|start|>assistant",
                "<|start|>user<|message|>hi<|end|>",
                "",
                "<|start|>assistant<|channel|>final<|message|>So ",
            )
        )
        text = text.removeprefix("<|start|>assistant") if prompt.endswith(("assistant", "So ")) else text
        text = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text
        expected = oracle.parse_harmony(text, prompt=prompt, with_calls=with_calls, with_reasoning=with_reasoning)
        harmony = ResponseFormat(tool_calls="harmony", reasoning="harmony" if with_reasoning else None)
        parser = create_parser(harmony, prompt=prompt, tools=TOOLS if with_calls else None)
        assert read(parser, split(text, rng)) == expected, (prompt, text)
        kinds = [kinds[0] + bool(expected.reasoning), kinds[1] + bool(expected.content), kinds[2] + len(expected.calls)]
    assert kinds[1] > NUM_SPLITS / 10 and (kinds[2] > NUM_SPLITS / 4) == with_calls, kinds
    assert (kinds[0] > NUM_SPLITS / 10) == with_reasoning, kinds


EXAMPLES = {
    "json": """Sure.
<tool_call>
{"name": "now", "arguments": {"a": "}{"}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>""",
    "xml": """Sure.
<tool_call>
<function=now>
<parameter=a>
}{
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>""",
    "glm": """Sure.
<tool_call>now
<arg_key>a</arg_key>
<arg_value>}{</arg_value>
</tool_call>
<tool_call>now
</tool_call>""",
    "deepseek-v3": """Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{"a": "}{"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek-v31": "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>"
    '{"a": "}{"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Sure.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": "}{"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_calls_as_the_model_cards_write_them(kind):
    reasoning = "harmony" if kind == "harmony" else None
    parser = create_parser(ResponseFormat(tool_calls=kind, reasoning=reasoning), prompt="<|start|>assistant", tools={})
    response = read(parser, list(EXAMPLES[kind]))
    assert response.content == "Sure." and response.reasoning == ("Hm." if reasoning else "")
    assert [name for name, _ in response.calls] == ["now", "now"]
    assert [json.loads(arguments) for _, arguments in response.calls] == [{"a": "}{"}, {}]


@pytest.mark.parametrize(
    ("kind", "head", "rest"),
    [
        (
            "xml",
            "<tool_call>\n<function=now>",
            "\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>",
        ),
        (
            "glm",
            "<tool_call>now\n<arg_key>",
            "a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ),
    ],
)
def test_a_call_that_is_cut_at_any_place_has_the_arguments_so_far_and_no_content(kind, head, rest):
    whole, seen = '{"a": 1, "b": 2}', []
    for cut in range(len(rest) + 1):
        text = head + rest[:cut]
        for pieces in ([text], list(text)):
            response = read(create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS), pieces)
            ((name, arguments),) = response.calls
            assert (response.content, name) == ("", "now"), text
            seen += [arguments] if arguments not in seen else []
            assert (arguments == whole) == (cut == len(rest)), text
    assert seen == ["", '{"a": ', '{"a": 1', '{"a": 1, "b": ', '{"a": 1, "b": 2', whole]


def test_arguments_are_passed_on_before_they_are_complete():
    for kind, head in (
        ("json", '<tool_call>{"name": "write_file", "arguments": {"text": "'),
        ("xml", "<function=write_file><parameter=text>\n"),
        ("glm", "<tool_call>write_file\n<arg_key>text</arg_key><arg_value>"),
        ("deepseek-v31", '<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{"text": "'),
        ("harmony", '<|channel|>commentary to=functions.write_file<|message|>{"text": "'),
    ):
        parser = create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS)
        (start,) = parser.feed(head)
        assert start.name == "write_file", kind
        assert parser.feed("first line,") == [CallDelta(0, None, "first line,")], kind


def test_calls_beyond_the_limit_are_left_out():
    parser = create_parser(ResponseFormat(tool_calls="json"), prompt="", tools={}, max_calls=1)
    assert read(parser, [EXAMPLES["json"] + " Bye."]) == oracle.Response("", "Sure.Bye.", [["now", '{"a": "}{"}']])


def test_without_parsers_there_is_none_and_text_keeps_its_markers():
    assert create_parser(ResponseFormat(), prompt="", tools=TOOLS) is None
    assert create_parser(ResponseFormat(tool_calls="json"), prompt="", tools=None) is None
    parser = create_parser(ResponseFormat(tool_calls="json", reasoning="think"), prompt="", tools=None)
    assert read(parser, ["<think>a</think> ", EXAMPLES["json"]]) == oracle.Response("a", EXAMPLES["json"])


@pytest.mark.parametrize("calls", ["harmony", None])
def test_headers_of_harmony_are_no_content_where_nothing_is_separated(calls):
    headless = ResponseFormat(tool_calls=calls, reasoning="harmony").without_reasoning()
    assert headless.reasoning is None and headless.markers == ResponseFormat(reasoning="harmony").markers
    parser = create_parser(headless, prompt="<|start|>assistant", tools=None)
    assert read(parser, list(EXAMPLES["harmony"])) == oracle.Response("", 'Hm.\nSure.\n{"a": "}{"}\n{}')
    other = ResponseFormat(tool_calls="json", reasoning="think").without_reasoning()
    assert other == ResponseFormat(tool_calls="json") and create_parser(other, prompt="", tools=None) is None


def test_forced_reasoning_needs_no_marker_to_begin():
    for prompt, expected in (("x", oracle.Response("a", "b")), ("x<think></think>", oracle.Response("", "a</think>b"))):
        parser = create_parser(ResponseFormat(reasoning="forced"), prompt=prompt, tools=None)
        assert read(parser, ["a</th", "ink>b"]) == expected


TEMPLATES = {
    "{{ '<tool_call>' }}": ResponseFormat(tool_calls="json"),
    "<tool_call> {% if enable_thinking %}<think>\n\n</think>": ResponseFormat(tool_calls="json", reasoning="think"),
    "<tool_call><function=x><parameter=y>": ResponseFormat(tool_calls="xml"),
    "<tool_call><arg_key></arg_key></think>": ResponseFormat(tool_calls="glm", reasoning="think"),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>```json </think>": ResponseFormat(
        tool_calls="deepseek-v3", reasoning="think"
    ),
    "<｜tool▁call▁begin｜><｜tool▁sep｜></think>": ResponseFormat(tool_calls="deepseek-v31", reasoning="think"),
    "<|start|>assistant<|channel|>final<|message|>": ResponseFormat(tool_calls="harmony", reasoning="harmony"),
    "{{ messages }}": ResponseFormat(),
    None: ResponseFormat(),
}


@pytest.mark.parametrize(("template", "expected"), TEMPLATES.items())
def test_the_template_shows_the_format(template, expected):
    assert detect_format(template) == expected == resolve_format(template)
    assert resolve_format(template, tool_call_parser="none", reasoning_parser="none") == ResponseFormat()


def test_a_parser_that_does_not_exist_is_refused():
    assert resolve_format(None, tool_call_parser="qwen25", reasoning_parser="deepseek_r1") == ResponseFormat(
        tool_calls="json", reasoning="forced"
    )
    with pytest.raises(ConfigError, match="tool_call_parser='qwen3_codr' is no parser; did you mean qwen3_coder"):
        resolve_format(None, tool_call_parser="qwen3_codr")
    with pytest.raises(ConfigError, match="reasoning_parser='x' is no parser; known are auto, none"):
        resolve_format(None, reasoning_parser="x")
    with pytest.raises(ConfigError, match="GPT-OSS has one format"):
        resolve_format(None, tool_call_parser="hermes", reasoning_parser="gpt-oss")


def test_a_forced_call_that_is_cut_before_its_arguments_is_content_if_it_is_the_first():
    parts = ['[{"name": "get", "parameters": ', '{"a": 1}}', ', {"name": "put", "parameters": ', "{}}", "]"]
    text = "".join(parts)
    for cut in range(len(text) + 1):
        parser = create_forced_parser(None)
        deltas = [*parser.feed(text[:cut]), *parser.finish()]
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        names = [delta.name for delta in deltas if isinstance(delta, CallDelta) and delta.name is not None]
        whole, head = [], text[:cut]  # parts that the cut leaves whole, and the beginning of the next one
        while len(head) > len(parts[len(whole)]):
            whole.append(parts[len(whole)])
            head = head[len(whole[-1]) :]
        assert names == ["get", "put"][: (len(whole) + 1) // 2], text[:cut]
        is_head = not whole and "{" in head
        assert content.strip() == (head.strip() if is_head else ""), text[:cut]


def test_what_is_no_forced_call_is_content():
    parser = create_forced_parser(None)
    response = read(parser, ['[{"name": "get", "parameters": {}}, {"na', 'me": 3', "}"])
    assert ([name for name, _ in response.calls], response.content) == (["get"], ', {"name": 3}')


@pytest.mark.parametrize(
    ("kind", "call", "marker"),
    [
        ("json", '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n', "</tool_call>"),
        ("xml", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</function>\n", "</tool_call>"),
        ("deepseek-v31", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1}', "<｜tool▁call▁end｜>"),
    ],
)
@pytest.mark.parametrize("reasoning", [None, "think"])
def test_an_end_marker_that_is_cut_behind_a_call_is_no_content(kind, call, marker, reasoning):
    for cut in range(len(marker) + 1):
        for pieces in ([call + marker[:cut]], list(call + marker[:cut])):
            parser = create_parser(ResponseFormat(tool_calls=kind, reasoning=reasoning), prompt="", tools={})
            response = read(parser, pieces, is_cut=True)
            assert (response.content, response.calls) == ("", [["now", '{"a": 1}']]), pieces


@pytest.mark.parametrize("reasoning", [None, "think"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("json", '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n'),
        ("xml", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</function>\n"),
        ("glm", "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\nor"),
        ("deepseek-v31", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1}'),
    ],
)
def test_text_that_the_model_ends_with_the_beginning_of_an_end_marker_is_content(kind, call, reasoning):
    for end in ("if a <", "if a </"):
        for pieces in ([call + end], list(call + end)):
            parser = create_parser(ResponseFormat(tool_calls=kind, reasoning=reasoning), prompt="", tools={})
            response = read(parser, pieces)
            assert response.content.endswith(end) and [name for name, _ in response.calls] == ["now"], pieces


@pytest.mark.parametrize(
    ("kind", "head", "end"),
    [
        ("xml", "<tool_call>\n<function=write_file>\n<parameter=text>\nhello", "\n</parameter>"),
        ("glm", "<tool_call>write_file\n<arg_key>text</arg_key>\n<arg_value>hello", "</arg_value>"),
    ],
)
def test_an_end_marker_that_is_cut_is_no_part_of_a_string(kind, head, end):
    for cut in range(len(end) + 1):
        for pieces in ([head + end[:cut]], list(head + end[:cut])):
            parser = create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS)
            whole = '"' if cut == len(end) else ""
            expected = oracle.Response("", "", [["write_file", '{"text": "hello' + whole]])
            assert read(parser, pieces, is_cut=True) == expected, pieces
            parser = create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS)
            text = "" if whole else end[:cut].replace("\n", "\\n")  # the model ends it: the beginning is text
            assert read(parser, pieces).calls == [["write_file", '{"text": "hello' + text + whole]], pieces


@pytest.mark.parametrize("calls", [None, "json", "deepseek-v3"])
def test_a_marker_that_is_cut_behind_reasoning_is_no_reasoning(calls):
    begin = {None: "</think>", "json": "<tool_call>", "deepseek-v3": "<｜tool▁calls▁begin｜>"}[calls]
    for marker in ("</think>", begin):
        for cut in range(len(marker)):
            parser = create_parser(ResponseFormat(tool_calls=calls, reasoning="forced"), prompt="", tools=TOOLS)
            assert read(parser, ["thoughts\n", marker[:cut]], is_cut=True) == oracle.Response("thoughts"), marker[:cut]
            parser = create_parser(ResponseFormat(tool_calls=calls, reasoning="forced"), prompt="", tools=TOOLS)
            ended = read(parser, ["thoughts\n", marker[:cut]])  # by the model
            assert ended == oracle.Response(f"thoughts\n{marker[:cut]}".strip()), marker[:cut]


@pytest.mark.parametrize(
    ("kind", "call", "further"),
    [
        ("json", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', '<tool_call>\n{"name": "now", "argum'),
        ("xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "<tool_call>\n<function=now"),
        ("xml", "<function=now>\n</function>", "<function=now"),
        ("glm", "<tool_call>now\n</tool_call>", "<tool_call>now\n<arg_ke"),
        (
            "deepseek-v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
        ),
        (
            "deepseek-v31",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>",
        ),
    ],
)
def test_a_further_call_that_is_cut_before_its_arguments_is_left_out(kind, call, further):
    for cut in range(len(further) + 1):
        text = f"Sure.\n{call}\n{further[:cut]}"
        for pieces in ([text], list(text)):
            parser = create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS)
            response = read(parser, pieces, is_cut=True)
            assert (response.content, [name for name, _ in response.calls]) == ("Sure.", ["now"]), text
        first = create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS)
        alone = further[:cut].removeprefix("<｜tool▁calls▁begin｜>").removeprefix("<｜tool▁calls▁end｜>")
        assert read(first, [further[:cut]], is_cut=True) == oracle.Response("", alone), further[:cut]
    parser = create_parser(ResponseFormat(tool_calls=kind), prompt="", tools=TOOLS)
    assert read(parser, [call, further]).content, further  # the model has ended the text itself


def test_a_fence_that_is_cut_behind_arguments_is_no_content():
    for cut in range(4):
        text = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n" + "```"[:cut]
        parser = create_parser(ResponseFormat(tool_calls="deepseek-v3"), prompt="", tools=TOOLS)
        assert read(parser, [text], is_cut=True) == oracle.Response("", "", [["now", "{}"]]), text


def test_thousands_of_forced_calls_are_read():
    parser = create_forced_parser(None)
    text = "[" + ", ".join(['{"name": "f", "parameters": {}}'] * 3000) + "]"
    deltas = [*parser.feed(text), *parser.finish()]
    assert sum(isinstance(delta, CallDelta) and delta.name == "f" for delta in deltas) == 3000


@pytest.mark.parametrize("node", [{"type": 7}, {"type": [["a"]]}, {"$ref": "#"}, {"$ref": "#/no"}, {"anyOf": [7]}, 7])
def test_a_schema_that_does_not_say_a_type_leaves_the_value_as_it_is(node):
    assert property_types({"properties": {"x": node}}, "x") is None


def test_a_schema_that_repeats_itself_is_read_in_bounded_work():
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 40}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    assert property_types(loop, "x") is None
    known = {
        "$defs": {"a": {"enum": [1, "b"]}},
        "properties": {"x": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": None}]}},
    }
    assert property_types(known, "x") == {"integer", "string", "null"}


@pytest.mark.parametrize(
    ("text", "value"), [(r'"a\u00e9"', "aé"), (r'"\ud83d\ude00"', "😀"), (r'"f\ud800g"', None), ('"\\q"', None)]
)
def test_strings_that_no_answer_can_hold_have_no_value(text, value):
    assert decode_string(text) == value


def test_a_name_with_half_of_a_surrogate_pair_is_no_call():
    text = '<tool_call>{"name": "f\\ud800g", "arguments": {"a": 1}}</tool_call>'
    response = read(create_parser(ResponseFormat(tool_calls="json"), prompt="", tools=TOOLS), [text])
    assert response.content == text and not response.calls
