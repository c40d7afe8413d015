"""Self-checks at start-up. Deterministic mode is refused if results depend on the batch composition by one bit.
Replayed rows must be the rows that run. Uses schedulers of its own, over the runner that will serve."""

import dataclasses
from collections.abc import Callable

import numpy as np

from routed_experts.core.errors import CaptureUnsupportedError, ConfigError
from routed_experts.core.io_struct import RoutingOptions, TokenIDOut, TokenizedGenerateReqInput
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.control.score import Scorer
from routed_experts.engine.loop.core import EngineCore
from routed_experts.scheduling.schedule_batch import Req

_LENGTHS = (1, 3, 7, 12)  # prompts of the check
_NEW_TOKENS = 4


def check_determinism(
    new_core: Callable[[], EngineCore], *, vocab_size: int, context_length: int, backends: str
) -> int:
    """Run a few sequences alone, and then together in another order; ids, logprobs and rows must agree to the last bit.
    Returns the number of comparisons. Raises ConfigError naming the backends."""
    noise = np.random.default_rng(0)
    lengths = [length for length in _LENGTHS if length + _NEW_TOKENS <= context_length]
    prompts = [noise.integers(0, vocab_size, size=length).astype(np.int32) for length in lengths]
    separate = [_run(new_core(), [(index, prompt)])[index] for index, prompt in enumerate(prompts)]
    together = _run(new_core(), list(enumerate(prompts))[::-1])
    for index, out in enumerate(separate):
        if _observed(out) != _observed(together[index]):
            text = f"deterministic=True cannot hold: with {backends} a sequence of {lengths[index]} tokens"
            text += " depends on the batch"
            raise ConfigError(
                f"{text}; use moe_backend='reference' and attention_backend='reference', or deterministic=False"
            )
    return len(separate)


def check_replay(new_core: Callable[[], EngineCore], scorer: Scorer, *, vocab_size: int, context_length: int) -> int:
    """Capture a short prompt and its continuation, then score the same tokens on those rows, and on the rows of other
    tokens, which the router would not choose. The executed ids must be the replayed ones. Returns the number of
    rows, 0 where the context is too short for a sequence. Raises CaptureUnsupportedError naming the first row that
    differs."""
    if context_length <= _NEW_TOKENS:
        return 0
    core = new_core()
    prompt = (
        np.random.default_rng(0)
        .integers(0, vocab_size, size=min(_LENGTHS[-1], context_length - _NEW_TOKENS))
        .astype(np.int32)
    )
    (out,) = _run(core, [(0, prompt)]).values()
    record, tokens = out.routed_experts, np.concatenate([prompt, np.array(out.new_token_ids, np.int32)])
    assert record is not None, "rows were requested"
    for forced in (record, dataclasses.replace(record, ids=np.roll(record.ids, 1, axis=0))):
        (scored,) = scorer.run([tokens], [forced], lambda: (core.runner.state, core.weight_version))
        assert scored.routed_experts is not None, "rows are recorded"
        differs = (scored.routed_experts.ids[: record.num_rows] != forced.ids).any(axis=(1, 2))
        if differs.any():
            text = f"the self-check replayed {record.num_rows} rows, and {np.count_nonzero(differs)} of them ran on"
            text += f" other experts, the first at token {np.argmax(differs)}"
            raise CaptureUnsupportedError(
                f"{text}; choose moe_backend='reference', or leave enable_return_routed_experts out"
            )
    return record.num_rows


def _run(core: EngineCore, prompts: list[tuple[int, np.ndarray]]) -> dict[int, TokenIDOut]:
    core.add([Req(_request(index, prompt, capture=core.capturers[0].enabled)) for index, prompt in prompts])
    outs: dict[int, TokenIDOut] = {}
    while not core.is_idle:
        for out in core.step().outs:
            outs[int(out.rid)] = out
    return outs


def _request(index: int, prompt: np.ndarray, *, capture: bool) -> TokenizedGenerateReqInput:
    sampling = SamplingParams(temperature=1.0 if index % 2 else 0.0, max_tokens=_NEW_TOKENS, seed=index).resolve()
    return TokenizedGenerateReqInput(
        rid=str(index),
        group=str(index),
        choice=0,
        input_ids=prompt,
        sampling=sampling,
        stop_token_ids=frozenset(),
        return_logprob=True,
        logprob_start_len=0,
        routed_experts=RoutingOptions(enabled=capture),
    )


def _observed(out: TokenIDOut) -> tuple[object, ...]:
    rows = b"" if out.routed_experts is None else out.routed_experts.ids.tobytes()
    prompt = () if out.input_logprobs is None else out.input_logprobs.values
    return out.new_token_ids, out.output_logprobs.values, prompt, rows
