"""Runs requests through a core, step by step, beside a log of what was fed when. Shares no code with capture.

A `Bench` compiles a program once; each `Drive` on it is a scheduler, a store and a core of its own over the same
runner, so that a test of scheduling compiles nothing. The account (`FedLog`) is written from the batches alone: which
forward fed which token of which request first, and for a token that the request never fed, which forward wrote the page
that it reads. Dims: N padded tokens, R rows, M MoE layers, K experts per token."""

import dataclasses
from types import MappingProxyType

import numpy as np

from oracles.moe_probe import PLAIN, MoeProbe
from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.io_struct import RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.core.weight_version import WeightVersion, weight_runs
from routed_experts.engine.build.backends import BackendEntry
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.build.memory_planning import recorded_spec
from routed_experts.engine.loop.core import EngineCore
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.scheduling.scheduler import Scheduler
from support import lazy_compile


def request(
    rid,
    ids,
    max_tokens=8,
    *,
    choice=0,
    group=None,
    stream=False,
    asks=True,
    asks_weights=False,
    start=0,
    include_last=False,
    stop_token_ids=(),
    prompt_logprobs_from=-1,
    top_logprobs=0,
    extra_key=None,
    grammar=None,
    **sampling,
):
    """A validated request; greedy unless `sampling` differs."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling}, max_tokens=max_tokens)
    return Req(
        TokenizedGenerateReqInput(
            rid=rid,
            group=rid if group is None else group,
            choice=choice,
            input_ids=np.asarray(ids, np.int32),
            sampling=params.resolve(),
            stop_token_ids=frozenset(stop_token_ids),
            extra_key=extra_key,
            grammar=grammar,
            stream=stream,
            return_logprob=True,
            logprob_start_len=prompt_logprobs_from,
            top_logprobs_num=top_logprobs,
            routed_experts=RoutingOptions(
                enabled=asks, start=start if asks else 0, include_last=include_last, weights=asks_weights
            ),
        )
    )


class Bench:
    """One model, each program compiled once, with capture on. `args` are fields of ServerArgs; moe_backend "probed" has
    a probe before `kernels`."""

    def __init__(self, model, kernels=PLAIN, attention=None, *, num_draft_tokens=0, **args):
        self.args = ServerArgs(enable_return_routed_experts=True, **args)
        self.spec = recorded_spec(self.args, model.config)
        self.probe = MoeProbe(self.spec.num_moe_layers, kernels)
        registry = self.probe.registry
        if attention is not None:
            offers = {**registry.attention, attention.name: BackendEntry(load=lambda: attention)}
            registry = dataclasses.replace(registry, attention=MappingProxyType(offers))
        with lazy_compile.lazy_compilation():
            speculative = SpeculativeConfig(num_draft_tokens=num_draft_tokens) if num_draft_tokens else None
            self.assembly = build_engine(self.args, model=model, registry=registry, speculative=speculative)
        self.runner = self.assembly.core.runner
        self._weights, self._version = self.runner.state, self.runner.weight_version

    def drive(self, *, pages=None, speculation=None, **changed):
        """A fresh core over the compiled runner, with the first weights, `pages` to allocate and `changed` args."""
        if self.runner.weight_version > self._version:  # the last drive changed them
            self._version = self.runner.weight_version + 1
            self.runner.update_weights(self._weights, version=self._version)
        self.runner.overwrite_pool()
        self.probe.clear()
        return Drive(self, dataclasses.replace(self.args, **changed), pages, speculation)


@dataclasses.dataclass
class CollectedOutput:
    """The joined outputs of one request."""

    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    top: list = dataclasses.field(default_factory=list)  # of each token: (logprob, id) of the best, or None
    prompt_logprobs: list | None = None
    num_outputs: int = 0
    end: object = None  # the last output


class DispatchLog:
    """A runner that logs every batch and dispatches it to another runner."""

    def __init__(self, runner, scheduler, page_size):
        self._runner, self._scheduler, self._page_size = runner, scheduler, page_size
        self.forwards = []  # (batch, weight version)
        # rid -> {position: (forward, index in its tokens)}: the first pass, or the one that wrote the page
        self.rows = {}
        self._in_flight = {}  # by step: the forward, its batch, and request ids by slot
        self._starts = {}  # by request slot: where it stands after its last verify step
        self._writers = {}  # KV slot -> (forward, index) that wrote it last

    @property
    def weight_version(self):
        return self._runner.weight_version

    @property
    def exact(self):
        return self._runner.exact

    @property
    def can_run_ahead(self):
        return self._runner.can_run_ahead

    def dispatch(self, batches):
        self._log(batches)
        return self._runner.dispatch(batches)

    def begin(self, batches):
        self._log(batches)
        return self._runner.begin(batches)

    def sample(self, started, mask):
        return self._runner.sample(started, mask)

    def _log(self, batches):
        (batch,) = batches
        rids = {req.slot: req.rid for req in self._scheduler.running}
        forward = len(self.forwards)
        self._in_flight[batch.step] = forward, batch, rids
        self.forwards.append((batch, self._runner.weight_version))
        if not batch.is_ahead:  # else its positions follow from the step before
            self._note(forward, batch, rids)

    def _note(self, forward, batch, rids):
        for row in range(batch.num_requests):
            first, end = batch.query_starts[row : row + 2]
            rows = self.rows.setdefault(rids[int(batch.request_slots[row])], {})
            for position in range(
                int(batch.positions[first])
            ):  # in the pool already: by an earlier step, or by another request
                if position not in rows:
                    rows[position] = self._writers[self._slot(batch, row, position)]
            known = first + 1 if batch.mode is ForwardMode.TARGET_VERIFY else end  # drafts count once accepted
            for index in range(first, known):
                rows.setdefault(int(batch.positions[index]), (forward, int(index)))
        for row in range(batch.num_requests):
            for index in range(*batch.query_starts[row : row + 2]):
                self._writers[self._slot(batch, row, int(batch.positions[index]))] = (forward, int(index))

    def read(self, pending):
        (result,) = self._runner.read(pending)
        forward, batch, rids = self._in_flight.pop(pending.batches[0].step)
        if result.accepted is not None:
            for row, accepted in enumerate(result.accepted):
                first, slot = int(batch.query_starts[row]), int(batch.request_slots[row])
                self._starts[slot] = int(batch.positions[first]) + int(accepted) + 1
                rows = self.rows[rids[slot]]
                for index in range(first, first + int(accepted) + 1):
                    rows.setdefault(int(batch.positions[index]), (forward, index))
            for step, (later, ahead, owners) in self._in_flight.items():
                ahead = dataclasses.replace(ahead, positions=ahead.positions.copy())
                for row in range(ahead.num_requests):
                    first, end = ahead.query_starts[row : row + 2]
                    ahead.positions[first:end] += self._starts[int(ahead.request_slots[row])]
                self._in_flight[step] = later, ahead, owners
                self._note(later, ahead, owners)
        return [result]

    def update_weights(self, state, *, version, donate=False):
        self._runner.update_weights(state, version=version, donate=donate)

    def release(self, *, pool, weights):
        self._runner.release(pool=pool, weights=weights)
        if pool:
            self._writers.clear()

    def allocate_pool(self):
        self._runner.allocate_pool()

    def _slot(self, batch, row, position):
        return int(batch.page_table[row, position // self._page_size]) * self._page_size + position % self._page_size


class Drive:
    """A core and the outputs of its requests."""

    def __init__(self, bench, args, pages, speculation=None):
        self.bench, self.args = bench, args
        num_pages = bench.assembly.plan.pool.num_pages if pages is None else pages + 1
        assert num_pages <= bench.assembly.plan.pool.num_pages, (num_pages, bench.assembly.plan.pool.num_pages)
        scheduler = Scheduler(args, bench.assembly.buckets, num_pages=num_pages, vocab_size=bench.assembly.vocab_size)
        scheduler.weight_version = bench.runner.weight_version
        num_slots = num_pages * args.page_size
        capturer = RoutedExpertsCapturer.create(bench.spec, num_slots=num_slots, page_size=args.page_size, enable=True)
        self.log = DispatchLog(bench.runner, scheduler, args.page_size)
        self.core = EngineCore(DataRanks([scheduler], args), self.log, [capturer], speculation=speculation)
        self.outputs, self.reqs = {}, {}
        capturer.host_cache.overwrite_invalid_rows()

    def add(self, *reqs):
        """Accept the requests of one call. Those that ask for rows ask for combine weights, too, if there are some."""
        for req in reqs:
            if self.bench.spec.weights_dtype is not None and req.source.return_routed_experts:
                options = dataclasses.replace(req.source.routed_experts, weights=True)
                req.source = dataclasses.replace(req.source, routed_experts=options)
        self.core.add(reqs)
        for req in reqs:
            self.outputs[req.rid], self.reqs[req.rid] = CollectedOutput(), req

    def step(self, *, check=True):
        """One step; afterwards every invariant holds, and every row that is free again is poison."""
        self._take(self.core.step())
        if check:
            assert self.core.check_integrity() == []
            self.core.capturers[0].host_cache.overwrite_invalid_rows()

    def drain(self):
        """Finish the step in flight."""
        self._take(self.core.drain())

    def retract_victim(self):
        """Retract the request that was admitted last; False if none is running."""
        self.drain()
        victim = self.core.ranks[0].preemption_victim()
        if victim is not None:
            self.core.retract(victim)
        return victim is not None

    def update_weights(self, state, *, cache):
        """Run later steps with other weights; returns their version."""
        self.drain()
        version = self.bench.runner.weight_version + 1
        self.core.update_weights(state, version=WeightVersion(label=f"w{version}", update_count=version), cache=cache)
        return version

    def steps(self, count):
        """Run `count` steps."""
        for _ in range(count):
            self.step()

    def run(self, *reqs, before_step=None, check=True):
        """Step until the core is idle; `before_step(n)` may change it. Returns outputs by request id."""
        if reqs:
            self.add(*reqs)
        steps = 0
        while not self.core.is_idle:
            if before_step is not None:
                before_step(steps)
            self.step(check=check)
            steps += 1
            assert steps < 20_000, "this run does not end"
        assert self.core.check_integrity() == []
        return self.outputs

    def _take(self, batch):
        for out in batch.outs:
            output = self.outputs[out.rid]
            assert output.end is None, f"{out.rid} has output after its end"
            output.tokens += out.new_token_ids
            output.logprobs += out.output_logprobs.values
            output.top += out.output_logprobs.top
            if out.input_logprobs is not None:
                output.prompt_logprobs = list(out.input_logprobs.values)
            output.num_outputs += 1
            assert out.completion_tokens == len(output.tokens)
            if out.finish_reason is not None:
                output.end = out


def expected_ids(drive, rid, start, end):
    """[R, M, K]: the ids that entered the experts for tokens [start, end) of a request, in the pass of its rows."""
    passes = [drive.log.rows[rid][position] for position in range(start, end)]
    spec = drive.bench.spec
    if not passes:
        return np.zeros((0, spec.num_moe_layers, spec.top_k), np.int32)
    return np.stack([drive.bench.probe.step(forward)[index] for forward, index in passes])


def expected_weights(drive, rid, start, end):
    """[R, M, K]: the combine weights that entered the experts beside them."""
    passes = [drive.log.rows[rid][position] for position in range(start, end)]
    spec = drive.bench.spec
    if not passes:
        return np.zeros((0, spec.num_moe_layers, spec.top_k), np.float32)
    return np.stack([drive.bench.probe.step_weights(forward)[index] for forward, index in passes])


def assert_faithful(drive, rid):
    """The record of an ended request equals what the probe recorded, row by row, version by version. It keeps the row
    law: S - 1 rows, or S where the last token was requested too and the request was not aborted."""
    req, output = drive.reqs[rid], drive.outputs[rid]
    assert output.end is not None and output.end.error is None, (rid, output.end)
    assert output.tokens == req.output_ids.tolist()
    assert_weights_told(drive, rid)
    if not (req.source.return_routed_experts and req.num_output):
        assert output.end.routed_experts is None
        return
    record, start = output.end.routed_experts, req.source.routed_experts.start
    includes_last = req.source.routed_experts.include_last and output.end.finish_reason.type != "abort"
    end = req.num_known - (not includes_last)
    record.validate()
    assert record.valid is None
    assert (record.start, record.num_tokens, record.num_prompt_tokens) == (start, req.num_known, req.prompt_len)
    assert record.ids.shape == (end - start, drive.bench.spec.num_moe_layers, drive.bench.spec.top_k)
    np.testing.assert_array_equal(record.ids, expected_ids(drive, rid, start, end), err_msg=rid)
    assert (record.weights is not None) == req.source.routed_experts.weights
    if record.weights is not None:
        assert record.weights.dtype.name == drive.bench.spec.weights_dtype
        np.testing.assert_array_equal(
            record.weights, expected_weights(drive, rid, start, end).astype(record.weights.dtype), err_msg=rid
        )
    passes = [drive.log.rows[rid][position] for position in range(start, end)]
    versions = [drive.log.forwards[forward][1] for forward, _ in passes]
    record_versions = [version for low, high, version in record.version_spans for _ in range(low, high)]
    assert record_versions == versions, rid


def assert_weights_told(drive, rid):
    """The output of a request names the weights of every pass that fed one of its tokens first, with rows or without:
    it is told by the updates that the request met, and here compared with the log of all passes."""
    end, req = drive.outputs[rid].end, drive.reqs[rid]
    if req.num_output:
        assert end.num_fed in (req.num_known - 1, req.num_known), rid
    runs = weight_runs(end.weight_changes, end.weight_version, end.num_fed)
    told = [run.version.update_count for run in runs for _ in range(run.start, run.end)]
    passes = [drive.log.rows[rid][position] for position in range(end.num_fed)]
    assert told == [drive.log.forwards[forward][1] for forward, _ in passes], rid


def assert_all_faithful(drive):
    """`assert_faithful` for every request; returns how many rows were compared."""
    for rid in drive.outputs:
        assert_faithful(drive, rid)
    return sum(
        output.end.routed_experts.num_rows for output in drive.outputs.values() if output.end.routed_experts is not None
    )
