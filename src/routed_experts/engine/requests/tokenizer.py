"""Tokenizer: text to token ids and back, and messages to text, from the tokenizer files of a checkpoint.

Only tokenizer.json is read. Code of a checkpoint is never imported. Chat templates come from the checkpoint alone and
run in a sandbox that can call nothing but the functions given here. Needs routed-experts[text], imported at first
use."""

import functools
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from routed_experts.core.errors import PARAM, CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError
from routed_experts.core.installation import import_optional
from routed_experts.engine.requests.added_tokens import add_tokens, read_tokenizer_settings
from routed_experts.models.base.config_reader import read_eos_token_ids, read_json_object

Scalar = str | int | float | bool | None

_LONG_CHARS = 1 << 20  # a text up to this length is tokenised before its tokens are counted
_MARK = "\x02"  # no tokenizer joins it with a character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = "argument"
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", *_NAMED_TOKENS}
)
# Decoders whose text grows only at its end, so that it can be streamed. Strip must not strip the end.
_STREAMABLE = frozenset({"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens, from tokenizer_config.json, generation_config.json and config.json."""

    named: Mapping[str, str]  # those of bos_token, eos_token, pad_token, unk_token that exist
    eos_token_ids: frozenset[int]
    special_ids: frozenset[int]
    class_name: str  # of transformers


class Tokenizer:
    """The tokenizer of one checkpoint. Immutable except for its caches, safe to use from many threads."""

    def __init__(
        self,
        backend: Any,
        special: SpecialTokens,
        decoders: Sequence[str],
        template: "ChatTemplate | None" = None,
        tool_template: "ChatTemplate | None" = None,
    ) -> None:
        self._backend = backend
        self._special_ids = special.special_ids
        self._template, self._tool_template = template, tool_template or template
        self.named_tokens = special.named
        self.eos_token_ids = special.eos_token_ids
        self.class_name = special.class_name
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.byte_level = tuple(decoders) == ("ByteLevel",)
        self._byte_fallback = "ByteFallback" in decoders
        self._marks_spaces = not {"Metaspace", "Replace"}.isdisjoint(decoders)  # a decoder may strip the first one
        self._bytes: dict[int, bytes] = {}  # caches of single tokens: each is needed whenever it is generated
        self._texts: dict[int, str] = {}

    @staticmethod
    def from_directory(path: Path | str) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder; CheckpointError names the file that is missing or cannot be
        used."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.exists():
            raise CheckpointError(
                f"{file} does not exist, but text needs it; add it (slow tokenizers: convert), or pass token ids"
            )
        decoders = _decoders(read_json_object(file), file)
        try:
            backend = _text_library("tokenizers").Tokenizer.from_file(str(file))
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # the library raises plain Exception for any fault of a file
            raise CheckpointError(f"{file} is no tokenizer ({error}); copy the checkpoint again") from error
        backend.no_truncation()  # a tokenizer.json may set "cut at 512", and prompts would lose their ends silently
        backend.no_padding()
        settings = read_tokenizer_settings(folder)
        add_tokens(backend, settings, folder / "tokenizer_config.json", make=_text_library("tokenizers").AddedToken)
        backend.encode_special_tokens = settings.get("split_special_tokens") is True
        template = _find_template(folder, settings, "default")
        tool_template = _find_template(folder, settings, "tool_use")
        return Tokenizer(backend, _special_tokens(backend, folder, settings), decoders, template, tool_template)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template."""
        return None if self._template is None else self._template.source

    @property
    def tool_template(self) -> str | None:
        """Source of the chat template of messages with tools."""
        return None if self._tool_template is None else self._tool_template.source

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self._tool_template is not None and "tools" in self._tool_template.variables

    @functools.cached_property
    def takes_argument_text(self) -> bool:
        """Whether the chat template joins the arguments of earlier calls as text. Most write a mapping as JSON."""
        return self._tool_template is not None and self._tool_template.takes_argument_text(self.named_tokens)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those of `texts` that are special tokens."""
        ids = (self._backend.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in ids if token_id is not None and token_id in self._special_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Turn text into ids; special tokens that are spelled out in the text become their ids, as usual with this
        format. Raises PromptTooLongError at once for a text of megabytes that is longer than twice `max_tokens` of the
        longest token."""
        if max_tokens is not None and len(text) > max(_LONG_CHARS, 2 * max_tokens * self._longest_token):
            message = f"{PARAM} has {len(text)} characters, which cannot be {max_tokens} tokens, the limit; shorten it"
            raise PromptTooLongError(message, param="prompt")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{PARAM} has a lone surrogate at character {error.start}; expected valid Unicode", param="text"
            ) from None
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token as the vocabulary writes it; those of a byte-level one are bytes."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text within an output: nothing is added at its beginning, and special tokens that are spelled out stay
        text."""
        plain, first = self._plain_backend
        ids = list(plain.encode(_MARK + text, add_special_tokens=False).ids)
        return ids[len(first) :] if ids[: len(first)] == first else []

    @functools.cached_property
    def _plain_backend(self) -> tuple[Any, list[int]]:
        """A copy of the tokenizer that takes special tokens for text, and the ids of a mark before a text: a tokenizer
        may put a space before the first word."""
        backend = type(self._backend).from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend, list(backend.encode(_MARK, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text; ids beyond the vocabulary (a padded embedding) have no text."""
        for token_id in token_ids:
            if not 0 <= token_id < 1 << 32:
                raise InvalidRequestError(
                    f"token id {token_id} cannot be; expected 0..{self.vocab_size - 1}", param="token_ids"
                )
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return token_id in self._special_ids

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None beyond the vocabulary."""
        return self._backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """What one token adds to running text, special tokens included."""
        text = self._texts.get(token_id)
        if text is None:
            if self._marks_spaces:
                text = self.token_bytes(token_id).decode("utf-8", "replace")
            else:
                text = self.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a byte fallback, whose text depends on its neighbours."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(self.token_string(token_id) or "") is not None

    @functools.cached_property
    def text_token_id(self) -> int | None:
        """The first token of the vocabulary with text that is neither special nor a raw byte; None without one."""
        for token_id in range(self.vocab_size):
            if not self.is_special(token_id) and not self.is_byte(token_id) and self.decode([token_id]).strip():
                return token_id
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to running text; joined, those of a byte-level tokenizer are the text in
        UTF-8."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._to_bytes(self.token_string(token_id) or "")
        return cached

    def _to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            known = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        scalars: Mapping[str, Scalar] | None = None,
    ) -> str:
        """Render messages with the checkpoint's template; encode the text with add_special_tokens=False. A checkpoint
        may have a template of its own for messages with tools.

        `scalars` are further variables of the template, such as enable_thinking; names and values are checked."""
        template = self._tool_template if tools and self._tool_template is not None else self._template
        if template is None:
            raise InvalidRequestError(
                "messages are given, but the checkpoint has no chat template; send a prompt", param="messages"
            )
        for name, value in (scalars or {}).items():
            if (
                name in _TEMPLATE_NAMES
                or not name.isidentifier()
                or name.startswith("_")
                or not isinstance(value, Scalar)
            ):
                variable = f"{name!r}={value!r}"[:80]
                raise InvalidRequestError(
                    f"chat template variable {variable} is refused; expected a free name and a scalar",
                    param="chat_template_kwargs",
                )
        variables = {**(scalars or {}), **self.named_tokens, "messages": messages, "tools": tools}
        return template.render({**variables, "add_generation_prompt": add_generation_prompt})


class ChatTemplate:
    """One compiled chat template. Every failure in it is a RoutedExpertsError."""

    def __init__(self, source: str, origin: Path) -> None:
        self.source = source
        self._origin = origin
        self._jinja = _text_library("jinja2")
        try:
            environment = _sandbox(self._jinja)
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            self.variables = frozenset(importlib.import_module("jinja2.meta").find_undeclared_variables(tree))
        except Exception as error:  # mostly TemplateSyntaxError; constants are folded here and may raise anything
            raise CheckpointError(
                f"the chat template of {origin} cannot be used ({_brief(error)}); correct or remove it"
            ) from error

    def takes_argument_text(self, named_tokens: Mapping[str, str]) -> bool:
        """Whether a call with its arguments as a mapping cannot be rendered, or is rendered as Python writes it, while
        one with text can."""
        return not self._renders_call({_PROBE: _PROBE}, named_tokens) and self._renders_call(
            json.dumps({_PROBE: _PROBE}), named_tokens
        )

    def _renders_call(self, arguments: object, named_tokens: Mapping[str, str]) -> bool:
        function = {"name": "probe", "arguments": arguments}
        messages = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]},
        ]
        variables = {**named_tokens, "messages": messages, "tools": None, "add_generation_prompt": False}
        try:
            text = self.render(variables)
        except (CheckpointError, InvalidRequestError):
            return False
        return f"{{'{_PROBE}'" not in text

    def render(self, variables: Mapping[str, object]) -> str:
        try:
            return self._template.render(variables)
        except self._jinja.exceptions.SecurityError as error:
            raise CheckpointError(
                f"the chat template of {self._origin} tried what templates may not do ({_brief(error)}); remove it"
            ) from error
        except Exception as error:  # foreign code: it may raise anything
            message = f"the chat template refuses these messages ({_brief(error)}); change roles or content"
            raise InvalidRequestError(message, param="messages") from error


def _sandbox(jinja: Any) -> Any:
    """Jinja as Hugging Face sets it up, without a loader; an unsafe attribute raises at once instead of being empty."""
    sandbox, utils = importlib.import_module("jinja2.sandbox"), importlib.import_module("jinja2.utils")
    extensions, nodes = importlib.import_module("jinja2.ext"), importlib.import_module("jinja2.nodes")
    security_error, template_error = jinja.exceptions.SecurityError, jinja.exceptions.TemplateError

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: object, attribute: str) -> Any:
            raise security_error(f"attribute {attribute!r} of a {type(obj).__name__}")

    class Namespace(utils.Namespace):
        def __init__(self, *pairs: Any, **values: object) -> None:
            super().__init__()
            for name, value in dict(*pairs, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: object) -> None:
            if name.startswith("_"):
                raise security_error(f"namespace attribute {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: object) -> None:
        raise template_error(str(message))

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(extensions.Extension):
        """`{% generation %}` marks what an assistant wrote, for a trainer's masks; here it is rendered as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    own = ["jinja2.ext.loopcontrols", Generation]
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=own)
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=Namespace)
    return environment


def _find_template(folder: Path, settings: Mapping[str, object], name: str) -> ChatTemplate | None:
    """Return the template `name`, where there are several: the file of the folder, or the one of the settings."""
    file = folder / "additional_chat_templates" / f"{name}.jinja"
    if not file.exists():
        file = folder / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(file.read_text(encoding="utf-8"), file)
    source, origin = settings.get("chat_template"), folder / "tokenizer_config.json"
    if isinstance(source, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        source = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    if isinstance(source, dict):
        source = source.get(name, source.get("default"))
    if source is not None and not isinstance(source, str):
        kind = type(source).__name__
        raise CheckpointError(
            f"{origin}: chat_template is a {kind}; expected a string, or named ones in an object or a list; correct it"
        )
    return None if source is None else ChatTemplate(source, origin)


def _special_tokens(backend: Any, folder: Path, settings: Mapping[str, object]) -> SpecialTokens:
    named = {name: text for name in _NAMED_TOKENS if (text := _content(settings.get(name))) is not None}
    eos_ids: set[int] = set()
    if "eos_token" in named:
        eos_ids.add(backend.token_to_id(named["eos_token"]))
    eos_ids.update(read_eos_token_ids(folder))
    contents = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special = {backend.token_to_id(content) for content in contents}
    class_name = settings.get("tokenizer_class")
    return SpecialTokens(
        named=named,
        eos_token_ids=frozenset(eos_ids),
        special_ids=frozenset(special),
        class_name=class_name if isinstance(class_name, str) else "PreTrainedTokenizerFast",
    )


def _content(token: object) -> str | None:
    """The text of a token in either form: "<s>" or {"content": "<s>", ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _decoders(described: Mapping[str, object], file: Path) -> tuple[str, ...]:
    """Names of the decoding steps; those whose text cannot be streamed are refused."""
    decoder = described.get("decoder")
    steps: Iterable[object] = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    known = [step for step in steps if isinstance(step, dict)]
    names = tuple(str(step.get("type")) for step in known)
    if (
        not _STREAMABLE.issuperset(names)
        or any(step.get("stop", 0) for step in known)
        or ("ByteLevel" in names and len(names) > 1)
    ):
        expected = f"one of {', '.join(sorted(_STREAMABLE))}; use token ids"
        raise CheckpointError(f"{file} decodes with {', '.join(names)}, which cannot be streamed; expected {expected}")
    return names


def _text_library(name: str) -> Any:
    return import_optional(name, purpose="text", extra="text", otherwise="pass token ids")


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _byte_of_character() -> Mapping[str, int]:
    """The alphabet of byte-level BPE (Radford et al. 2019): printable bytes are themselves, the others follow from
    U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return MappingProxyType(
        {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    )


_BYTE_OF_CHARACTER = _byte_of_character()
