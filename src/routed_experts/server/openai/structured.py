"""Fields of /v1 that ask for a form of the output: OpenAI's response_format, vLLM's structured_outputs and guided_*,
SGLang's json_schema, regex and ebnf. At most one of them in a body; an empty text counts as absent."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.server.protocol import OpenAIRequest

_FIELDS: Mapping[str, Callable[..., GrammarSpec | None]] = MappingProxyType(
    {
        "response_format": GrammarSpec.of_response_format,
        "structured_outputs": GrammarSpec.parse,
        "json_schema": GrammarSpec.json_schema,
        "guided_json": GrammarSpec.json_schema,
        "regex": GrammarSpec.regex,
        "guided_regex": GrammarSpec.regex,
        "ebnf": GrammarSpec.grammar,
        "guided_grammar": GrammarSpec.grammar,
        "guided_choice": GrammarSpec.choice,
    }
)


def grammar_of(body: OpenAIRequest) -> GrammarSpec | None:
    """The form of the output that a body asks for; None: any. Raises InvalidRequestError naming the field."""
    grammar: GrammarSpec | None = None
    first = ""
    for name, make in _FIELDS.items():
        value = getattr(body, name)
        spec = None if value is None or value == "" else make(value, param=name)
        if spec is None:
            continue
        if grammar is not None:
            text = f"{PARAM} and {first} both ask for a form of the output; send one of them"
            raise InvalidRequestError(text, param=name, code="conflicting_parameters")
        grammar, first = spec, name
    return grammar
