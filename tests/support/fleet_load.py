"""Load on a fleet: threads that generate all the time, and what each request met: when it was sent and answered, and
with which weights it began."""

import contextlib
import dataclasses
import threading
import time

import httpx
import numpy as np

from routed_experts.formats.meta_info import record_from_meta_info


@dataclasses.dataclass(frozen=True)
class Met:
    """One request. `failure`: the exception, or the status of an error; `spans`: counts of the weights of its rows;
    `labels`: theirs."""

    sent: float
    ended: float
    failure: object
    spans: tuple[tuple[int, int, int], ...]
    labels: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def first_version(self):
        return self.spans[0][2]


class Load:
    """`with Load(fleet) as load`: runs until the block ends; then `met` has every request."""

    def __init__(self, fleet, num_threads=6, max_new_tokens=8):
        self._fleet, self._max_new_tokens = fleet, max_new_tokens
        self._stop, self._lock, self.met = threading.Event(), threading.Lock(), []
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(num_threads)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def wait_for(self, count, seconds=60):
        """Wait until so many more requests have ended."""
        target, deadline, clock = len(self.met) + count, time.monotonic() + seconds, threading.Event()
        while len(self.met) < target:
            assert time.monotonic() < deadline, (len(self.met), target)
            clock.wait(0.02)

    def failures(self):
        return [met.failure for met in self.met if met.failure is not None]

    def check_versions(self, committed, updates=()):
        """K8. `committed`: versions that were ever served; `updates`: (version, when the call had returned)."""
        answered = sorted((met for met in self.met if met.failure is None), key=lambda met: met.sent)
        assert answered
        for met in answered:
            versions = [version for _, _, version in met.spans]
            assert versions == sorted(versions) and set(versions) <= set(committed), met
        for met in answered:  # what had begun when another was answered is not younger than it
            earlier = [other.first_version for other in answered if other.ended <= met.sent]
            assert not earlier or max(earlier) <= met.first_version, (met, max(earlier))
            promised = [version for version, returned in updates if returned <= met.sent]
            assert not promised or max(promised) <= met.first_version, (met, promised)

    def check_labels(self, expected):
        """`expected`: labels by count. Each of these counts was met, and always under its label."""
        told = {(count, label) for met in self.met for count, label in met.labels.items()}
        assert {pair for pair in told if pair[0] in expected} == set(expected.items()), told

    def _run(self, seed):
        rng = np.random.default_rng(seed)
        with self._fleet.client() as client:
            while not self._stop.is_set():
                body = {
                    "input_ids": rng.integers(3, 313, 12).tolist(),
                    "sampling_params": {"max_new_tokens": self._max_new_tokens, "ignore_eos": True},
                    "return_routed_experts": True,
                }
                sent = time.monotonic()
                failure, spans, labels = None, (), {}
                try:
                    response = client.post("/generate", json=body)
                    failure = None if response.status_code == 200 else (response.status_code, response.text[:200])
                    if failure is None:
                        record = record_from_meta_info(response.json())
                        spans, labels = record.version_spans, record.labels
                except httpx.HTTPError as error:
                    failure = error
                with self._lock:
                    self.met.append(Met(sent, time.monotonic(), failure, spans, labels))
                if failure is not None:
                    with contextlib.suppress(httpx.HTTPError):
                        client.get("/health/live")
