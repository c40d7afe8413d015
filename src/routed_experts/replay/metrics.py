"""How far a trainer is from the rollout, and whether a replay is sound: mismatch report, canary, gate.

d = log p_train - log p_rollout of each sampled token. KL estimators k1 and k3 are Schulman's (2020, "Approximating KL
divergence"): k1 = mean(-d), k3 = mean(e^d - 1 - d). The report is float64 on the host; the canary is a scalar on the
device. Dims: B sequences, S tokens, M MoE layers, K experts per token."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError, RoutingReplayError
from routed_experts.replay.batch import RoutedBatch

logger = logging.getLogger(__name__)
_RESAMPLES, _BLOCKS = 1000, 2048  # of the bootstrap; beyond so many tokens, neighbours form blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReport:
    """Training against rollout, over the tokens of the mask. `k3_low` and `k3_high`: 95 % bootstrap interval; `f_1_1`,
    `f_2`: share of tokens whose probability ratio is beyond 1.1 or 2 either way; `slot_miss`: mean share of missed
    slots by MoE layer over replayed rows; `fallback_frac`: share of tokens that went to the live router; `by_lag`: the
    same for each weight-version lag."""

    num_tokens: int
    k1: float
    k3: float
    k3_low: float
    k3_high: float
    k3_reverse: float
    mean_abs: float
    max_abs: float
    f_1_1: float
    f_2: float
    mult_prob_error: float
    pearson: float
    slot_miss: tuple[float, ...] | None = None
    fallback_frac: float | None = None
    by_lag: Mapping[int, "MismatchReport"] = dataclasses.field(default_factory=dict[int, "MismatchReport"])


def mismatch_report(
    rollout_logprobs: Any,
    train_logprobs: Any,
    mask: Any,
    *,
    slot_miss: Any = None,
    routed: RoutedBatch | None = None,
    versions: Any = None,
) -> MismatchReport:
    """Compare logprobs [B, S] (or any one shape) where `mask` is true: entry t is log p(token t | tokens before it),
    both under the sampling distribution. `slot_miss` [B, S, M] and `routed`, both or neither, are output and input
    of `forward`. `versions`: how many weight versions the rollout of each entry lags behind, same shape. Raises
    InvalidRequestError for shapes that differ, for logprobs that are not finite numbers of at most 0, for misses
    that are not numbers from 0 to K, and for an empty mask."""
    rollout, train, chosen = _checked(rollout_logprobs, train_logprobs, mask)
    report = _report(rollout[chosen], train[chosen])
    if (slot_miss is None) != (routed is None):
        raise InvalidRequestError(
            "slot_miss and routed belong together: output and input of one forward", param="slot_miss"
        )
    if routed is not None:
        missed, shares = _checked_misses(slot_miss, routed), np.asarray(routed.valid)
        tokens = ~np.asarray(routed.pad)
        by_layer = (
            missed[shares].mean(axis=0, dtype=np.float64) / routed.ids.shape[-1]
            if shares.any()
            else np.zeros(missed.shape[-1])
        )
        fallback = 1.0 - float(np.count_nonzero(shares)) / max(int(np.count_nonzero(tokens)), 1)
        report = dataclasses.replace(report, slot_miss=tuple(by_layer.tolist()), fallback_frac=fallback)
    if versions is not None:
        lags = _to_array(versions, "versions")
        if lags.shape != chosen.shape or lags.dtype.kind not in "iu":
            text = f"versions is {lags.dtype}{list(lags.shape)}; expected integers {list(chosen.shape)}, a lag a token"
            raise InvalidRequestError(text, param="versions")
        by_lag = {
            int(lag): _report(rollout[chosen & (lags == lag)], train[chosen & (lags == lag)])
            for lag in np.unique(lags[chosen])
        }
        report = dataclasses.replace(report, by_lag=by_lag)
    return report


def canary(slot_miss: UInt8[Array, "B S M"], routed: RoutedBatch) -> Float[Array, ""]:
    """Mean share of replayed slots that the live router would not have chosen, over valid rows; 0 where there are none.
    Return it with the loss: rows of other tokens, layers or samples raise it from below 3 % to above 15 %. Raises
    InvalidRequestError, under jit when it is traced, for misses that are not of these rows."""
    _check_one_forward(np.shape(slot_miss), routed)
    shares = jnp.where(routed.valid[..., None], slot_miss.astype(jnp.float32), 0.0)
    slots = jnp.sum(routed.valid, dtype=jnp.float32) * slot_miss.shape[-1] * routed.ids.shape[-1]
    return jnp.sum(shares) / jnp.maximum(slots, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class CanaryGate:
    """Checks a canary outside jit. Off-policy drift raises the canary too: set the limit for the setup, and log it."""

    limit: float = 0.05
    action: Literal["raise", "log"] = "raise"

    def __post_init__(self) -> None:
        """Check both fields."""
        if isinstance(self.limit, bool) or not isinstance(self.limit, int | float) or not 0.0 < self.limit <= 1.0:
            raise InvalidRequestError(
                f"limit={self.limit!r} must be a share in (0, 1]; 0.05 is the default", param="limit"
            )
        if self.action not in ("raise", "log"):
            raise InvalidRequestError(f"action={self.action!r} is unknown; choose raise or log", param="action")

    def __call__(self, value: float | Array) -> float:
        """Return the value as a float. Above the limit, or NaN, raises RoutingReplayError, or warns with action
        "log". Raises InvalidRequestError for what is no real number."""
        array = _to_array(jax.device_get(value), "value")
        if array.shape != () or not _is_real(array):
            text = f"value is {array.dtype}{list(array.shape)}; expected one real number: give what canary returns"
            raise InvalidRequestError(text, param="value")
        share = float(array)
        if share <= self.limit:
            logger.debug("canary: %.4f of replayed slots are not the live router's", share)
            return share
        text = (
            f"canary={share:.4f}: this share of the replayed slots is not the live router's choice; the limit is "
            f"{self.limit}. Rows of other tokens, layers, samples or weights cause this: check the alignment, or raise "
            "the limit for off-policy steps"
        )
        if self.action == "raise":
            raise RoutingReplayError(text)
        logger.warning("%s", text)
        return share


def _checked(
    rollout: Any, train: Any, mask: Any
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."], Bool[np.ndarray, "..."]]:
    chosen = _to_array(mask, "mask")
    if chosen.dtype != np.bool_:
        raise InvalidRequestError(f"mask is {chosen.dtype}{list(chosen.shape)}; expected booleans", param="mask")
    arrays: dict[str, Float[np.ndarray, ...]] = {}
    for name, logprobs in (("rollout_logprobs", rollout), ("train_logprobs", train)):
        array = _to_array(logprobs, name)
        if not _is_real(array):
            text = f"{name} is {array.dtype}{list(array.shape)}; expected real numbers"
            raise InvalidRequestError(text, param=name)
        if array.shape != chosen.shape:
            raise InvalidRequestError(
                f"{name} is {list(array.shape)}, mask {list(chosen.shape)}; expected one shape", param=name
            )
        wide = array.astype(np.float64)
        bad = chosen & ~(np.isfinite(wide) & (wide <= 1e-6))
        if bad.any():
            index = np.argwhere(bad)[0].tolist()
            text = (
                f"{name}{index} is {wide[tuple(index)]}; expected finite logprobs of at most 0 where the mask is true"
            )
            raise InvalidRequestError(text, param=name)
        arrays[name] = wide
    if not chosen.any():
        raise InvalidRequestError("mask has no true entry; there is nothing to compare", param="mask")
    return arrays["rollout_logprobs"], arrays["train_logprobs"], chosen


def _to_array(values: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as cause:  # lists of several lengths
        text = f"{name} is {short_repr(values)} that is no array ({cause}); give rows of one length"
        raise InvalidRequestError(text, param=name) from cause


def _is_real(array: np.ndarray) -> bool:
    """Whether it holds integers or floats, bfloat16 among them."""
    return jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)


def _check_one_forward(shape: tuple[int, ...], routed: RoutedBatch) -> None:
    """Raise unless misses of this shape [B, S, M] are of the rows."""
    if not isinstance(routed, RoutedBatch):
        raise InvalidRequestError(f"routed is {type(routed).__name__}; expected a RoutedBatch", param="routed")
    rows = (routed.ids.shape[:3], (*routed.valid.shape, *routed.ids.shape[2:3]))
    if any(shape != expected for expected in rows):
        text = (
            f"slot_miss is {list(shape)}, and routed has ids {list(routed.ids.shape)} and valid "
            f"{list(routed.valid.shape)}; expected [B, S, M], [B, S, M, K] and [B, S]: give output and input of one "
            "forward"
        )
        raise InvalidRequestError(text, param="slot_miss")


def _checked_misses(slot_miss: Any, routed: RoutedBatch) -> np.ndarray:
    """Misses [B, S, M] of the rows, each from 0 to K where the row is valid."""
    missed, top_k = _to_array(slot_miss, "slot_miss"), routed.ids.shape[-1]
    _check_one_forward(missed.shape, routed)
    if not _is_real(missed):
        raise InvalidRequestError(f"slot_miss is {missed.dtype}; expected real numbers", param="slot_miss")
    wide = missed.astype(np.float64)
    bad = np.asarray(routed.valid)[..., None] & ~((wide >= 0) & (wide <= top_k))
    if bad.any():
        index = np.argwhere(bad)[0].tolist()
        text = (
            f"slot_miss{index} is {wide[tuple(index)]}; expected 0 to {top_k}, the slots of a row; give what forward "
            "put out"
        )
        raise InvalidRequestError(text, param="slot_miss")
    return missed


def _report(rollout: Float[np.ndarray, " T"], train: Float[np.ndarray, " T"]) -> MismatchReport:
    d = train - rollout
    terms, distance = np.exp(d) - 1 - d, np.abs(d)
    low, high = _interval(terms)
    spread = [float(np.std(np.exp(side))) for side in (rollout, train)]
    pearson = (
        float(np.corrcoef(np.exp(rollout), np.exp(train))[0, 1])
        if min(spread) > 0
        else 1.0
        if distance.max() == 0
        else 0.0
    )
    return MismatchReport(
        num_tokens=int(d.size),
        k1=float(np.mean(-d)),
        k3=float(np.mean(terms)),
        k3_low=low,
        k3_high=high,
        k3_reverse=float(np.mean(np.exp(-d) - 1 + d)),
        mean_abs=float(np.mean(distance)),
        max_abs=float(np.max(distance)),
        f_1_1=float(np.mean(distance > np.log(1.1))),
        f_2=float(np.mean(distance > np.log(2.0))),
        mult_prob_error=float(np.mean(np.exp(distance))),
        pearson=pearson,
    )


def _interval(terms: Float[np.ndarray, " T"]) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean, over blocks of neighbours; the same draw each time."""
    edges: Int[np.ndarray, " blocks"] = np.linspace(0, terms.size, min(terms.size, _BLOCKS) + 1).astype(np.int64)
    sums, counts = np.add.reduceat(terms, edges[:-1]), np.diff(edges)
    draws = np.random.default_rng(0).integers(0, counts.size, (_RESAMPLES, counts.size))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
