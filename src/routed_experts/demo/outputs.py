"""The prompts of the demo, and their outputs as tokens, logprobs and rows.

The second prompt begins like the first and follows it, so that its beginning is found in the prefix cache."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from routed_experts.analysis.routed_text import RoutedText, token_texts
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.engine import Engine
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.formats.meta_info import extract_routed_experts_from_meta_info, record_from_meta_info

STORY = (
    "Once upon a time there was a small fox who lived in a forest. The sun was shining. "
    "The fox wanted to find a golden key."
)
PROMPTS = (
    ("a story", STORY),
    ("the same story, continued", STORY + ' "Who can help me?" asked the fox.'),
    ("a question", "What is the capital of France?"),
)
NEW_TOKENS = 48
SAMPLING: Mapping[str, object] = {"temperature": 0.6, "top_k": 40, "seed": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutput:
    """One output. `logprobs` are the engine's, of the generated tokens, before temperature and filters."""

    title: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    record: RoutedExperts
    wire_shape: tuple[int, ...]  # of extract_routed_experts_from_meta_info: all layers, dense ones too
    cached_tokens: int
    seconds: float
    pieces: tuple[str, ...]

    def routed_text(self) -> RoutedText:
        """The output as figures take it."""
        return RoutedText(title=self.title, pieces=self.pieces, record=self.record, cached_tokens=self.cached_tokens)


def generate(engine: Engine) -> Iterator[DemoOutput]:
    """Generate for one prompt after another."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "the demo builds its engine with a tokenizer"
    for index, (title, prompt) in enumerate(PROMPTS):
        ids = encode_prompt(tokenizer, prompt, chat=index == len(PROMPTS) - 1)
        answer = engine.generate(
            input_ids=ids,
            sampling_params=SAMPLING,
            max_new_tokens=NEW_TOKENS,
            return_logprob=True,
            return_routed_experts=True,
        )
        yield _to_output(title, ids, cast("Mapping[str, Any]", answer), tokenizer)


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> list[int]:
    """The token ids of a prompt; `chat`: as a message, where the model has a chat template."""
    if not chat or tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(text, add_special_tokens=False)


def _to_output(title: str, prompt_ids: list[int], answer: Mapping[str, Any], tokenizer: Tokenizer) -> DemoOutput:
    meta, token_ids = answer["meta_info"], (*prompt_ids, *answer["output_ids"])
    flat, record = extract_routed_experts_from_meta_info(answer), record_from_meta_info(answer)
    assert flat is not None and record is not None, "rows were asked for"
    return DemoOutput(
        title=title,
        token_ids=token_ids,
        logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        record=record,
        wire_shape=flat.reshape(-1, record.num_hidden_layers, record.top_k).shape,
        cached_tokens=meta["cached_tokens"],
        seconds=meta["e2e_latency"],
        pieces=token_texts(tokenizer.token_bytes(token) for token in token_ids),
    )
