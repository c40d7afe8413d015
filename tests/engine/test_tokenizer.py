"""Tokenizer files of a checkpoint: their meaning, what is refused, and that a template can only render text."""

import json
import random
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from routed_experts.core.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    RoutedExpertsError,
)
from routed_experts.engine.requests.tokenizer import ChatTemplate, Tokenizer
from support.tiny_checkpoint import (
    CHAT_TEMPLATE,
    EOS_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    train_tokenizer,
    write_tiny_checkpoint,
    write_tiny_tokenizer,
)

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ 7 * 7 }} <b> é"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tokenizer.from_directory(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def edit(folder, name, **changes):
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **changes}))


def render(source, messages=MESSAGES, **scalars):
    return ChatTemplate(source, "some/tokenizer_config.json").render({"messages": messages, **scalars})


# ids


def test_tiny_tokenizer_has_exactly_its_entries(tiny, tmp_path):
    assert tiny.vocab_size == VOCAB_SIZE == 313
    assert [tiny.token_string(i) for i in range(3)] == list(SPECIAL_TOKENS)
    again = write_tiny_tokenizer(tmp_path)
    assert (again / "tokenizer.json").read_text() == (
        write_tiny_tokenizer(tmp_path / "b") / "tokenizer.json"
    ).read_text()


def test_any_text_survives(tiny):
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(
            chr(rng.choice([rng.randrange(128), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
            for _ in range(30)
        )
        ids = tiny.encode(text)
        assert tiny.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tiny.token_bytes, ids)) == text.encode()
        assert all(0 <= i < VOCAB_SIZE for i in ids)


@pytest.mark.parametrize("text", ["", " ", "\ufeff", "\x00", "\n\n"])
def test_empty_and_odd_text_survives(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


def test_special_tokens_are_read_and_skipped(tiny):
    ids = tiny.encode("a<|im_end|>b<|endoftext|>")
    assert [i for i in ids if tiny.is_special(i)] == [2, 0]
    assert tiny.decode(ids) == "ab"
    assert tiny.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<|endoftext|>"


def test_ids_beyond_the_vocabulary_have_no_text(tiny):
    assert tiny.decode([313, 10**6]) == ""
    assert tiny.token_bytes(313) == b""
    assert tiny.token_string(313) is None


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**63])
def test_ids_that_cannot_be_are_refused(tiny, token_id):
    with pytest.raises(InvalidRequestError, match=f"token id {token_id} cannot be"):
        tiny.decode([token_id])


def test_lone_surrogate_is_refused(tiny):
    with pytest.raises(InvalidRequestError, match="surrogate at character 1"):
        tiny.encode("a\ud800")


def test_beginning_of_text_is_added_only_when_asked(tmp_path):
    backend = train_tokenizer("abc " * 100 + "the cat sat on the mat with the hat and the bat", 270)
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]


def test_a_file_with_truncation_and_padding_applies_neither(tmp_path):
    backend = Backend.from_file(str(write_tiny_tokenizer(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_directory(tmp_path).encode("zqzqzqzq")) == 8
    assert len(Tokenizer.from_directory(tmp_path).encode("z")) == 1


# files


def test_end_tokens_are_gathered_from_all_files(tmp_path):
    folder = write_tiny_checkpoint(tmp_path, eos_token_id=[7, 8])
    edit(folder, "generation_config.json", eos_token_id=9)
    assert Tokenizer.from_directory(folder).eos_token_ids == {EOS_ID, 7, 8, 9}
    edit(folder, "generation_config.json", eos_token_id=[10, 11])
    edit(folder, "config.json", eos_token_id=None)
    edit(folder, "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    assert Tokenizer.from_directory(folder).eos_token_ids == {0, 10, 11}


def test_tokenizer_json_alone_is_enough(tmp_path):
    train_tokenizer("abc " * 100 + "the cat sat on the mat with the hat and the bat", 270).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.chat_template, dict(tokenizer.named_tokens)) == (frozenset(), None, {})
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", "{}", "tokenizer.json is no tokenizer"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "eos_token '<nope>' is not in tokenizer.json"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is a int"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template of .*tokenizer_config.json"),
        ("chat_template.jinja", "{% for %}", "chat template of .*chat_template.jinja"),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json: eos_token_id='2'"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', r"eos_token_id=\[2, -1\].*ids from 0 to 2147483647"),
        ("generation_config.json", '{"eos_token_id": 2147483648}', "eos_token_id=2147483648.*ids from 0"),
    ],
)
def test_bad_file_is_named(tmp_path, name, text, match):
    folder = write_tiny_tokenizer(tmp_path)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), decoders.Strip(" ", 0, 1)]
)
def test_decoder_whose_text_is_taken_back_is_refused(tmp_path, decoder):
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.Sequence([decoder])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="cannot be streamed"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("library", ["tokenizers", "jinja2"])
def test_missing_library_names_what_to_install(tmp_path, monkeypatch, library):
    folder = write_tiny_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library} is not installed; run .*\[text\]"):
        Tokenizer.from_directory(folder)


def test_code_of_a_checkpoint_is_not_imported(tmp_path, monkeypatch):
    folder, canary = write_tiny_tokenizer(tmp_path / "model"), tmp_path / "canary"
    (folder / "tokenization_planted.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass T: pass\n")
    edit(
        folder,
        "tokenizer_config.json",
        tokenizer_class="T",
        auto_map={"AutoTokenizer": ["tokenization_planted.T", None]},
    )
    monkeypatch.chdir(folder)
    assert Tokenizer.from_directory(folder).encode("a")
    assert not canary.exists()


# chat templates


def test_messages_become_chatml_and_stay_data(tiny):
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{{ 7 * 7 }} <b> é<|im_end|>\n"
    assert tiny.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected
    assert tiny.apply_chat_template(MESSAGES) == expected + "<|im_start|>assistant\n"
    assert tiny.chat_template == CHAT_TEMPLATE
    assert tiny.encode(tiny.apply_chat_template(MESSAGES), add_special_tokens=False)[0] == 1


def test_template_file_wins_over_the_config_and_named_ones_give_their_default(tmp_path):
    folder = write_tiny_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit(folder, "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_directory(folder).apply_chat_template(MESSAGES) == "plain"
    assert Tokenizer.from_directory(folder).apply_chat_template(MESSAGES, tools=[{"name": "t"}]) == "tools"
    edit(folder, "tokenizer_config.json", chat_template={item["name"]: item["template"] for item in named})
    assert Tokenizer.from_directory(folder).apply_chat_template(MESSAGES) == "plain"
    edit(folder, "tokenizer_config.json", chat_template=named[:1])
    assert Tokenizer.from_directory(folder).apply_chat_template(MESSAGES, tools=[{"name": "t"}]) == "tools"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer.from_directory(folder).apply_chat_template(MESSAGES)
    (folder / "chat_template.jinja").write_text("from the file {{ eos_token }}")
    assert Tokenizer.from_directory(folder).apply_chat_template(MESSAGES) == "from the file <|im_end|>"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools[0].name }}")
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "t"}]) == "tools: t" and tokenizer.takes_tools
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == "from the file <|im_end|>"


def test_scalars_reach_the_template_and_nothing_else_does(tmp_path):
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ enable_thinking }} {{ tools[0].name if tools }}")
    tokenizer = Tokenizer.from_directory(folder)
    assert (
        tokenizer.apply_chat_template(MESSAGES, scalars={"enable_thinking": False}, tools=[{"name": "t"}]) == "False t"
    )
    reserved = [{"messages": "x"}, {"eos_token": "x"}, {"raise_exception": 1}]
    for bad in (*reserved, {"_x": 1}, {"a b": 1}, {"x": []}, {"x": {"y": 1}}, {"x": print}):
        with pytest.raises(InvalidRequestError, match="is refused"):
            tokenizer.apply_chat_template(MESSAGES, scalars=bad)


def test_templates_render_as_in_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    each = "{% for m in messages %}"
    sources = [
        CHAT_TEMPLATE,
        each
        + "\n  {% if m.role == 'system' %}\n S:{{ m['content'] | trim }}\n  {% else %}\n{{ m | tojson }}\n"
        + "{% endif %}\n{% endfor %}",
        "{{ messages | tojson(indent=2) }}",
        "{% set ns = namespace(n=0) %}"
        + each
        + "{% set ns.n = ns.n + 1 %}{% if ns.n > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{%- for m in messages[::-1] %}{% if loop.first %}{% continue %}{% endif %}"
        + "{{ loop.index0 }}{{ m.content.upper() }}{%- endfor %}",
        "{% if tools is defined and tools %}{{ tools }}{% endif %}{{ missing }}"
        + "{{ strftime_now('%Y')|length }}{{ dict(a=1).items()|list }}",
        "{% macro show(m) %}[{{ m.role }}]{% endmacro %}" + each + "{{ show(m) }}{% endfor %}",
        "{% set n = 1 %}"
        + each
        + "{{ m.role }}\n{% generation %}\n{% set n = 2 %}{{ n }}{{ m.content }}\n{%- endgeneration %}{{ n }}"
        + "{% endfor %}",
    ]
    for source in sources:
        oracle, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)
        assert render(source, add_generation_prompt=True, tools=None) == oracle[0], source


def test_template_may_refuse_the_messages():
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    for source in (
        "{{ messages[5].content.x }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ):
        with pytest.raises(RoutedExpertsError) as caught:
            render(source)
        assert len(str(caught.value)) < 400


INJECTIONS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ raise_exception.__globals__['importlib'].import_module('os').system('touch CANARY') }}",
    "{{ strftime_now.__func__ }}{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = dict %}",
    "{% set ns = namespace(__class__=dict) %}{{ ns }}",
    "{{ dict.mro() }}",
    "{{ messages.append('x') }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{{ __import__('os').system('touch CANARY') }}",
    "{{ eval('1') }}{{ open('CANARY', 'w') }}",
    "{{ range(10 ** 9)|list }}",
    "{% python %}open('CANARY', 'w'){% endpython %}",
    "{{ (raise_exception|attr('__globals__')).json }}",
]


@pytest.mark.parametrize("source", INJECTIONS)
def test_template_injection_executes_nothing(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RoutedExpertsError) as caught:
        render(source, messages)
    assert "template" in str(caught.value)
    assert messages == [{"role": "user", "content": "x"}]
    assert not list(tmp_path.iterdir())


def test_megabytes_that_cannot_fit_are_refused_before_they_are_tokenised(tiny, monkeypatch):
    long = "the router " * 100_000
    assert tiny.encode(long, max_tokens=len(long)) == tiny.encode(long), "what may fit is tokenised"
    monkeypatch.setattr(tiny, "_backend", None)  # nothing can be tokenised any more
    with pytest.raises(PromptTooLongError) as excinfo:
        tiny.encode(long, max_tokens=512)
    assert excinfo.value.param == "prompt" and str(len(long)) in str(excinfo.value)
