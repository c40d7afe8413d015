"""What can happen to requests: seven events one by one, and random mixtures of them; every row is judged by the probe.

Knows nothing of the model: a `Stage` says which benches, tokens and other weights there are. Runs on any device.
Dims: R rows, S tokens of a sequence."""

import dataclasses
from collections.abc import Callable

import numpy as np

from oracles.driver import Bench, assert_all_faithful, expected_ids, request
from routed_experts.replay.turns import merge_turns


@dataclasses.dataclass(frozen=True)
class Stage:
    """A bench whose experts are probed, its vocabulary, and weights to change to: a state for a small integer."""

    bench: Bench
    vocab_size: int
    other_weights: Callable[[int], object]

    def prompt(self, rng, length):
        """Random token ids."""
        return rng.integers(0, self.vocab_size, size=length).astype(np.int32)


def tokens_of(drive, rid):
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
    at = 0
    for rid in rids:
        if drive.told[rid].end.routed_experts is None:
            continue
        end = drive.reqs[rid].num_known - 1
        np.testing.assert_array_equal(record.ids[at:end], expected_ids(drive, rid, at, end))
        passes = [drive.log.rows[rid][position] for position in range(at, end)]
        assert versions[at:end] == [drive.log.forwards[forward][1] for forward, _ in passes]
        at = end
    assert at == record.num_rows


def assert_chain(drive, rids):
    """The parts of a rollout that was aborted and sent again merge to the rows of their first writers."""
    turns = [(tokens_of(drive, rid), drive.told[rid].end.routed_experts) for rid in rids]
    turns = [(own, record) for own, record in turns if record is not None]
    if turns:
        assert_merged(drive, rids, merge_turns(turns, turns[-1][0]), turns[-1][0])
    assert len(turns) < len(rids) or turns[-1][0].size == tokens_of(drive, rids[-1]).size


def some_requests(stage, rng, *, count=6, max_tokens=12, **options):
    """Greedy and sampled requests in turn."""
    lengths = rng.integers(1, 50, count)
    return [
        request(f"r{i}", stage.prompt(rng, length), max_tokens, temperature=float(i % 2), seed=i, **options)
        for i, length in enumerate(lengths.tolist())
    ]


def _cold(stage, rng):
    drive = stage.bench.drive()
    drive.run(*some_requests(stage, rng), check=False)
    return drive


def _chunked(stage, rng):
    drive = stage.bench.drive(chunked_prefill_size=5)
    drive.run(*some_requests(stage, rng), check=False)
    return drive


def _prefix_hit(stage, rng):
    drive, page = stage.bench.drive(), stage.bench.args.page_size
    shared = stage.prompt(rng, 2 * page + 5)
    drive.run(request("writer", shared, 2 * page), check=False)
    whole = tokens_of(drive, "writer")
    cuts = (page + 1, 2 * page + 5, 3 * page + 2)
    drive.run(
        *(request(f"r{cut}", np.concatenate([whole[:cut], stage.prompt(rng, 3)]), 8) for cut in cuts), check=False
    )
    assert [drive.told[f"r{cut}"].end.cached_tokens for cut in cuts] == [cut // page * page for cut in cuts]
    return drive


def _choices(stage, rng):
    drive, prompt = stage.bench.drive(), stage.prompt(rng, 41)
    drive.run(
        *(request(f"c{j}", prompt, 12, choice=j, group="one", temperature=1.0, seed=5) for j in range(4)), check=False
    )
    assert sum(told.end.cached_tokens > 0 for told in drive.told.values()) == 3
    return drive


def _retracted(stage, rng):
    drive = stage.bench.drive(chunked_prefill_size=7)
    drive.run(
        *some_requests(stage, rng), before_step=lambda step: step % 3 == 2 and drive.retract_victim(), check=False
    )
    assert drive.core.scheduler.num_retracted > 3
    return drive


def _aborted_and_continued(stage, rng):
    drive, prompt = stage.bench.drive(), stage.prompt(rng, 21)
    drive.run(request("a", prompt, 30), before_step=lambda step: step == 12 and drive.core.abort("a"), check=False)
    part = tokens_of(drive, "a")
    assert prompt.size < part.size < prompt.size + 30
    drive.run(request("b", part, 30 - (part.size - prompt.size)), check=False)
    assert_chain(drive, ["a", "b"])
    return drive


def _weights_updated(stage, rng):
    drive, caches = stage.bench.drive(chunked_prefill_size=8), {5: "flush", 15: "keep"}
    reqs = some_requests(stage, rng, max_tokens=24)
    # noqa: E731
    change = lambda step: step in caches and drive.update_weights(stage.other_weights(1 + step % 2), cache=caches[step])
    drive.run(*reqs, before_step=change, check=False)
    assert max(len(told.end.routed_experts.version_spans) for told in drive.told.values()) == 3
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


def run_event(stage, name, seed=0):
    """Let one kind of event happen and judge every row; gives the number of rows. AssertionError names the first
    request that is wrong."""
    return assert_all_faithful(EVENTS[name](stage, np.random.default_rng(seed)))


class _Mixture:
    """Arrivals, chunks, prefix hits, n > 1, retraction, aborts and continuation, flushes, weight updates, at random."""

    def __init__(self, stage, seed):
        self.stage, self.seed, self.rng = stage, seed, np.random.default_rng(1000 + seed)
        chunk = (None, 5, 11)[seed % 3]
        pages = 240 // stage.bench.args.page_size  # too few for all
        self.drive = stage.bench.drive(pages=pages, chunked_prefill_size=chunk, disable_radix_cache=seed % 7 == 6)
        self.shared, self.chains = stage.prompt(self.rng, 30), {}

    def arrive(self):
        """One prompt, of one to three choices."""
        rng = self.rng
        prompt = np.concatenate([self.shared[: rng.integers(0, 31)], self.stage.prompt(rng, rng.integers(1, 12))])
        for choice in range(rng.integers(1, 4)):
            rid = f"r{len(self.chains)}"
            options = dict(choice=choice, group=f"g{len(self.chains) - choice}", temperature=1.0, seed=self.seed)
            self.drive.add(request(rid, prompt, int(rng.integers(2, 16)), **options))
            self.chains[rid] = [rid]

    def go_on(self):
        """Send the aborted ones again, with what they have."""
        drive = self.drive
        for chain in self.chains.values():
            told, req = drive.told[chain[-1]], drive.reqs[chain[-1]]
            if (
                told.end is not None
                and told.end.finish_reason.type == "abort"
                and req.max_len > req.num_known
                and len(chain) < 4
            ):
                rid = f"{chain[0]}+{len(chain)}"
                drive.add(
                    request(
                        rid, tokens_of(drive, chain[-1]), req.max_len - req.num_known, temperature=1.0, seed=self.seed
                    )
                )
                chain.append(rid)

    def meddle(self, _step):
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
                self.stage.other_weights(int(rng.integers(1, 3))), cache=("flush", "keep")[rng.integers(2)]
            )
        elif event < 0.6:
            self.go_on()

    @property
    def has_more(self):
        """Is there a rollout to go on with."""
        ends = [(self.drive.told[chain[-1]].end.finish_reason.type, len(chain)) for chain in self.chains.values()]
        return any(end == "abort" and length < 4 for end, length in ends)


def run_schedule(stage, seed):
    """One random schedule, every row of it judged; gives the number of rows. AssertionError names the first request
    that is wrong."""
    mixture = _Mixture(stage, seed)
    for _ in range(3):
        mixture.arrive()
    mixture.drive.run(before_step=mixture.meddle, check=False)
    while mixture.has_more:
        mixture.go_on()
        mixture.drive.run(check=False)
    rows = assert_all_faithful(mixture.drive)
    for chain in mixture.chains.values():
        assert_chain(mixture.drive, chain)
    return rows
