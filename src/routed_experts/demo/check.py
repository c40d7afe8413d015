"""Checks that a replay of the captured ids reproduces the engine's logprobs.

One jitted program scores all outputs three times through the training forward pass (dense attention, other kernels
than the engine's): live, with the captured ids, and with the ids of the previous token, which must not pass.
Dims: B outputs, S tokens, M MoE layers, K experts per token, V vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt

from routed_experts.demo.outputs import DemoOutput
from routed_experts.models.base.interface import Decoder
from routed_experts.replay.forward import RoutedBatch, forward

LOGPROB_TOLERANCE = 1e-4  # float32 sums in another order differ by some 1e-6
_LENGTH_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCheck:
    """Largest differences and shares; `num_rows` rows were replayed and `num_logprobs` generated tokens compared."""

    num_rows: int
    num_logprobs: int
    replay_logprob: float  # max |Δ logprob|, replay against the engine
    executed: float  # share of rows x layers whose executed ids are the captured ones, slot by slot
    live_agreement: float  # share of rows x layers where the live router chose the captured ids
    live_logit: float  # max |Δ logit|, live against replay, up to the first row where the live router chose otherwise
    shifted_logprob: float  # max |Δ logprob| when each token runs the ids of its predecessor

    @property
    def replay_passed(self) -> bool:
        """Whether the replay reproduces the engine's logprobs."""
        return self.replay_logprob <= LOGPROB_TOLERANCE

    @property
    def live_passed(self) -> bool:
        """Whether live and replayed logits agree where their experts do."""
        return self.live_logit <= LOGPROB_TOLERANCE

    @property
    def shift_noticed(self) -> bool:
        """Whether the check fails when it should."""
        return self.shifted_logprob > 10 * LOGPROB_TOLERANCE

    @property
    def faults(self) -> tuple[str, ...]:
        """The checks that failed. NaN passes none."""
        checks = {
            "the replay differs from the engine": self.replay_passed,
            "the replay executed other experts than the captured ones": self.executed == 1.0,
            "no live logits are known to be the replayed ones": self.live_passed,
            "rows of the wrong tokens passed the check": self.shift_noticed,
        }
        return tuple(text for text, passed in checks.items() if not passed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    tokens: Int[np.ndarray, "B S"]
    targets: Int[np.ndarray, "B S"]
    generated: Bool[np.ndarray, "B S"]  # positions whose target was generated
    logprobs: Float[np.ndarray, "B S"]  # the engine's, at these positions
    ids: UInt[np.ndarray, "B S M K"]
    shifted: UInt[np.ndarray, "B S M K"]
    is_input: Bool[np.ndarray, "B S"]


def check_replay(model: Decoder, outputs: Sequence[DemoOutput]) -> ReplayCheck:
    """Score the outputs live, replayed and wrongly replayed, and compare."""
    batch = _pad(outputs)
    live, replay, shifted = (
        _score(model, batch, ids, valid)
        for ids, valid in (
            (batch.ids, np.zeros_like(batch.is_input)),
            (batch.ids, batch.is_input),
            (batch.shifted, batch.is_input),
        )
    )
    same = (live[2] == batch.ids).all(axis=3)  # [B, S, M]
    same_prefix = np.logical_and.accumulate(same.all(axis=2) | ~batch.is_input, axis=1) & batch.is_input
    return ReplayCheck(
        num_rows=int(batch.is_input.sum()),
        num_logprobs=int(batch.generated.sum()),
        replay_logprob=_max_difference(replay[1], batch.logprobs, batch.generated),
        executed=float((replay[2] == batch.ids).all(axis=3)[batch.is_input].mean()),
        live_agreement=float(same[batch.is_input].mean()),
        live_logit=_max_difference(live[0], replay[0], same_prefix),
        shifted_logprob=_max_difference(shifted[1], batch.logprobs, batch.generated),
    )


@nnx.jit
def _score_batch(
    model: Decoder, tokens: Int[Array, "B S"], targets: Int[Array, "B S"], routed: RoutedBatch
) -> tuple[Float[Array, "B S V"], Float[Array, "B S"], UInt[Array, "B S M K"]]:
    out = forward(model, tokens, routed=routed, return_routed=True)
    assert out.ids is not None, "the demo model has MoE layers"
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(out.logits, axis=-1), targets[..., None], axis=-1)[..., 0]
    return out.logits, logprobs, out.ids


def _score(
    model: Decoder, batch: _Batch, ids: UInt[np.ndarray, "B S M K"], valid: Bool[np.ndarray, "B S"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    routed = RoutedBatch(jnp.asarray(ids), jnp.asarray(valid), jnp.asarray(~batch.is_input))
    logits, logprobs, executed = _score_batch(model, jnp.asarray(batch.tokens), jnp.asarray(batch.targets), routed)
    return np.asarray(logits), np.asarray(logprobs), np.asarray(executed)


def _pad(outputs: Sequence[DemoOutput]) -> _Batch:
    """Pad the fed tokens (all but the last) of every output to one length."""
    longest = max(len(answer.token_ids) - 1 for answer in outputs)
    shape = (len(outputs), -(-longest // _LENGTH_STEP) * _LENGTH_STEP)
    first = outputs[0].record
    ids = np.zeros((*shape, *first.ids.shape[1:]), first.ids.dtype)
    shifted = np.zeros_like(ids)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    is_input, generated, logprobs = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
    for index, answer in enumerate(outputs):
        rows, prompt = len(answer.token_ids) - 1, answer.record.num_prompt_tokens
        assert answer.record.ids.shape[0] == rows and answer.record.valid is None, "the demo asks for all rows"
        tokens[index, :rows], targets[index, :rows] = answer.token_ids[:-1], answer.token_ids[1:]
        ids[index, :rows], shifted[index, :rows] = answer.record.ids, np.roll(answer.record.ids, 1, axis=0)
        is_input[index, :rows], generated[index, prompt - 1 : rows] = True, True
        logprobs[index, prompt - 1 : rows] = answer.logprobs
    return _Batch(
        tokens=tokens,
        targets=targets,
        generated=generated,
        logprobs=logprobs,
        ids=ids,
        shifted=shifted,
        is_input=is_input,
    )


def _max_difference(a: np.ndarray, b: np.ndarray, mask: Bool[np.ndarray, "B S"]) -> float:
    return float(np.abs(a[mask] - b[mask]).max()) if mask.any() else float("nan")  # NaN passes no check
