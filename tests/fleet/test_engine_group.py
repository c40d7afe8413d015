"""EngineGroup with actors of this process in the place of Ray's."""

import dataclasses
import pickle
import types

import numpy as np
import pytest

from routed_experts.core.errors import (
    PARAM,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    MemoryPlanError,
    PeerLostError,
    QueueFullError,
    ReplicaLostError,
    RoutingAlignmentError,
    RoutingIncompleteError,
    UpdateInProgressError,
    WeightsMismatchError,
    WriteError,
    prompt_index,
)
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.requests.input_processor import InputProcessor, RequestLimits
from routed_experts.fleet import engine_group as module
from routed_experts.fleet.bundles import PLACEMENT_S
from routed_experts.replay.check import check_record

LIMITS = RequestLimits(context_length=32, pool_tokens=64, vocab_size=50, capture=None)


class RayActorError(Exception):
    pass


class RayTaskError(Exception):
    """As Ray's: the text has the traceback of the other process, in colours."""

    def __init__(self, cause):
        super().__init__(f"\x1b[36mray::EngineActor()\x1b[39m\nTraceback: {cause!r}")
        self.cause = cause


class Reference:
    """Of an outcome, which is made when it is first waited for."""

    def __init__(self, make_outcome):
        self.make_outcome, self.num_gets = make_outcome, 0

    def future(self):
        self.num_gets += 1


class Method:
    """A method of an actor; what the call raises as a value is raised by `get`."""

    def __init__(self, call):
        self.call = call

    def remote(self, *arguments):
        outcome = self.call(*arguments)
        return outcome if isinstance(outcome, Reference) else Reference(lambda: outcome)


class LocalActor:
    """An engine that holds or not; what a call returns, or raises as a value, is its reference."""

    def __init__(self, *, is_dead=False):
        self.is_dead, self.held, self.label = is_dead, False, "old"
        self.set_held, self.commit_weights = Method(self._set_held), Method(self._take)
        self.update_weight_version = Method(self._take)

    def _set_held(self, held):
        self.held = self.held if self.is_dead else held
        return RayActorError("it was killed") if self.is_dead else None

    def _take(self, label, cache="keep"):
        self.label = label


class LocalGroup:
    """A placement group."""

    def __init__(self, bundles, *, is_placed):
        self.bundle_specs, self.is_placed, self.waits = list(bundles), is_placed, []

    def wait(self, timeout_seconds):
        self.waits.append(timeout_seconds)
        return self.is_placed


class StartedActor:
    """An engine as `create` makes it: it starts, or has this outcome."""

    def __init__(self, outcome, options):
        self.options = options
        self.ready = self.shutdown = Method(lambda: outcome)


class LocalRay:
    """A Ray with resources, in which engines start or do not."""

    exceptions = types.SimpleNamespace(RayActorError=RayActorError, RayTaskError=RayTaskError)
    method = staticmethod(lambda concurrency_group: lambda function: function)

    def __init__(self, total=None, free=None, *, start=None):
        self.total, self.free, self.start = total or {}, free or {}, start
        self.groups, self.removed, self.actors, self.killed = [], [], [], []
        self.util = types.SimpleNamespace(
            placement_group=self._placement_group,
            remove_placement_group=self.removed.append,
            scheduling_strategies=types.SimpleNamespace(PlacementGroupSchedulingStrategy=dict),
        )

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return self.total

    def available_resources(self):
        return self.free

    def _placement_group(self, bundles, strategy):
        fits = all(sum(bundle[kind] for bundle in bundles) <= self.free.get(kind, 0.0) for kind in bundles[0])
        self.groups.append(LocalGroup(bundles, is_placed=fits))
        return self.groups[-1]

    def remote(self, concurrency_groups):
        def options(**keywords):
            return types.SimpleNamespace(remote=lambda spec, followers: self._start({**keywords, **concurrency_groups}))

        return lambda kind: types.SimpleNamespace(options=options)

    def _start(self, options):
        self.actors.append(StartedActor(self.start, options))
        return self.actors[-1]

    def wait(self, calls, num_returns, timeout=None):
        assert 0 < num_returns <= len(calls) == len(set(calls))
        num_returns = 0 if timeout == 0 else num_returns  # without a time for it nothing ends
        return calls[:num_returns], calls[num_returns:]

    def kill(self, actor):
        self.killed.append(actor)

    def get(self, calls):
        outcomes = []
        for call in calls:
            call.num_gets += 1
            outcomes.append(call.make_outcome())
            if isinstance(outcomes[-1], BaseException):
                raise outcomes[-1]
        return outcomes


def use(monkeypatch, ray):
    modules = {"ray": ray, "ray.exceptions": ray.exceptions}
    if isinstance(ray, LocalRay):
        modules["ray.util.scheduling_strategies"] = ray.util.scheduling_strategies
    monkeypatch.setattr(module, "import_ray", lambda name="ray": modules[name])
    return ray


@pytest.fixture
def local_ray(monkeypatch):
    return use(monkeypatch, LocalRay())


ARGS = ServerArgs(model_path="demo")


def test_a_group_is_made_in_the_bundles_that_it_reserves(monkeypatch):
    ray = use(monkeypatch, LocalRay({"CPU": 4.0}, {"CPU": 4.0}))
    group = module.EngineGroup.create(ARGS, replicas=3, resources={"CPU": 0.5})
    assert ray.groups[0].bundle_specs == [{"CPU": 1.0}] * 3 and ray.groups[0].waits == [PLACEMENT_S]
    assert [actor.options["num_cpus"] for actor in group.actors] == [0.5] * 3 and not ray.removed


@pytest.mark.parametrize(
    ("free", "keywords", "match"),
    [
        (4.0, {"replicas": 5}, r"replicas=5 do not fit \(CPU: 5 needed, 4 free\); set replicas=4"),
        (1.0, {"replicas": 3}, r"within 60 s: replicas=3 do not fit \(CPU: 3 needed, 1 free\); set replicas=1"),
        (4.0, {"resources": {"CPU": 2}}, r"CPU=2 for an engine, above bundle 0 of its placement group \(CPU: 1\)"),
        (4.0, {"resources": {"gold": 1}}, r"gold=1 for an engine, above bundle 0"),
        (4.0, {"resources": {"CPU": -1}}, r"CPU=-1 must be a number from 0 on"),
        (4.0, {"bundle_indices": [7]}, r"bundle_indices=\[7\] for 1 processes"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing_reserved(monkeypatch, free, keywords, match):
    ray = use(monkeypatch, LocalRay({"CPU": 4.0}, {"CPU": free}))
    with pytest.raises(ConfigError, match=match):
        module.EngineGroup.create(ARGS, **keywords)
    assert ray.removed == ray.groups and ray.actors == []


def test_a_group_of_the_caller_that_does_not_fit_is_left_to_it(monkeypatch):
    ray = use(monkeypatch, LocalRay())
    group = LocalGroup([{"CPU": 1.0}, {"CPU": 2.0}], is_placed=False)
    with pytest.raises(ConfigError, match="not reserved within 60 s; wait until it is ready"):
        module.EngineGroup.create(ARGS, placement_group=group)
    group.is_placed = True
    with pytest.raises(ConfigError, match="above bundle 0"):
        module.EngineGroup.create(ARGS, placement_group=group, resources={"CPU": 2})
    assert ray.actors == []
    module.EngineGroup.create(ARGS, placement_group=group, bundle_indices=[1], resources={"CPU": 2})
    assert len(ray.actors) == 1 and ray.removed == []


def test_an_engine_that_does_not_start_leaves_nothing_reserved(monkeypatch):
    error = MemoryPlanError("too large", ways=({"max_total_tokens": 64},))
    ray = use(monkeypatch, LocalRay({"CPU": 4.0}, {"CPU": 4.0}, start=RayTaskError(error)))
    with pytest.raises(MemoryPlanError) as caught:
        module.EngineGroup.create(ARGS, replicas=2)
    assert caught.value is error and ray.removed == ray.groups and ray.killed == ray.actors


def test_an_interrupt_while_engines_start_leaves_nothing_reserved(monkeypatch):
    ray = use(monkeypatch, LocalRay({"CPU": 4.0}, {"CPU": 4.0}, start=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        module.EngineGroup.create(ARGS, replicas=2)
    assert ray.removed == ray.groups and ray.killed == ray.actors and len(ray.actors) == 2


@pytest.mark.parametrize(
    ("sizes", "threads"),
    [
        (dict(max_running_requests=4, max_queued_requests=10), 14),
        (dict(max_running_requests=4, max_queued_requests=10, dp_size=2, tp_size=2, ep_size=2), 18),
        (dict(max_running_requests=4, max_queued_requests=1024), 256),
    ],
)
def test_an_engine_has_a_thread_for_each_request_that_it_may_hold(monkeypatch, sizes, threads):
    ray = use(monkeypatch, LocalRay({"CPU": 8.0}, {"CPU": 8.0}))
    module.EngineGroup.create(ServerArgs(model_path="demo", **sizes), replicas=1)
    assert ray.actors[0].options["generation"] == threads


class RefusingActor:
    """An engine whose `prepare_weights` has this outcome."""

    def __init__(self, outcome=None):
        self.num_drops = 0
        self.prepare_weights = Method(lambda path, version: outcome)
        self.drop_weights = Method(self._drop)
        self.stats = Method(lambda: outcome)

    def _drop(self):
        self.num_drops += 1


@pytest.mark.parametrize(
    "cause",
    [PeerLostError("process 1 has ended"), EngineDeadError("the engine has ended"), ReplicaLostError("it has ended")],
)
def test_an_engine_that_has_ended_is_a_lost_one(local_ray, cause):
    group = module.EngineGroup([RefusingActor(), RefusingActor(RayTaskError(cause))])
    for call in (group.stats, lambda: group.prepare_weights("new")):
        with pytest.raises(ReplicaLostError) as caught:
            call()
        assert str(cause) in str(caught.value) and "create the group again" in str(caught.value)
        assert "\x1b" not in str(caught.value) and caught.value.code == "replica_lost"


@pytest.mark.parametrize(
    "cause", [QueueFullError("full"), RoutingIncompleteError("no row"), ConfigError("no"), InvalidRequestError("no")]
)
def test_an_error_of_ours_is_raised_as_itself(local_ray, cause):
    with pytest.raises(type(cause)) as caught:
        module.EngineGroup([RefusingActor(RayTaskError(cause))]).stats()
    assert caught.value is cause


def test_the_message_of_weights_that_are_refused_has_no_traceback(local_ray):
    actors = [RefusingActor(RayTaskError(WriteError("the disk is full"))), RefusingActor()]
    with pytest.raises(WeightsMismatchError) as caught:
        module.EngineGroup(actors).prepare_weights("new")
    assert str(caught.value) == "engine 0: the disk is full; the old weights serve on in all engines"
    actors[0] = RefusingActor(RayTaskError(RuntimeError("not ours")))
    with pytest.raises(RayTaskError, match="not ours"):
        module.EngineGroup(actors).prepare_weights("new")
    assert actors[1].num_drops == 2


@pytest.mark.parametrize(
    "error",
    [
        UpdateInProgressError("another update"),
        InvalidRequestError("prepared", param="version", code="weights_prepared"),
    ],
)
def test_a_call_that_finds_prepared_weights_drops_its_own_alone(local_ray, error):
    actors = [RefusingActor(), RefusingActor(RayTaskError(error)), RefusingActor(RayTaskError(error))]
    with pytest.raises(type(error)) as caught:
        module.EngineGroup(actors).prepare_weights("new")
    assert caught.value is error and [actor.num_drops for actor in actors] == [1, 0, 0]


class GeneratingActor:
    """An engine that notes what it is asked to generate."""

    def __init__(self):
        self.calls = []
        self.generate = Method(self._generate)

    def _generate(self, input_ids, sampling_params, options, call_id):
        self.calls.append((input_ids, sampling_params, options))
        return [tuple(ids) for ids in input_ids]


def test_options_with_a_value_a_prompt_go_with_their_prompts(local_ray):
    actors, prompts = [GeneratingActor(), GeneratingActor()], [[5], [6], [7]]
    group, params = module.EngineGroup(actors), [{"seed": seed} for seed in range(3)]
    options = {"rid": ["a", "b", "c"], "routed_experts_start_len": (0, 1, 2), "token_ids_logprob": [[1], [2], [3]]}
    results = group.generate(prompts, params, **options, return_routed_experts=True, max_new_tokens=4)
    assert results == [(5,), (6,), (7,)], "in order"
    same = {"return_routed_experts": True, "max_new_tokens": 4}
    first = {"rid": ["a", "b"], "routed_experts_start_len": [0, 1], "token_ids_logprob": [[1], [2]]}
    second = {"rid": ["c"], "routed_experts_start_len": [2], "token_ids_logprob": [[3]]}
    assert actors[0].calls == [([[5], [6]], params[:2], {**first, **same})]
    assert actors[1].calls == [([[7]], params[2:], {**second, **same})]
    group.generate(prompts[:1], {"seed": 1}, rid="a", token_ids_logprob=[1, 2])
    assert actors[0].calls[1:] == [([[5]], {"seed": 1}, {"rid": "a", "token_ids_logprob": [1, 2]})]
    group.generate(np.array(prompts), None)
    assert [len(call[0]) for actor in actors for call in actor.calls] == [2, 1, 2, 1, 1]


def test_calls_of_several_threads_go_to_other_engines(local_ray):
    actors = [GeneratingActor() for _ in range(3)]
    group, inner = module.EngineGroup(actors), []
    actors[0].generate = Method(lambda *call: inner or [inner.append(None), group.generate([[8], [9]])][1:])
    group.generate([[5]])
    assert [[call[0] for call in actor.calls] for actor in actors] == [[], [[[8]]], [[[9]]]]


def test_a_group_travels_to_another_process(local_ray):
    assert pickle.loads(pickle.dumps(module.EngineGroup(["one", "two"]))).actors == ["one", "two"]
    pickle.loads(pickle.dumps(module.EngineGroup([], owned_placement_group="group"))).shutdown()
    assert local_ray.removed == ["group"]


class RememberingActor:
    """An engine that notes the answers it is given, and what it flushes."""

    def __init__(self, freed):
        self.rollouts, self.flushes = [], []
        self.remember_rollouts = Method(lambda *rollout: self.rollouts.append(rollout))
        self.flush_cache = Method(lambda *how: self.flushes.append(how) or freed)


def test_rollouts_and_flushes_meet_all_engines(local_ray):
    actors = [RememberingActor(3), RememberingActor(5)]
    group = module.EngineGroup(actors)
    group.remember_rollouts([1, 2], [3], seed=7, extra_key="a")
    group.remember_rollouts([1, 2], [4], choice=1)
    assert group.flush_cache(drafts=True) == group.flush_cache(retract=True) == [3, 5]
    for actor in actors:
        assert actor.rollouts == [([1, 2], [3], 7, 0, "a"), ([1, 2], [4], None, 1, None)]
        assert actor.flushes == [(True, False), (False, True)]
    actors[1].remember_rollouts = Method(lambda *rollout: RayTaskError(InvalidRequestError("no", param="seed")))
    with pytest.raises(InvalidRequestError, match="no"):
        group.remember_rollouts([1], [2], seed=-1)


class CheckingActor:
    """An engine that checks a call and generates nothing; its errors are pickled on their way, as Ray's are."""

    def __init__(self):
        self.processor = InputProcessor(LIMITS, None, random_seed=0)
        self.generate, self.abort = Method(self._generate), Method(lambda call_id: None)

    def _generate(self, input_ids, sampling_params, options, call_id):
        try:
            self.check(input_ids, sampling_params, options)
        except InvalidRequestError as error:
            return RayTaskError(pickle.loads(pickle.dumps(error)))
        return [{} for _ in input_ids]

    def check(self, input_ids, sampling_params, options):
        self.processor.process(GenerateReqInput(input_ids=input_ids, sampling_params=sampling_params, **options))


class BusyActor:
    """An engine whose `generate` ends when it is aborted, or when it is waited for, with this outcome."""

    def __init__(self, outcome):
        self.outcome, self.ids, self.aborted, self.references = outcome, [], [], []
        self.generate, self.abort = Method(self._generate), Method(self.aborted.append)

    def _generate(self, input_ids, sampling_params, options, call_id):
        self.ids.append(call_id)
        self.references.append(Reference(lambda: None if self.aborted else self.outcome))
        return self.references[0]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_engine_that_refuses_ends_the_parts_of_the_others(local_ray, index):
    actors = [BusyActor([{}]) for _ in range(4)]
    actors[index].outcome = RayTaskError(QueueFullError("full"))
    with pytest.raises(QueueFullError):
        module.EngineGroup(actors).generate([[5], [6], [7]], None, rid=["a", "b", "c"])
    for actor in actors[:3]:
        assert actor.ids == actors[0].ids and actor.aborted == (actor.ids if index < 2 else []), "others have ended"
        assert [reference.num_gets for reference in actor.references] == [1], "Ray prints errors that are not read"
    assert actors[3].ids == actors[3].aborted == []


def test_an_outcome_after_an_error_is_read_too(local_ray):
    late = Reference(lambda: None)
    actors = [RefusingActor(RayTaskError(InvalidRequestError("no"))), RefusingActor(late)]
    with pytest.raises(InvalidRequestError):
        module.EngineGroup(actors).stats()
    assert late.num_gets == 1


def test_a_caller_that_is_interrupted_ends_the_parts_of_all(local_ray):
    actors = [BusyActor([{}]), BusyActor(KeyboardInterrupt()), BusyActor(RayTaskError(QueueFullError("full")))]
    with pytest.raises(KeyboardInterrupt):
        module.EngineGroup(actors).generate([[5], [6], [7]])
    assert [actor.aborted for actor in actors] == [actor.ids for actor in actors]
    assert all(actor.references[0].num_gets for actor in actors)


def test_a_call_that_all_engines_answer_aborts_nothing(local_ray):
    actors = [BusyActor([{"index": 0}, {"index": 1}]), BusyActor([{"index": 2}])]
    group = module.EngineGroup(actors)
    assert [result["index"] for result in group.generate([[5], [6], [7]])] == [0, 1, 2]
    group.generate([[5], [6], [7]])
    assert all(actor.aborted == [] and len(set(actor.ids)) == 2 for actor in actors)


class ScoringActor:
    """An engine that checks sequences and their records as Engine.score does, and scores none."""

    def __init__(self):
        self.score = Method(self._score)

    def _score(self, token_ids, routed, options):
        try:
            for index, ids in enumerate(token_ids):
                with prompt_index(index if len(token_ids) > 1 else None, "token_ids"):
                    if 99 in ids:
                        raise InvalidRequestError(f"{PARAM} holds the token id 99", param="token_ids")
            for sample, record in enumerate(routed or []):
                if record is not None:
                    check_record(record, None, sample=sample, num_tokens=2)
        except (InvalidRequestError, RoutingAlignmentError) as error:
            return RayTaskError(pickle.loads(pickle.dumps(error)))
        return [
            {"token_ids": ids, "routed": record} for ids, record in zip(token_ids, routed or token_ids, strict=True)
        ]


PAIR = [5, 6]


@pytest.mark.parametrize(
    ("token_ids", "routed", "kind", "text"),
    [
        ([PAIR, PAIR, [5, 99], PAIR, PAIR], None, InvalidRequestError, "token_ids[2] holds the token id 99"),
        ([PAIR, PAIR, [5, 99]], None, InvalidRequestError, "token_ids[2] holds the token id 99"),
        ([[5, 99]], None, InvalidRequestError, "token_ids holds the token id 99"),
        ([PAIR] * 5, [None] * 4 + ["row"], RoutingAlignmentError, "sample 4: record is a str"),
        ([PAIR] * 4, [None] * 3, RoutingAlignmentError, "routed holds 3 records for 4 sequences; give one each"),
        ([PAIR], [None, None], RoutingAlignmentError, "routed holds 2 records for 1 sequences; give one each"),
        (PAIR, None, InvalidRequestError, "token_ids must be a list of sequences, each a list of token ids; this is a"),
        ("text", None, InvalidRequestError, "token_ids must be a list of sequences"),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_of_a_score_names_the_sequence_of_the_call(local_ray, token_ids, routed, kind, text, number):
    group = module.EngineGroup([ScoringActor() for _ in range(number)])
    with pytest.raises(kind) as caught:
        group.score(token_ids, routed=routed)
    assert type(caught.value) is kind and str(caught.value).startswith(text)


def test_scores_come_in_order_with_their_records(local_ray):
    group = module.EngineGroup([ScoringActor(), ScoringActor()])
    assert [score["token_ids"] for score in group.score([[1, 2], [3, 4], [5, 6]])] == [[1, 2], [3, 4], [5, 6]]
    assert group.score([]) == []


@pytest.mark.parametrize(
    ("sizes", "number"),
    [
        ({"precompile_bs_paddings": (4,), "max_queued_requests": 12}, 16),
        ({"max_running_requests": 64, "max_queued_requests": 100}, 164),
        ({}, module.MAX_CALLS),
    ],
)
def test_an_engine_takes_a_call_for_each_request_that_it_runs_or_queues(monkeypatch, sizes, number):
    ray = use(monkeypatch, LocalRay({"CPU": 4.0}, {"CPU": 4.0}))
    module.EngineGroup.create(dataclasses.replace(ARGS, **sizes))
    assert ray.actors[0].options["generation"] == number


GOOD, COLD, HOT = [1, 2, 3], {"temperature": 0.5}, {"temperature": -1.0}


@pytest.mark.parametrize(
    ("prompts", "params", "options"),
    [
        ([GOOD, GOOD, [1, 99], GOOD, GOOD], None, {}),
        ([GOOD, GOOD, GOOD, [1, 99]], None, {}),
        ([[], GOOD, GOOD], COLD, {}),
        ([GOOD, GOOD, list(range(40))], COLD, {}),
        ([GOOD] * 5, [COLD, COLD, COLD, HOT, COLD], {}),
        ([GOOD] * 3, [COLD, COLD, HOT], {}),
        ([GOOD] * 3, HOT, {}),
        ([GOOD] * 3, None, {"return_logprob": True, "token_ids_logprob": [[1], [2], [99]]}),
        ([GOOD] * 3, None, {"rid": ["a", "b", "c c"]}),
        ([GOOD] * 3, None, {"return_logprob": "yes"}),
        ([GOOD] * 3, {"max_tokens": 40}, {}),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_names_the_prompt_of_the_call_whichever_engine_has_it(local_ray, prompts, params, options, number):
    with pytest.raises(InvalidRequestError) as alone:
        CheckingActor().check(prompts, params, options)
    with pytest.raises(InvalidRequestError) as caught:
        module.EngineGroup([CheckingActor() for _ in range(number)]).generate(prompts, params, **options)
    actual, expected = caught.value, alone.value
    assert (str(actual), actual.param, actual.index, actual.code) == (
        str(expected),
        expected.param,
        expected.index,
        expected.code,
    )


@pytest.mark.parametrize(
    ("prompts", "options", "param", "match"),
    [
        ([[5], [6]], {"stream": True}, "stream", "stream=True is not served by an EngineGroup"),
        (
            [5, 6, 7],
            {},
            "input_ids",
            "a list of prompts, each a list of token ids; this is a list of 3",
        ),
        (np.arange(3), {}, "input_ids", "must be a list of prompts"),
        ("text", {}, "input_ids", "token ids; this is 'text'"),
        ([[5], 6], {}, "input_ids", "must be a list of prompts"),
        ([[5], [6]], {"rid": "z"}, "rid", "rid='z' is one id for 2 prompts; give a list with an id each"),
        ([[5], [6]], {"prediction": [5, 6]}, "prediction", "the expected answer to one prompt, and this call has 2"),
        ([[5], [6]], {"rid": ["z"]}, "rid", "rid has 1 values for 2 prompts"),
        ([[5], [6]], {"rid": ["z", "z"]}, "rid", "Duplicate request ID"),
        (
            [[5], [6]],
            {"sampling_params": [{}, {}, {}]},
            "sampling_params",
            "sampling_params has 3 values for 2 prompts",
        ),
        ([[5], [6]], {"token_ids_logprob": [[1]]}, "token_ids_logprob", "for 2 prompts in a list"),
    ],
)
def test_what_no_engine_of_a_group_could_answer_is_refused(local_ray, prompts, options, param, match):
    actors = [GeneratingActor(), GeneratingActor()]
    with pytest.raises(InvalidRequestError, match=match) as caught:
        module.EngineGroup(actors).generate(prompts, **options)
    assert caught.value.param == param and [actor.calls for actor in actors] == [[], []]


def test_a_group_that_was_shut_down_says_so(local_ray):
    group = module.EngineGroup([])
    group.shutdown()
    calls = [
        lambda: group.generate([[5]]),
        lambda: group.score([[5, 6]]),
        lambda: group.remember_rollouts([5], [6]),
        group.flush_cache,
        lambda: group.prepare_weights("new"),
        lambda: group.commit_weights("new"),
        lambda: group.update_weight_version("new"),
        group.stats,
        group.pause,
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="it was shut down; create another one"):
            call()


@pytest.mark.parametrize("method", ["commit_weights", "update_weight_version"])
def test_an_engine_that_has_died_leaves_no_other_held(monkeypatch, method):
    use(monkeypatch, LocalRay())
    living, dead = LocalActor(), LocalActor(is_dead=True)
    with pytest.raises(module.ReplicaLostError):
        getattr(module.EngineGroup([living, dead]), method)("new")
    assert not living.held and living.label == "old"


def test_an_engine_that_does_not_end_is_killed_after_a_time(monkeypatch):
    waits, killed, silent = [], [], Reference(lambda: None)

    class SilentRay(LocalRay):
        def get(self, calls, timeout=None):
            assert silent not in calls or timeout is not None, "it waits without bound"
            return []

        def wait(self, calls, *, num_returns, timeout):
            waits.append((len(calls), num_returns, timeout))
            return [call for call in calls if call is not silent], [silent]

        def kill(self, actor):
            killed.append(actor)

    use(monkeypatch, SilentRay())
    actors = [types.SimpleNamespace(shutdown=Method(lambda result=result: result)) for result in (None, silent)]
    group = module.EngineGroup(actors)
    group.shutdown()
    assert waits == [(2, 2, module.SHUTDOWN_S)] and killed == actors
    group.shutdown()
    assert len(waits) == 1 and len(killed) == 2, "idempotent"
