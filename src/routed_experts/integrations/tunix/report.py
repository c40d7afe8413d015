"""RoutingReport: how far a policy is from the rollout of an example, on its rows or routing live.

Dims: B sequences, C tokens of a padded answer, S of a padded prompt and answer, M MoE layers, K experts per token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, UInt

from routed_experts.integrations.tunix.loss import read_rows
from routed_experts.integrations.tunix.policy import Policy
from routed_experts.replay import RoutedBatch, canary, mismatch_report


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReport:
    """A trainer against the rollout of an example. `canary`: share of replayed slots that the live router would not
    have chosen; `flipped`: share of replayed tokens with such a slot in any layer; `valid`: share of tokens that have
    a row; `k3`, and `f_1_1`, the share of sampled tokens whose probability ratio is beyond 1.1, as in
    MismatchReport."""

    canary: float
    flipped: float
    valid: float
    k3: float
    f_1_1: float


def routing_report(
    policy: Policy,
    example: Any,
    rollout_logprobs: Float[np.ndarray, "B C"],
    *,
    pad_id: int,
    temperature: float = 1.0,
    replayed: bool = True,
) -> RoutingReport:
    """Compare the policy, on the rows of a ReplayExample (or, not `replayed`, routing live), with the logprobs of its
    rollout. They must be of the whole distribution at this `temperature`, or k3 tells of top-p and top-k too."""
    logprobs, slot_miss, share = _replayed_pass(policy, example, pad_id, temperature, replayed)
    valid = example.routed_valid
    width = example.completion_ids.shape[1]
    mask = np.asarray(example.completion_mask, bool)
    report = mismatch_report(rollout_logprobs, np.asarray(logprobs)[:, -width:], mask) if mask.any() else None
    rows = np.asarray(valid) if replayed else np.zeros(valid.shape, bool)
    missed = np.any(np.asarray(slot_miss) > 0, axis=-1)
    tokens = np.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    num_tokens = int(np.count_nonzero(tokens != pad_id))
    return RoutingReport(
        canary=float(share),
        flipped=float(missed[rows].mean()) if rows.any() else 0.0,
        valid=float(rows.sum()) / max(num_tokens, 1),
        k3=0.0 if report is None else report.k3,
        f_1_1=0.0 if report is None else report.f_1_1,
    )


def routing_pass(
    policy: Policy, example: Any, *, pad_id: int, temperature: float = 1.0, replayed: bool = True
) -> Float32[Array, "B S-1"]:
    """Logprobs of tokens 1 to S - 1 of a ReplayExample under the policy, on its rows or routing live."""
    return _replayed_pass(policy, example, pad_id, temperature, replayed)[0]


def _replayed_pass(policy: Policy, example: Any, pad_id: int, temperature: float, replayed: bool) -> tuple[Any, ...]:
    graphdef, state = nnx.split(policy)
    ids, valid = read_rows(example)
    tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
    valid = valid if replayed else jnp.zeros_like(valid)
    return _trainer_pass(graphdef, state, tokens, ids, valid, pad_id, temperature or 1.0)


@functools.partial(jax.jit, static_argnames=("pad_id", "temperature"))
def _trainer_pass(
    graphdef: Any,
    state: Any,
    tokens: Int[Array, "B S"],
    ids: UInt[Array, "B S M K"],
    valid: Bool[Array, "B S"],
    pad_id: int,
    temperature: float,
) -> tuple[Float32[Array, "B S-1"], Array, Float32[Array, ""]]:
    """Logprobs of tokens 1 to S - 1, slot misses and canary."""
    policy: Policy = nnx.merge(graphdef, state)
    real = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
    out = policy.run(tokens, positions, None, None, real.astype(jnp.int32), ids=ids, valid=valid)
    assert out.slot_miss is not None, "a policy has MoE layers"
    logprobs = jax.nn.log_softmax(out.logits[:, :-1] / temperature)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return chosen, out.slot_miss, canary(out.slot_miss, RoutedBatch(ids, valid & real, ~real))
