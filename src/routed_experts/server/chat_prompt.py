"""ChatPrompt: messages and tools as a prompt, and the parser of the responses to it, for all dialects with messages."""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence

from routed_experts.core.io_struct import TokenizedGenerateReqInput
from routed_experts.engine.requests.tokenizer import Scalar
from routed_experts.parsing import (
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ResponseFormat,
    ResponseParser,
    create_forced_parser,
    create_parser,
)
from routed_experts.server.chat_template import render, to_text
from routed_experts.server.protocol import ChatMessage
from routed_experts.server.state import ServerState
from routed_experts.server.tools import ToolOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation. `response_format`: what a response is parsed for."""

    text: str
    token_ids: list[int]
    tools: ToolOptions
    response_format: ResponseFormat
    continued: str | None = None  # the content of the last message, which a response continues

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is separated from the content."""
        return self.response_format.reasoning is not None

    def create_parser(self) -> ResponseParser | None:
        """Create the parser of one response; None where all of it is content."""
        if self.tools.must_call:
            return create_forced_parser(self.tools.choice.name, max_calls=None if self.tools.parallel else 1)
        tools = self.tools.parameters if self.tools.callable else None
        max_calls = None if self.tools.parallel else 1
        return create_parser(
            self.response_format, prompt=self.text, continued=self.continued, tools=tools, max_calls=max_calls
        )

    def after_reasoning(self) -> "ChatPrompt":
        """Return the prompt of a response that continues content: reasoning is behind it, unless its marker begins
        some. Dialects whose messages have reasoning in blocks of its own need this: a text block is content. In
        OpenAI's form the last message may be in the middle of reasoning, so that a parser of forced reasoning reads
        what continues it as reasoning up to `</think>`, as SGLang does."""
        return dataclasses.replace(self, response_format=self.response_format.without_forced_reasoning())

    def with_markers(
        self, server: ServerState, requests: Sequence[TokenizedGenerateReqInput]
    ) -> Sequence[TokenizedGenerateReqInput]:
        """Return the requests with the markers that are special tokens kept in their text, for the parser. Tokens and
        rows stay as they are."""
        tokenizer = server.engine.tokenizer
        if tokenizer is None or self.create_parser() is None:
            return requests
        visible = tokenizer.special_ids(self.response_format.markers)
        if not visible:
            return requests
        return [
            dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, visible_special_ids=visible))
            for request in requests
        ]


def build_prompt(
    server: ServerState,
    messages: Sequence[ChatMessage] | None,
    tools: ToolOptions,
    *,
    scalars: Mapping[str, Scalar] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    separate_reasoning: bool = True,
    structured: bool = False,
) -> ChatPrompt:
    """Render and tokenise a conversation. `structured`: the request has a grammar, so that all of its response is
    content. Raises InvalidRequestError."""
    tokenizer = server.tokenizer("messages")
    text = render(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        scalars=scalars,
        tools=tools.to_template(),
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False, max_tokens=server.engine.context_length)
    response_format = server.response_format
    if structured or tools.must_call:
        response_format = ResponseFormat()
    elif not separate_reasoning:
        response_format = response_format.without_reasoning()
    continued = None
    if continue_final_message and messages:
        continued = to_text(messages[-1].content, index=len(messages) - 1)
    return ChatPrompt(text=text, token_ids=token_ids, tools=tools, response_format=response_format, continued=continued)


@dataclasses.dataclass(slots=True)
class Call:
    """A call of a response."""

    call_id: str
    name: str
    arguments: str


@dataclasses.dataclass(slots=True)
class ParsedResponse:
    """A response as far as it is parsed."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list[Call])

    def add(self, delta: Delta) -> None:
        """Add what a delta brings."""
        match delta:
            case ReasoningDelta(text):
                self.reasoning += text
            case ContentDelta(text):
                self.content += text
            case CallDelta(index, name, arguments):
                if name is not None:
                    self.calls.append(Call(new_call_id(), name, ""))
                self.calls[index].arguments += arguments

    @classmethod
    def from_text(cls, parser: ResponseParser | None, text: str, *, is_cut: bool) -> "ParsedResponse":
        """Parse a whole response. `is_cut`: a limit has ended it, such as max_tokens."""
        response = cls()
        for delta in [ContentDelta(text)] if parser is None else [*parser.feed(text), *parser.finish(is_cut=is_cut)]:
            response.add(delta)
        return response


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"
