"""Events of requests: seven kinds one by one, and random mixtures; every row is compared with the MoE probe.

A `ScheduleSetup` has the bench, the vocabulary and other weights. Runs on any device.
Dims: R rows, S tokens of a sequence."""

import dataclasses
from collections.abc import Callable

import numpy as np

from oracles.driver import Bench, assert_all_faithful, expected_ids, request
from routed_experts.replay.turns import merge_turns


@dataclasses.dataclass(frozen=True)
class ScheduleSetup:
    """A bench whose experts are probed, its vocabulary, and weights to change to: a state for a small integer."""

    bench: Bench
    vocab_size: int
    other_weights: Callable[[int], object]

    def prompt(self, rng, length):
        """Random token ids."""
        return rng.integers(0, self.vocab_size, size=length).astype(np.int32)


def sequence_tokens(drive, rid):
    """Tokens of a request, as far as they are known."""
    req = drive.reqs[rid]
    return req.tokens[: req.num_known].copy()


def assert_merged(drive, rids, record, tokens):
    """R = S - 1 rows, all known, each as its first writer ran it, under the version of that writer."""
    assert record.valid is None and (record.start, record.num_rows, record.num_tokens) == (
        0,
        tokens.size - 1,
        tokens.size,
    )
    versions = [version for low, high, version in record.version_spans for _ in range(low, high)]
    first = 0
    for rid in rids:
        if drive.outputs[rid].end.routed_experts is None:
            continue
        end = drive.reqs[rid].num_known - 1
        np.testing.assert_array_equal(record.ids[first:end], expected_ids(drive, rid, first, end))
        passes = [drive.log.rows[rid][position] for position in range(first, end)]
        assert versions[first:end] == [drive.log.forwards[forward][1] for forward, _ in passes]
        first = end
    assert first == record.num_rows


def assert_chain(drive, rids):
    """The parts of a rollout that was aborted and sent again merge to the rows of their first writers."""
    turns = [(sequence_tokens(drive, rid), drive.outputs[rid].end.routed_experts) for rid in rids]
    turns = [(tokens, record) for tokens, record in turns if record is not None]
    if turns:
        assert_merged(drive, rids, merge_turns(turns, turns[-1][0]), turns[-1][0])
    assert len(turns) < len(rids) or turns[-1][0].size == sequence_tokens(drive, rids[-1]).size


def some_requests(setup, rng, *, count=6, max_tokens=12, **options):
    """Greedy and sampled requests in turn."""
    lengths = rng.integers(1, 50, count)
    return [
        request(f"r{i}", setup.prompt(rng, length), max_tokens, temperature=float(i % 2), seed=i, **options)
        for i, length in enumerate(lengths.tolist())
    ]


def _cold(setup, rng):
    drive = setup.bench.drive()
    drive.run(*some_requests(setup, rng), check=False)
    return drive


def _chunked(setup, rng):
    drive = setup.bench.drive(chunked_prefill_size=5)
    drive.run(*some_requests(setup, rng), check=False)
    return drive


def _prefix_hit(setup, rng):
    drive, page = setup.bench.drive(), setup.bench.args.page_size
    shared = setup.prompt(rng, 2 * page + 5)
    drive.run(request("writer", shared, 2 * page), check=False)
    written = sequence_tokens(drive, "writer")
    cuts = (page + 1, 2 * page + 5, 3 * page + 2)
    drive.run(
        *(request(f"r{cut}", np.concatenate([written[:cut], setup.prompt(rng, 3)]), 8) for cut in cuts), check=False
    )
    assert [drive.outputs[f"r{cut}"].end.cached_tokens for cut in cuts] == [cut // page * page for cut in cuts]
    return drive


def _choices(setup, rng):
    drive, prompt = setup.bench.drive(), setup.prompt(rng, 41)
    drive.run(
        *(request(f"c{j}", prompt, 12, choice=j, group="one", temperature=1.0, seed=5) for j in range(4)), check=False
    )
    assert sum(output.end.cached_tokens > 0 for output in drive.outputs.values()) == 3
    return drive


def _retracted(setup, rng):
    drive = setup.bench.drive(chunked_prefill_size=7)
    drive.run(
        *some_requests(setup, rng), before_step=lambda step: step % 3 == 2 and drive.retract_victim(), check=False
    )
    assert drive.core.ranks[0].num_retracted > 3
    return drive


def _aborted_and_continued(setup, rng):
    drive, prompt = setup.bench.drive(), setup.prompt(rng, 21)
    drive.run(request("a", prompt, 30), before_step=lambda step: step == 12 and drive.core.abort("a"), check=False)
    part = sequence_tokens(drive, "a")
    assert prompt.size < part.size < prompt.size + 30
    drive.run(request("b", part, 30 - (part.size - prompt.size)), check=False)
    assert_chain(drive, ["a", "b"])
    return drive


def _weights_updated(setup, rng):
    drive, caches = setup.bench.drive(chunked_prefill_size=8), {5: "flush", 15: "keep"}
    reqs = some_requests(setup, rng, max_tokens=24)

    def change(step):
        if step in caches:
            drive.update_weights(setup.other_weights(1 + step % 2), cache=caches[step])

    drive.run(*reqs, before_step=change, check=False)
    assert max(len(output.end.routed_experts.version_spans) for output in drive.outputs.values()) == 3
    return drive


EVENTS = {
    "cold": _cold,
    "chunked": _chunked,
    "prefix hit": _prefix_hit,
    "n > 1": _choices,
    "retracted": _retracted,
    "aborted and continued": _aborted_and_continued,
    "weights updated": _weights_updated,
}


def run_event(setup, name, seed=0):
    """Run one kind of event and compare every row; returns the number of rows. AssertionError names the first wrong
    request."""
    return assert_all_faithful(EVENTS[name](setup, np.random.default_rng(seed)))


class _Mixture:
    """Arrivals, chunks, prefix hits, n > 1, retraction, aborts and continuation, flushes, weight updates, at random."""

    def __init__(self, setup, seed):
        self.setup, self.seed, self.rng = setup, seed, np.random.default_rng(1000 + seed)
        chunk = (None, 5, 11)[seed % 3]
        pages = 240 // setup.bench.args.page_size  # too few for all
        self.drive = setup.bench.drive(pages=pages, chunked_prefill_size=chunk, disable_radix_cache=seed % 7 == 6)
        self.shared, self.chains = setup.prompt(self.rng, 30), {}

    def arrive(self):
        """One prompt, of one to three choices."""
        rng = self.rng
        prompt = np.concatenate([self.shared[: rng.integers(0, 31)], self.setup.prompt(rng, rng.integers(1, 12))])
        for choice in range(rng.integers(1, 4)):
            rid = f"r{len(self.chains)}"
            options = dict(choice=choice, group=f"g{len(self.chains) - choice}", temperature=1.0, seed=self.seed)
            self.drive.add(request(rid, prompt, int(rng.integers(2, 16)), **options))
            self.chains[rid] = [rid]

    def continue_aborted(self):
        """Send aborted requests again, with the tokens they have."""
        drive = self.drive
        for chain in self.chains.values():
            output, req = drive.outputs[chain[-1]], drive.reqs[chain[-1]]
            if (
                output.end is not None
                and output.end.finish_reason.type == "abort"
                and req.max_len > req.num_known
                and len(chain) < 4
            ):
                rid = f"{chain[0]}+{len(chain)}"
                drive.add(
                    request(
                        rid,
                        sequence_tokens(drive, chain[-1]),
                        req.max_len - req.num_known,
                        temperature=1.0,
                        seed=self.seed,
                    )
                )
                chain.append(rid)

    def random_event(self, _step):
        """One event, or none."""
        event, drive, rng = self.rng.random(), self.drive, self.rng
        if event < 0.1:
            drive.retract_victim()
        elif event < 0.3 and drive.core.request_table.num_live:
            drive.core.abort(str(rng.choice(drive.core.request_table.live())))
        elif event < 0.34:
            drive.core.flush_cache()
        elif event < 0.39:
            drive.update_weights(
                self.setup.other_weights(int(rng.integers(1, 3))), cache=("flush", "keep")[rng.integers(2)]
            )
        elif event < 0.6:
            self.continue_aborted()

    @property
    def has_more(self):
        """Whether an aborted rollout can be continued."""
        ends = [(self.drive.outputs[chain[-1]].end.finish_reason.type, len(chain)) for chain in self.chains.values()]
        return any(end == "abort" and length < 4 for end, length in ends)


def run_schedule(setup, seed):
    """Run one random schedule and compare every row; returns the number of rows. AssertionError names the first wrong
    request."""
    mixture = _Mixture(setup, seed)
    for _ in range(3):
        mixture.arrive()
    mixture.drive.run(before_step=mixture.random_event, check=False)
    while mixture.has_more:
        mixture.continue_aborted()
        mixture.drive.run(check=False)
    rows = assert_all_faithful(mixture.drive)
    for chain in mixture.chains.values():
        assert_chain(mixture.drive, chain)
    return rows
