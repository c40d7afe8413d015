"""Abort and continue: prompt and answer so far, sent again, and the records of both merged. Judged by the tap at the experts.

Every row of the merged record must be the one that its first writer executed, whatever happened between, or marked as not
known; none may be wrong. Schedules are random: arrivals, chunks, prefix hits, n > 1, retraction, flushes, weight updates."""

import numpy as np
import pytest

from oracles.driver import assert_all_faithful, expected_ids, request
from oracles.worlds import other_weights, random_prompt, tiny_world
from routed_experts import Engine
from routed_experts.capture.meta_info import record_from_meta_info
from routed_experts.replay.turns import merge_turns
from serving import SMALL, Begun
from tiny import write_tiny_checkpoint

NUM_SCHEDULES = 25  # 1,000 of them take about a minute, and were run when this was written


@pytest.fixture(scope="module")
def world():
    return tiny_world(moe_backend="tapped")


def tokens_of(drive, rid):
    req = drive.reqs[rid]
    return req.tokens[: req.num_known].copy()


def assert_merged(drive, rids, record, tokens):
    """R = S - 1 rows, all known, each as its first writer ran it, under the version of that writer."""
    assert record.valid is None and (record.start, record.num_rows, record.num_tokens) == (0, tokens.size - 1, tokens.size)
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


def test_an_aborted_rollout_goes_on_where_it_was(world):
    """Weights change between: the rows of the first part keep their version, and its last token's row is the second part's."""
    drive, prompt = world.drive(), random_prompt(np.random.default_rng(1), 21)
    drive.run(request("a", prompt, 30), before_step=lambda step: step == 12 and drive.core.abort("a"))
    part = tokens_of(drive, "a")
    assert prompt.size < part.size < prompt.size + 30
    old = drive.core.runner.weight_version
    drive.update_weights(other_weights(3), cache="flush")
    drive.run(request("b", part, 30 - (part.size - prompt.size)))
    whole = tokens_of(drive, "b")
    record = merge_turns([(part, drive.told["a"].end.routed_experts), (whole, drive.told["b"].end.routed_experts)], whole)
    assert_merged(drive, ["a", "b"], record, whole)
    assert record.version_spans == ((0, part.size - 1, old), (part.size - 1, whole.size - 1, old + 1))
    assert record.num_prompt_tokens == prompt.size


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_no_row_is_wrong_in_any_schedule(world, seed):
    rng = np.random.default_rng(1000 + seed)
    drive = world.drive(pages=60, chunked_prefill_size=(None, 5, 11)[seed % 3], disable_radix_cache=seed % 7 == 6)
    shared, chains = random_prompt(rng, 30), {}

    def arrive():
        prompt = np.concatenate([shared[: rng.integers(0, 31)], random_prompt(rng, rng.integers(1, 12))])
        for choice in range(rng.integers(1, 4)):
            rid = f"r{len(chains)}"
            options = dict(choice=choice, group=f"g{len(chains) - choice}", temperature=1.0, seed=seed)
            drive.add(request(rid, prompt, int(rng.integers(2, 16)), **options))
            chains[rid] = [rid]

    def go_on():
        """Send the aborted ones again, with what they have."""
        for chain in chains.values():
            told, req = drive.told[chain[-1]], drive.reqs[chain[-1]]
            if told.end is not None and told.end.finish_reason.type == "abort" and req.max_len > req.num_known and len(chain) < 4:
                rid = f"{chain[0]}+{len(chain)}"
                drive.add(request(rid, tokens_of(drive, chain[-1]), req.max_len - req.num_known, temperature=1.0, seed=seed))
                chain.append(rid)

    def meddle(step):
        event = rng.random()
        if event < 0.1:
            drive.retract_victim()
        elif event < 0.3 and drive.core.ledger.num_live:
            drive.core.abort(str(rng.choice(drive.core.ledger.live())))
        elif event < 0.34:
            drive.core.flush_cache()
        elif event < 0.39:
            drive.update_weights(other_weights(int(rng.integers(1, 3))), cache=("flush", "keep")[rng.integers(2)])
        elif event < 0.6:
            go_on()

    for _ in range(3):
        arrive()
    drive.run(before_step=meddle, check=False)
    while any(drive.told[chain[-1]].end.finish_reason.type == "abort" and len(chain) < 4 for chain in chains.values()):
        go_on()
        drive.run(check=False)
    assert_all_faithful(drive)
    for chain in chains.values():
        tokens = tokens_of(drive, chain[-1])
        turns = [(tokens_of(drive, rid), drive.told[rid].end.routed_experts) for rid in chain]
        turns = [(own, record) for own, record in turns if record is not None]
        if turns:
            assert_merged(drive, chain, merge_turns(turns, turns[-1][0]), turns[-1][0])
        assert len(turns) < len(chain) or turns[-1][0].size == tokens.size


def test_a_continued_rollout_says_what_an_unhurried_one_says(tmp_path):
    """By the door: noise depends on seed and position alone, so the parts join to the whole, tokens and rows."""
    folder = write_tiny_checkpoint(tmp_path)
    prompt = np.random.default_rng(8).integers(3, 313, 25).tolist()
    said = {"temperature": 1.0, "seed": 12, "ignore_eos": True}
    with Engine(str(folder), enable_return_routed_experts=True, deterministic=True, **SMALL) as engine:
        whole = engine.generate(input_ids=prompt, sampling_params=said, max_new_tokens=50, return_routed_experts=True)
        calls = Begun(engine, prompt, outputs=9, sampling_params=said, max_new_tokens=50, return_routed_experts=True, rid="part")
        engine.abort("part")
        engine.resume()
        (part,) = calls.results()
        told = [*prompt, *part["output_ids"]]
        left = 50 - len(part["output_ids"])
        assert part["meta_info"]["finish_reason"]["type"] == "abort" and left > 0
        start = len(told) - 1  # the first row that the first part does not have
        rest = engine.generate(
            input_ids=told, sampling_params=said, max_new_tokens=left, return_routed_experts=True, routed_experts_start_len=start
        )
    tokens = [*told, *rest["output_ids"]]
    assert tokens == [*prompt, *whole["output_ids"]]
    merged = merge_turns([(told, record_from_meta_info(part)), (tokens, record_from_meta_info(rest))], tokens)
    assert merged.num_rows == len(tokens) - 1 and merged == record_from_meta_info(whole)
