"""The report against loops over tokens in float64; the canary against counting; the gate against its limit."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts import InvalidRequestError, RoutingReplayError
from routed_experts.replay import CanaryGate, RoutedBatch, canary, mismatch_report

SHAPE = (4, 50)


def logprobs(seed=0, gap=0.1):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, SHAPE)
    return rollout, np.minimum(rollout + gap * rng.standard_normal(SHAPE), 0.0), rng.random(SHAPE) < 0.8


def test_the_report_equals_a_loop():
    rollout, train, mask = logprobs()
    rollout[~mask] = np.nan  # what is masked is not looked at
    report = mismatch_report(rollout, train, mask)
    d = [train[at] - rollout[at] for at in np.ndindex(SHAPE) if mask[at]]
    mean = lambda values: math.fsum(values) / len(d)  # noqa: E731
    expected = dict(
        num_tokens=len(d),
        k1=mean([-x for x in d]),
        k3=mean([math.exp(x) - 1 - x for x in d]),
        k3_reverse=mean([math.exp(-x) - 1 + x for x in d]),
        mean_abs=mean([abs(x) for x in d]),
        max_abs=max(abs(x) for x in d),
        f_1_1=mean([max(math.exp(x), math.exp(-x)) > 1.1 for x in d]),
        f_2=mean([max(math.exp(x), math.exp(-x)) > 2 for x in d]),
        mult_prob_error=mean([math.exp(abs(x)) for x in d]),
    )
    for name, value in expected.items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-12), name
    assert 0 < report.f_1_1 < 1 and report.k3_low < report.k3 < report.k3_high
    p, q = np.exp(rollout[mask]), np.exp(train[mask])
    assert report.pearson == pytest.approx(np.sum((p - p.mean()) * (q - q.mean())) / (p.size * p.std() * q.std()))


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says():
    """Of 200 draws whose mean k3 is known, 95 % should be covered; fewer than 85 % would be no interval."""
    rng, hits = np.random.default_rng(1), 0
    draws = rng.normal(0, 0.1, (200, 400))
    truth = math.exp(0.005) - 1
    for d in draws:
        report = mismatch_report(np.full(400, -3.0), -3.0 + d, np.ones(400, bool))
        hits += report.k3_low <= truth <= report.k3_high
    assert 170 <= hits <= 199


def test_equal_logprobs_have_no_mismatch():
    rollout, _, mask = logprobs()
    report = mismatch_report(rollout, rollout, mask)
    assert (report.k1, report.k3, report.max_abs, report.f_1_1, report.k3_high) == (0, 0, 0, 0, 0)
    assert report.mult_prob_error == 1 and report.pearson == pytest.approx(1)


def test_each_lag_has_a_report_of_its_own():
    rollout, train, mask = logprobs(2)
    lags = np.random.default_rng(3).integers(0, 3, SHAPE)
    report = mismatch_report(rollout, train, mask, versions=lags)
    assert set(report.by_lag) == {0, 1, 2}
    for lag, part in report.by_lag.items():
        assert part == mismatch_report(rollout, train, mask & (lags == lag))


def batch(seed=4):
    rng = np.random.default_rng(seed)
    pad = np.arange(SHAPE[1])[None] >= rng.integers(30, 50, (SHAPE[0], 1))
    valid = ~pad & (rng.random(SHAPE) < 0.6)
    missed = rng.integers(0, 5, (*SHAPE, 3)).astype(np.uint8)
    return RoutedBatch(jnp.zeros((*SHAPE, 3, 4), jnp.uint8), jnp.asarray(valid), jnp.asarray(pad)), missed, valid, pad


def test_misses_are_counted_by_layer_and_fallback_rows_are_reported():
    rollout, train, mask = logprobs()
    routed, missed, valid, pad = batch()
    report = mismatch_report(rollout, train, mask, slot_miss=missed, routed=routed)
    for layer in range(3):
        misses = [int(missed[at][layer]) for at in np.ndindex(SHAPE) if valid[at]]
        assert report.slot_miss[layer] == pytest.approx(sum(misses) / len(misses) / 4)
    assert report.fallback_frac == pytest.approx(1 - valid.sum() / (~pad).sum())
    value = jax.jit(canary)(jnp.asarray(missed), routed)
    assert float(value) == pytest.approx(np.mean(report.slot_miss), rel=1e-6)


def test_without_a_valid_row_the_canary_is_silent():
    routed, missed, *_ = batch()
    nothing = RoutedBatch(routed.ids, jnp.zeros(SHAPE, bool), routed.pad)
    assert float(canary(jnp.asarray(missed), nothing)) == 0.0


def test_misses_of_other_rows_are_refused_when_they_are_traced():
    """Without a comparison they would be broadcast: 2 samples on the rows of one give a share of 2."""
    routed, missed, *_ = batch()
    for other in (missed[:1], missed[..., :2], missed[:, :1], missed[..., 0]):
        with pytest.raises(
            InvalidRequestError, match=r"slot_miss is .*: give output and input of one forward"
        ) as caught:
            jax.jit(canary)(jnp.asarray(other), routed)
        assert caught.value.param == "slot_miss"
    first = RoutedBatch(routed.ids, routed.valid[:, :1], routed.pad[:, :1])
    with pytest.raises(InvalidRequestError, match="slot_miss"):
        canary(jnp.asarray(missed), first)


def test_misses_without_their_rows_are_refused():
    routed, missed, *_ = batch()
    for args in ((None, routed), (missed, None), (missed, routed.ids)):
        with pytest.raises(InvalidRequestError, match=r"slot_miss is \[\]|routed is .*; expected a RoutedBatch"):
            canary(*args)


def misses(index=None, value=0.0, **options):
    array = np.zeros((*SHAPE, 3), **options)
    if index is not None:
        array[index] = value
    return {"slot_miss": array, "routed": batch()[0]}


def same(r, t, m):
    return r, t, m


def valid_position():
    return (*np.argwhere(np.asarray(batch()[0].valid))[0], 1)


def test_misses_of_rows_that_are_not_valid_are_not_looked_at():
    routed, missed, valid, _ = batch()
    odd = missed.astype(np.float32)
    odd[~valid] = np.nan
    reports = [mismatch_report(*logprobs(), slot_miss=array, routed=routed) for array in (missed, odd)]
    assert reports[0] == reports[1]


BAD = {
    "complex": (lambda r, t, m: (r * (1 + 2j), t, m), {}, "rollout_logprobs"),
    "words": (lambda r, t, m: (r, np.full(SHAPE, "a"), m), {}, "train_logprobs"),
    "ragged": (lambda r, t, m: ([[-1.0], [-1.0, -2.0]], t, m), {}, "rollout_logprobs"),
    "a ragged mask": (lambda r, t, m: (r, t, [[True], [True, False]]), {}, "mask"),
    "ragged lags": (same, {"versions": [[0], [0, 1]]}, "versions"),
    "misses of more layers": (
        same,
        {"slot_miss": np.zeros((*SHAPE, 5)), "routed": batch()[0]},
        "slot_miss",
    ),
    "misses without layers": (same, {"slot_miss": np.zeros(SHAPE), "routed": batch()[0]}, "slot_miss"),
    "misses that are no number": (same, misses(valid_position(), np.nan), "slot_miss"),
    "more misses than slots": (same, misses(valid_position(), 5), "slot_miss"),
    "negative misses": (same, misses(valid_position(), -1), "slot_miss"),
    "complex misses": (same, misses(dtype=np.complex64), "slot_miss"),
    "misses as booleans": (same, misses(dtype=bool), "slot_miss"),
    "shape": (lambda r, t, m: (r[:1], t, m), {}, "rollout_logprobs"),
    "mask": (lambda r, t, m: (r, t, m.astype(int)), {}, "mask"),
    "empty": (lambda r, t, m: (r, t, m & False), {}, "mask"),
    "nan": (lambda r, t, m: (r, np.where(m, np.nan, t), m), {}, "train_logprobs"),
    "probabilities": (lambda r, t, m: (np.exp(r), t, m), {}, "rollout_logprobs"),
    "misses alone": (lambda r, t, m: (r, t, m), {"slot_miss": np.zeros((*SHAPE, 3))}, "slot_miss"),
    "misses of another": (
        lambda r, t, m: (r, t, m),
        {"slot_miss": np.zeros((1, 2, 3)), "routed": batch()[0]},
        "slot_miss",
    ),
    "lags": (lambda r, t, m: (r, t, m), {"versions": np.zeros(SHAPE)}, "versions"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_compared_is_named(kind):
    change, more, param = BAD[kind]
    with pytest.raises(InvalidRequestError) as caught:
        mismatch_report(*change(*logprobs()), **more)
    assert caught.value.param == param


def test_the_gate_raises_above_its_limit_and_for_what_is_no_number(caplog):
    gate = CanaryGate()
    assert gate(jnp.float32(0.04)) == pytest.approx(0.04)
    for value in (0.051, 0.4, float("nan")):
        with pytest.raises(RoutingReplayError, match=r"the limit is 0\.05"):
            gate(value)
    with caplog.at_level(logging.WARNING):
        assert CanaryGate(limit=0.1, action="log")(0.2) == 0.2
    assert "canary=0.2" in caplog.text
    for value in ("a", None, np.zeros(3), [0.1], 1j, True, [[1], [2, 3]]):
        with pytest.raises(InvalidRequestError, match=r"value is ") as caught:
            gate(value)
        assert caught.value.param == "value"
    assert gate(0) == gate(np.float64(0)) == gate(jnp.bfloat16(0)) == 0.0
    for kwargs, param in (
        (dict(limit=0), "limit"),
        (dict(limit=True), "limit"),
        (dict(limit=2.0), "limit"),
        (dict(action="stop"), "action"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            CanaryGate(**kwargs)
        assert caught.value.param == param
