"""Data ranks without a model: random lives of requests in a core with several ranks, over a device in NumPy.

A rank has a NumpyDevice of its own. Tokens, logprobs and rows of a request follow from its text alone, so a page, a
slot or a row of another rank changes an answer. The assignment is compared with a dict that is kept beside it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import QueueFullError
from routed_experts.core.model_worker_batch import ForwardMode, SamplingMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.loop.core import EngineCore, PauseMode
from routed_experts.execution.model_runner import PendingStep
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.scheduling.scheduler import Scheduler
from support.numpy_device import VOCAB, NumpyDevice, expected_logprob, expected_tokens, next_token, source

CONTEXT, PAGE = 48, 4
SPEC = CaptureSpec(num_hidden_layers=2, layer_ids=(0, 1), num_experts=61, top_k=2)


def expected_row(tokens):
    """The routed experts of the last of these tokens: four ids that depend on all of them."""
    value = next_token([*tokens, 5])
    return [(value * factor + 3) % SPEC.num_experts for factor in (1, 7, 11, 13)]


def next_version(core):
    return WeightVersion(update_count=core.weight_version.update_count + 1)


class RankDevices:
    """Stands in for a ModelRunner: a NumpyDevice for each rank. Every step is checked when it is dispatched."""

    def __init__(self, num_ranks, *, num_slots, num_request_slots) -> None:
        self.weight_version, self.exact = 0, True
        self.devices = [
            NumpyDevice(num_slots=num_slots, num_request_slots=num_request_slots, page_size=PAGE)
            for _ in range(num_ranks)
        ]
        self.results, self.forms, self.idle_ranks = {}, [], 0
        self.sampling_modes = []

    def dispatch(self, batches):
        shapes = {(batch.mode, batch.token_ids.size, batch.page_table.shape) for batch in batches}
        assert len(batches) == len(self.devices) and len(shapes) == 1, "all ranks run one program"
        assert len({batch.sampling_mode for batch in batches}) == 1
        assert len({batch.prompt_targets is None for batch in batches}) == 1
        assert any(batch.num_requests for batch in batches), "a step of padding alone"
        for batch in batches:
            assert (batch.sampling.bias_ids is None) == (batch.sampling_mode is not SamplingMode.FULL)
            self.idle_ranks += batch.num_requests == 0
            if batch.num_requests == 0:
                assert not batch.token_ids.any() and not batch.seq_lens.any() and not batch.request_slots.any()
        pending = PendingStep(batches=tuple(batches), sampled=None, scored=None, rows=None, weight_version=0)
        self.results[id(pending)] = [
            self.run(device, batch) for device, batch in zip(self.devices, batches, strict=True)
        ]
        self.forms.append(batches[0].mode)
        self.sampling_modes.append(batches[0].sampling_mode)
        return pending

    def run(self, device, batch):
        rows = np.zeros((batch.token_ids.size, 4), SPEC.dtype)
        result = device.run(batch)
        for row in range(batch.num_requests):
            first, end = batch.query_starts[row : row + 2]
            read = device.read(batch.page_table[row], int(batch.seq_lens[row]))
            for at in range(first, end):
                rows[at] = expected_row(read[: batch.positions[at] + 1])
        return dataclasses.replace(result, rows=rows, weight_version=self.weight_version)

    def read(self, pending):
        return self.results.pop(id(pending))

    def update_weights(self, state, *, version, donate=False):
        self.weight_version = version


class Ranks:
    """A core with data ranks, and what its requests have got."""

    def __init__(self, num_ranks, *, pages=24, requests=3, tokens=16, **args) -> None:
        sizes = {
            "page_size": PAGE,
            "precompile_bs_paddings": tuple(sorted({1, requests})),
            "precompile_token_paddings": (tokens, 32),
        }
        self.args = ServerArgs(**sizes, **args)
        buckets = Buckets.from_args(self.args, context_length=CONTEXT)
        num_slots = (pages + 1) * PAGE
        self.devices = RankDevices(num_ranks, num_slots=num_slots, num_request_slots=self.args.running_limit + 1)
        schedulers = [Scheduler(self.args, buckets, num_pages=pages + 1, vocab_size=VOCAB) for _ in range(num_ranks)]
        capturers = [
            RoutedExpertsCapturer.create(SPEC, num_slots=num_slots, page_size=PAGE, enable=True) for _ in schedulers
        ]
        self.core = EngineCore(DataRanks(schedulers, self.args), self.devices, capturers)
        self.outputs, self.reqs = {}, {}

    def add(self, *sources):
        reqs = [Req(source) for source in sources]
        self.core.add(reqs)
        self.reqs |= {req.rid: req for req in reqs}
        return reqs

    def step(self):
        for out in self.core.step().outs:
            assert out.rid not in self.outputs, "each request ends once"
            assert out.dp_rank == (self.reqs[out.rid].dp_rank if len(self.core.ranks) > 1 else None)
            self.outputs[out.rid] = out
        for capturer in self.core.capturers:
            capturer.host_cache.overwrite_invalid_rows()
        assert self.core.check_integrity() == []

    def run(self, *sources, limit=3000):
        reqs = self.add(*sources) if sources else []
        while not self.core.is_idle:
            self.step()
            limit -= 1
            assert limit, "requests starve"
        return reqs

    def check_answer(self, rid):
        """Tokens, logprobs and rows of an ended request follow from its text."""
        req, out = self.reqs[rid], self.outputs[rid]
        prompt, tokens = req.source.input_ids.tolist(), req.output_ids.tolist()
        expected = expected_tokens(prompt, req.source.sampling.max_tokens, stops=req.source.stop_token_ids)
        assert tokens == (expected[: len(tokens)] if out.finish_reason.type == "abort" else expected)
        assert out.error is None
        text = [*prompt, *tokens]
        if req.source.return_logprob and out.finish_reason.type != "abort":
            start = req.source.logprob_start_len
            given = [expected_logprob(text[:at], text[at]) for at in range(max(start, 1), len(prompt))]
            assert list(out.input_logprobs.values)[start == 0 :] == pytest.approx(given)
        if tokens:
            rows = out.routed_experts.ids.reshape(-1, 4).tolist()
            assert rows == [expected_row(text[: at + 1]) for at in range(len(text) - 1)]


def asks(made, **changes):
    """The same request, with its rows."""
    return dataclasses.replace(made, routed_experts=dataclasses.replace(made.routed_experts, enabled=True), **changes)


@st.composite
def lives(draw):
    arrival = st.fixed_dictionaries(
        {
            "tick": st.integers(0, 20),
            "common": st.integers(0, 16),
            "own": st.integers(1, 8),
            "max_tokens": st.integers(1, 20),
            "choices": st.integers(1, 3),
            "stops": st.booleans(),
            "penalised": st.booleans(),
            "scored": st.booleans(),
            "rank": st.none() | st.integers(0, 3),
        }
    )
    kinds = ["abort", "retract", "flush", "keep", "update", "pause", "pause retract"]
    return {
        "num_ranks": draw(st.integers(1, 4)),
        "pages": 12 + draw(st.integers(0, 10)),
        "requests": draw(st.integers(1, 3)),
        "cache": draw(st.booleans()),
        "deterministic": draw(st.booleans()),
        "chunk": draw(st.integers(3, 16)),
        "arrivals": draw(st.lists(arrival, min_size=2, max_size=12)),
        "events": draw(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(kinds), st.integers(0, 9)), max_size=8)),
    }


def sources_of(index, arrival, num_ranks):
    prompt = [*range(arrival["common"]), *((index * 7 + i) % VOCAB for i in range(arrival["own"]))]
    everything = expected_tokens(prompt, arrival["max_tokens"])
    rank = None if arrival["rank"] is None else arrival["rank"] % num_ranks
    return [
        asks(
            source(
                prompt,
                rid=f"{index}-{choice}",
                group=str(index),
                choice=choice,
                max_tokens=arrival["max_tokens"],
                stops=[everything[len(everything) // 2]] if arrival["stops"] else [],
                logprob_start=0 if arrival["scored"] else None,
                **({"presence_penalty": 1.0} if arrival["penalised"] else {}),
            ),
            data_parallel_rank=rank,
        )
        for choice in range(arrival["choices"])
    ]


def happen(ranks, kind, pick):
    core = ranks.core
    live = core.request_table.live()
    if kind == "abort" and live:
        core.abort(live[pick % len(live)])
        return
    for out in core.drain().outs:
        ranks.outputs[out.rid] = out
    if kind == "retract" and core.ranks.running:
        core.retract(core.ranks.running[pick % len(core.ranks.running)])
    elif kind == "flush":
        core.flush_cache()
    elif kind in ("keep", "update"):
        core.update_weights(None, version=next_version(core), cache="keep" if kind == "keep" else "flush")
    elif kind.startswith("pause"):
        core.pause(PauseMode.RETRACT if "retract" in kind else PauseMode.IN_PLACE)
        assert not core.has_work or core._finished
        core.resume()


@settings(max_examples=120)
@given(life=lives())
def test_every_answer_follows_from_its_text_whatever_the_other_ranks_do(life):
    ranks = Ranks(
        life["num_ranks"],
        pages=life["pages"],
        requests=life["requests"],
        disable_radix_cache=not life["cache"],
        deterministic=life["deterministic"],
        chunked_prefill_size=life["chunk"],
    )
    assigned, tick = {}, 0
    while tick <= 45 or not ranks.core.is_idle:
        for index, arrival in enumerate(life["arrivals"]):
            if arrival["tick"] == tick:
                reqs = ranks.add(*sources_of(index, arrival, life["num_ranks"]))
                assert len({req.dp_rank for req in reqs}) == 1, "choices of one prompt share its pages"
                assert arrival["rank"] is None or reqs[0].dp_rank == arrival["rank"] % life["num_ranks"]
                assigned |= {req.rid: req.dp_rank for req in reqs}
        for at, kind, pick in life["events"]:
            if at == tick:
                happen(ranks, kind, pick)
        ranks.step()
        for number, scheduler in enumerate(ranks.core.ranks):
            own = {req.rid for req in (*scheduler.running, *scheduler.waiting)}
            assert own <= {rid for rid, rank in assigned.items() if rank == number}, "a request never changes its rank"
        tick += 1
        assert tick < 4000, "requests starve"
    assert ranks.outputs.keys() == assigned.keys(), "each request ends"
    for rid in assigned:
        ranks.check_answer(rid)
    event(f"{sum(scheduler.num_retracted for scheduler in ranks.core.ranks) > 0} retracted")
    event(f"{ranks.devices.idle_ranks > 0} idle ranks")
    for scheduler in ranks.core.ranks:
        assert scheduler.pages.num_available == scheduler.pages.allocator.num_total and not scheduler._leaders


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_requests_go_to_the_rank_with_least_tokens_and_ties_to_the_first():
    ranks = Ranks(3)
    reqs = ranks.add(*(source(prompt(size, size), rid=str(rid)) for rid, size in enumerate((9, 2, 3, 4, 1, 1))))
    loads, expected = [0, 0, 0], []
    for req in reqs:  # the oracle: a dict of sums
        least = min(range(3), key=lambda rank: (loads[rank], rank))
        loads[least] += req.prompt_len
        expected.append(least)
    assert [req.dp_rank for req in reqs] == expected == [0, 1, 2, 1, 2, 2]


def test_a_prompt_follows_its_cached_half_until_that_rank_has_a_prefill_more_to_do():
    ranks = Ranks(2, chunked_prefill_size=16)
    shared = prompt(20)
    (first,) = ranks.run(source(shared, rid="first", max_tokens=2))
    ranks.run(source(prompt(4, 9), rid="elsewhere", max_tokens=2))
    assert first.dp_rank == 0
    busy = ranks.add(*(source(prompt(5, seed), rid=f"busy{seed}") for seed in (1,)))
    assert busy[0].dp_rank == 0  # nothing of it is cached: both are empty
    follows = ranks.add(source([*shared, 1, 2], rid="follows"))[0]
    assert follows.dp_rank == 0, "5 tokens more than the other rank are less than a prefill"
    short = ranks.add(source([*shared[:8], *prompt(9, 8)], rid="short"))[0]
    assert short.dp_rank == 1, "8 of 17 tokens are less than half"
    crowd = ranks.add(source(prompt(12, 5), rid="crowd"), source(prompt(14, 6), rid="crowd2"))
    late = ranks.add(source([*shared, 3, 4], rid="late"))[0]
    loads = [0, 0]
    for req in (*busy, follows, short, *crowd):
        loads[req.dp_rank] += req.prompt_len
    assert (late.dp_rank == 0) == (loads[0] - min(loads) <= 16)
    ranks.run()


def warm_up(ranks, text, **kwargs):
    """Both ranks cache a prompt."""
    for number in range(len(ranks.core.ranks)):
        ranks.run(dataclasses.replace(source(text, rid=f"warm{number}", **kwargs), data_parallel_rank=number))


def test_of_the_ranks_that_have_a_prompt_the_least_loaded_gets_it():
    ranks, shared = Ranks(3), prompt(20)
    warm_up(ranks, shared, max_tokens=2)
    reqs = ranks.add(*(source([*shared, rid], rid=str(rid)) for rid in range(6)))
    assert [req.dp_rank for req in reqs] == [0, 1, 2, 0, 1, 2]
    ranks.run()
    assert all(ranks.outputs[req.rid].cached_tokens == 20 for req in reqs)


def test_a_prompt_at_the_bounds_of_following_its_cache():
    for used, load, expected in ((12, 16, 0), (12, 17, 1), (8, 1, 1)):  # tokens in common, of 16; load of that rank
        ranks, shared = Ranks(2, chunked_prefill_size=16), prompt(20)
        ranks.run(dataclasses.replace(source(shared, rid="first", max_tokens=2), data_parallel_rank=0))
        ranks.add(dataclasses.replace(source(prompt(load, 9), rid="load"), data_parallel_rank=0))
        (req,) = ranks.add(source([*shared[:used], *prompt(16 - used, 8)], rid="late"))
        assert req.dp_rank == expected, (used, load)
        ranks.run()


@pytest.mark.parametrize("without", [{"presence_penalty": 1.0}, {"logprob_start": 0}, {"extra_key": "b"}])
def test_a_prompt_does_not_follow_a_cache_that_it_may_not_use(without):
    ranks, shared = Ranks(2), prompt(20)
    ranks.run(dataclasses.replace(source(shared, rid="first", max_tokens=2, extra_key="a"), data_parallel_rank=1))
    ranks.add(dataclasses.replace(source(prompt(3, 9), rid="load"), data_parallel_rank=1))
    (same,) = ranks.add(source([*shared, 2], rid="same", extra_key="a"))
    (other,) = ranks.add(source([*shared, 1], rid="other", **{"extra_key": "a"} | without))
    assert (same.dp_rank, other.dp_rank) == (1, 0), "no load has chosen rank 1"
    ranks.run()
    assert [ranks.outputs[rid].cached_tokens for rid in ("other", "same")] == [0, 20]


def test_load_is_known_tokens_of_running_and_of_waiting_requests():
    ranks = Ranks(2, requests=1)
    running = source(prompt(4), rid="running", max_tokens=9)
    ranks.add(dataclasses.replace(running, data_parallel_rank=0))
    while ranks.reqs["running"].num_known < 9:
        ranks.step()
    ranks.add(dataclasses.replace(source(prompt(7, 1), rid="waits"), data_parallel_rank=1))
    load = ranks.reqs["running"].num_known
    assert [scheduler.num_live_tokens for scheduler in ranks.core.ranks] == [load, 7]
    assert ranks.add(source(prompt(3, 2), rid="late"))[0].dp_rank == 1
    ranks.run()


def test_weights_of_another_version_share_no_prefix_in_any_rank():
    ranks, text = Ranks(2, chunked_prefill_size=16), prompt(20)
    ranks.add(*(dataclasses.replace(source(text, rid=f"old{n}"), data_parallel_rank=n) for n in (0, 1)))
    ranks.step()
    ranks.core.drain()
    ranks.core.update_weights(None, version=next_version(ranks.core), cache="keep")
    assert [scheduler.weight_version for scheduler in ranks.core.ranks] == [1, 1]
    ranks.run()
    warm_up(ranks, text)
    assert [ranks.outputs[f"warm{number}"].cached_tokens for number in (0, 1)] == [0, 0]
    assert ranks.core.flush_cache() > 0
    assert all(scheduler.pages.allocator.num_free == 24 for scheduler in ranks.core.ranks), "pages of every rank"


def test_a_pause_holds_every_rank():
    ranks = Ranks(3)
    core = ranks.core

    def add(name, *numbers):
        made = (source(prompt(6, number), rid=f"{name}{number}", max_tokens=9) for number in numbers)
        ranks.add(*(asks(one, data_parallel_rank=number) for one, number in zip(made, numbers, strict=True)))

    def take(outs):
        ranks.outputs |= {out.rid: out for out in outs.outs}

    add("first", 1)
    for _ in range(2):
        ranks.step()
    take(core.drain())
    core.pause(PauseMode.WAIT)
    add("later", 0, 1, 2)
    assert core.has_work, "rank 1 runs to its end"
    while core.has_work:
        ranks.step()
    assert [*ranks.outputs] == ["first1"] and core.ranks.num_waiting == 3
    core.resume()
    for _ in range(2):
        ranks.step()
    assert len(core.ranks.running) == 3, "each rank admits again"
    take(core.drain())
    core.pause(PauseMode.RETRACT)
    assert core.ranks.num_waiting == 3 and not core.ranks.running
    core.resume()
    ranks.step()
    take(core.drain())
    core.update_weights(None, version=next_version(core), cache="flush")
    assert not core.ranks.running, "each rank computes its prompts again"
    ranks.run()
    for rid in ranks.reqs:
        ranks.check_answer(rid)
    add("last", 0, 1, 2)
    ranks.step()
    take(core.drain())
    core.pause(PauseMode.ABORT)
    take(core.step())
    assert all(ranks.outputs[f"last{number}"].finish_reason.type == "abort" for number in range(3)) and core.is_idle


def test_what_is_wrong_in_any_rank_is_found():
    ranks = Ranks(2)
    ranks.add(dataclasses.replace(source(prompt(6), rid="a", max_tokens=9), data_parallel_rank=1))
    ranks.step()
    req = ranks.reqs["a"]
    req.num_pages -= 1
    assert ranks.core.check_integrity() != []
    req.num_pages += 1
    ranks.run()


def test_a_request_in_a_forced_rank_shares_no_prefix_with_another_rank():
    ranks = Ranks(2)
    text = prompt(12)
    for rid, rank in (("a", 0), ("b", 1), ("c", 1), ("d", 0)):
        ranks.run(dataclasses.replace(source(text, rid=rid, max_tokens=2), data_parallel_rank=rank))
    assert [ranks.outputs[rid].cached_tokens for rid in "abcd"] == [0, 0, 8, 8]


def test_the_queue_takes_a_call_whole_or_not_at_all_whatever_the_ranks():
    for num_ranks in (1, 2):
        ranks = Ranks(num_ranks, max_queued_requests=3)
        ranks.add(source(prompt(3), rid="a"), source(prompt(3), rid="b"))
        with pytest.raises(
            QueueFullError, match="2 requests wait and 2 more exceed max_queued_requests=3; try again later"
        ):
            ranks.add(source(prompt(3), rid="c"), source(prompt(3), rid="d"))
        waiting = [req.rid for scheduler in ranks.core.ranks for req in scheduler.waiting]
        assert sorted(waiting) == ["a", "b"] and ranks.core.ranks.num_waiting == 2
        ranks.add(source(prompt(3), rid="e"))
        with pytest.raises(QueueFullError, match="4 requests in one call exceed max_queued_requests=3; send at most 3"):
            ranks.add(*(source(prompt(3), rid=f"x{i}") for i in range(4)))


def test_a_rank_out_of_pages_retracts_while_the_others_run():
    ranks = Ranks(2, pages=12)
    many = [asks(source(prompt(6, seed), rid=f"m{seed}", max_tokens=24), data_parallel_rank=1) for seed in range(3)]
    calm = asks(source(prompt(6, 9), rid="calm", max_tokens=40), data_parallel_rank=0)
    ranks.add(*many, calm)
    steps_of_calm, retracted = [], 0
    while not ranks.core.is_idle:
        known = ranks.reqs["calm"].num_known
        ranks.step()
        steps_of_calm.append(ranks.reqs["calm"].num_known - known)
        if "calm" not in ranks.outputs:
            retracted = ranks.core.ranks[1].num_retracted
    assert retracted > 0, "not only once the other rank is idle"
    assert ranks.core.ranks[0].num_retracted == 0
    first, last = steps_of_calm.index(1), len(steps_of_calm) - 1 - steps_of_calm[::-1].index(1)
    assert all(count == 1 for count in steps_of_calm[first : last + 1]), "a token in every step until it ends"
    for rid in ranks.outputs:
        ranks.check_answer(rid)


def test_an_idle_rank_takes_part_in_two_hundred_steps_of_another():
    ranks = Ranks(2, pages=12)
    for number in range(6):
        ranks.run(asks(source(prompt(6, number), rid=str(number), max_tokens=40), data_parallel_rank=1))
        ranks.check_answer(str(number))
    assert ranks.core.num_steps >= 200 and ranks.devices.idle_ranks == ranks.core.num_steps
    assert ranks.core.rank_tokens[0] == 0 and ranks.core.rank_tokens[1] == ranks.core.num_rows
    stats = ranks.core.routing_stats()
    assert stats.num_tokens.sum() == ranks.core.num_rows, "rows of an idle rank are not counted"
    assert ranks.core.padding_ratio == 2, "a token of one rank, and a padded one of the other"
    assert not (ranks.devices.devices[0].tokens >= 0).any(), "nothing was written in its pages"
    ranks.run(asks(source(prompt(5), rid="other"), data_parallel_rank=0))
    assert ranks.core.routing_stats(reset=True).num_tokens.sum() > stats.num_tokens.sum()
    assert not ranks.core.routing_stats().counts.any(), "the counts of every rank are reset"


def test_one_prompt_beside_decoding_ranks_makes_a_step_of_prompts_for_all():
    ranks = Ranks(2)
    ranks.add(source(prompt(3), rid="decodes", max_tokens=8))
    for _ in range(3):
        ranks.step()
    ranks.add(source(prompt(12, 1), rid="prompt", max_tokens=4))
    ranks.run()
    assert [mode for mode in ranks.devices.forms].count(ForwardMode.EXTEND) == 2
    for rid in ("decodes", "prompt"):
        req = ranks.reqs[rid]
        assert req.output_ids.tolist() == expected_tokens(req.source.input_ids.tolist(), req.source.sampling.max_tokens)


def test_a_step_samples_as_the_rank_does_that_needs_most():
    for penalised in (0, 1):
        ranks = Ranks(2)
        sampling = [{}, {}]
        sampling[penalised] = {"presence_penalty": 1.0}
        made = (source(prompt(3, number), rid=str(number), **sampling[number]) for number in (0, 1))
        ranks.run(*(dataclasses.replace(one, data_parallel_rank=number) for number, one in enumerate(made)))
        assert set(ranks.devices.sampling_modes) == {SamplingMode.FULL}
