"""The demo model answers with drafts of its EAGLE-3 head and without them, on one engine in deterministic mode: tokens,
logprobs and routed experts must be equal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.demo.outputs import NEW_TOKENS, PROMPTS, SAMPLING, encode_prompt
from routed_experts.engine.engine import Engine
from routed_experts.models.loading.model_source import demo_head_path

NUM_DRAFTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedAnswer:
    """One prompt, answered twice. `drafted_tokens`, `accepted_tokens`: drafts that were verified, and those that the
    model sampled itself; `accept_length`: tokens a verify step."""

    title: str
    is_equal: bool
    num_tokens: int
    verify_steps: int
    drafted_tokens: int
    accepted_tokens: int
    accept_length: float


def answer_with_drafts(model: Path, dtype: str) -> list[DraftedAnswer]:
    """Answer the prompts of the demo with `NUM_DRAFTS` drafts in each step, and as requests that are never drafted
    for."""
    speculative = SpeculativeConfig(
        algorithm="EAGLE3", draft_model_path=str(demo_head_path()), num_steps=NUM_DRAFTS, adaptive=False
    )
    answers: list[DraftedAnswer] = []
    with Engine(
        str(model),
        dtype=dtype,  # type: ignore[arg-type]
        enable_return_routed_experts=True,
        deterministic=True,
        precompile_bs_paddings=(4,),
        precompile_token_paddings=(64,),
        speculative=speculative,
    ) as engine:
        assert engine.tokenizer is not None, "the demo model has a tokenizer"
        for index, (title, prompt) in enumerate(PROMPTS):
            ids = encode_prompt(engine.tokenizer, prompt, chat=index == len(PROMPTS) - 1)
            plain, drafted = (_answer(engine, ids, speculative=drafts) for drafts in (False, True))
            meta = drafted["meta_info"]
            answers.append(
                DraftedAnswer(
                    title=title,
                    is_equal=_compared(plain) == _compared(drafted),
                    num_tokens=meta["completion_tokens"],
                    verify_steps=meta["spec_verify_ct"],
                    drafted_tokens=meta["spec_num_proposed_drafts"],
                    accepted_tokens=meta["spec_num_correct_drafts"],
                    accept_length=meta["spec_accept_length"],
                )
            )
    return answers


def _answer(engine: Engine, ids: list[int], *, speculative: bool) -> dict[str, Any]:
    answer = engine.generate(
        input_ids=ids,
        sampling_params={**SAMPLING, "speculative": speculative},
        max_new_tokens=NEW_TOKENS,
        return_logprob=True,
        return_routed_experts=True,
    )
    return cast("dict[str, Any]", answer)


def _compared(answer: dict[str, Any]) -> tuple[object, ...]:
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["finish_reason"], meta["routed_experts"]
