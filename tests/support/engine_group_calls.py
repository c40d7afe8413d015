"""Calls of an EngineGroup in a Ray of its caller, for tests: what many threads, and what a lost process, may cost.

It prints {"passed": [names]}. `python -m support.engine_group_calls SPEC`, SPEC a JSON object with the address of a
Ray and its process, the folder of weights, and `checks`: names of functions below. Those of FOLLOWED get an engine of
two processes."""

import json
import os
import signal
import sys
import threading

import ray

from routed_experts import InvalidRequestError, ReplicaLostError, ServerArgs
from routed_experts.fleet import engine_group
from routed_experts.fleet.engine_group import EngineGroup, processes
from support.engine_group_driver import GREEDY, SIZES, raised
from support.fleet_process import FOLLOWER, actors

LIMIT_S = 40.0  # of a call that must come back
FEW_CALLS = 16  # threads of an engine for calls that generate; the engines of FOLLOWED have as many as they like
NUM_CALLERS = 24


def main(spec):
    folder = spec["folders"]
    ray.init(address=spec["address"], namespace="trainer", log_to_driver=False)
    most = engine_group.MAX_CALLS
    plain = [name for name in spec["checks"] if name not in FOLLOWED]
    if plain:
        args = ServerArgs(model_path=f"{folder}/w0", **SIZES)
        engine_group.MAX_CALLS = FEW_CALLS
        group = EngineGroup.create(args, replicas=2, resources={"CPU": 1})
        engine_group.MAX_CALLS = most
        try:
            for name in plain:
                CHECKS[name](group, folder)
        finally:
            group.shutdown()
    for name in FOLLOWED.keys() & set(spec["checks"]):
        args = ServerArgs(model_path=f"{folder}/w0", tp_size=2, **SIZES)
        group = EngineGroup.create(args, processes(2, watchdog_timeout=8.0), resources={"CPU": 1})
        try:
            FOLLOWED[name](group, folder, spec["pid"])
        finally:
            group.shutdown()
    print(json.dumps({"passed": spec["checks"]}), flush=True)


def within(call, seconds=LIMIT_S):
    """The result of a call that has to return in this time, or its error."""
    outcome = []

    def run():
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)  # one that hangs does not keep the process
    thread.start()
    thread.join(seconds)
    assert outcome, f"it has not returned within {seconds:g} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class Callers:
    """Threads that generate one prompt after another until `stop`."""

    def __init__(self, group, number=NUM_CALLERS):
        self.errors, self.counts, self._stopped = [], [0] * number, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(group, i), daemon=True) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self, group, number):
        while not self._stopped.is_set():
            try:
                group.generate([[5, 6, 7, number], [7, 6, 5, number]], GREEDY)
                self.counts[number] += 1
            except Exception as error:
                self.errors.append(error)
                return

    def stop(self):
        self._stopped.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in self._threads) and self.errors == []
        assert all(self.counts), self.counts


def wait_accepted(group, number):
    """Wait until every engine has taken so many requests that have not ended."""
    clock = threading.Event()
    for _ in range(400):
        stats = within(group.stats)
        if all(entry["accepted"] - sum(entry["finished"].values()) >= number for entry in stats):
            return
        clock.wait(0.05)
    raise AssertionError(stats)


def check_push_under_load(group, folder):
    callers = Callers(group)
    for number in (1, 2):
        within(lambda number=number: group.prepare_weights(f"{folder}/w{number}", version=f"v{number}"))
        within(lambda number=number: group.commit_weights(f"v{number}"))
    callers.stop()


def check_pause_with_many_waiting(group, folder):
    within(lambda: group.pause("in_place"))
    callers = Callers(group)
    wait_accepted(group, FEW_CALLS)
    within(group.resume)
    callers.stop()


def check_release_with_many_waiting(group, folder):
    within(lambda: group.release_memory(["kv_cache"]))
    callers = Callers(group)
    wait_accepted(group, FEW_CALLS)
    within(group.resume_memory)
    callers.stop()


def check_samples_without_a_seed_differ(group, folder):
    sampling = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 12}
    samples = [result["output_ids"] for result in within(lambda: group.generate([[5, 6, 7, 8]] * 16, sampling))]
    assert len(set(map(tuple, samples))) == 16, samples
    seeded = within(lambda: group.generate([[5, 6, 7, 8]] * 16, {**sampling, "seed": 3}))
    assert len({tuple(result["output_ids"]) for result in seeded}) == 1


def check_a_second_preparation_costs_the_first_nothing(group, folder):
    within(lambda: group.prepare_weights(f"{folder}/w1", version="a"))
    error = raised(InvalidRequestError, lambda: within(lambda: group.prepare_weights(f"{folder}/w2", version="b")))
    assert error.code == "weights_prepared" and "'a' are prepared" in str(error)
    assert [stats["prepared_version"] for stats in group.stats()] == ["a", "a"]
    within(group.drop_weights)
    assert [stats["prepared_version"] for stats in group.stats()] == [None, None]


def check_options_with_a_value_a_prompt(group, folder):
    prompts, rids, starts = [[5, 6, 7, number] for number in range(3)], ["a", "b", "c"], [0, 1, 2]
    params = [{**GREEDY, "max_new_tokens": length} for length in (2, 3, 4)]
    options = {"rid": rids, "routed_experts_start_len": starts, "return_routed_experts": True}
    results = within(lambda: group.generate(prompts, params, **options))
    assert [result["meta_info"]["id"] for result in results] == rids
    assert [result["start"] for result in results] == starts
    assert [len(result["output_ids"]) for result in results] == [2, 3, 4]


def wait_ended(group):
    """Wait until every engine has ended all that it has taken; it need not run."""
    clock = threading.Event()
    for _ in range(100):
        stats = within(group.stats)
        if all(entry["accepted"] == sum(entry["finished"].values()) for entry in stats):
            return [entry["finished"] for entry in stats]
        clock.wait(0.05)
    raise AssertionError(stats)


def check_a_refusal_leaves_no_request(group, folder):
    within(lambda: group.pause("in_place"))
    before = wait_ended(group)
    prompts = [[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 10], [5, 99999]]
    for rids in (None, ["a", "b", "c", "d"]):
        error = raised(InvalidRequestError, lambda rids=rids: within(lambda: group.generate(prompts, GREEDY, rid=rids)))
        assert error.index == 3, error
    after = wait_ended(group)
    assert [entry.get("length", 0) for entry in after] == [entry.get("length", 0) for entry in before]
    within(group.resume)
    assert len(within(lambda: group.generate(prompts[:3], GREEDY, rid=["a", "b", "c"]))) == 3


def check_an_interrupt_leaves_no_request(group, folder):
    within(lambda: group.pause("in_place"))

    def interrupt():
        wait_accepted(group, 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    raised(KeyboardInterrupt, lambda: group.generate([[5, 6, 7, number] for number in range(4)], GREEDY))
    thread.join(LIMIT_S)
    wait_ended(group)
    within(group.resume)


CHECKS = {
    "refused": check_a_refusal_leaves_no_request,
    "interrupted": check_an_interrupt_leaves_no_request,
    "options": check_options_with_a_value_a_prompt,
    "prepared": check_a_second_preparation_costs_the_first_nothing,
    "samples": check_samples_without_a_seed_differ,
    "push": check_push_under_load,
    "pause": check_pause_with_many_waiting,
    "release": check_release_with_many_waiting,
}


def check_the_death_of_a_follower(group, folder, ray_pid):
    assert len(within(lambda: group.generate([[5, 6, 7]], GREEDY))) == 1
    (follower,) = actors(FOLLOWER, ray_pid)
    os.kill(follower, signal.SIGKILL)
    calls = [lambda: group.generate([[5, 6, 7]], GREEDY), lambda: group.prepare_weights(f"{folder}/w1")]
    for call in calls * 2:
        error = raised(ReplicaLostError, lambda call=call: within(call))
        assert error.code == "replica_lost" and "\x1b" not in str(error), str(error)


def check_many_calls_wait_at_once(group, folder, ray_pid):
    within(lambda: group.pause("in_place"))
    callers = Callers(group)
    wait_accepted(group, 2 * NUM_CALLERS)
    within(group.resume)
    callers.stop()


FOLLOWED = {"follower": check_the_death_of_a_follower, "many": check_many_calls_wait_at_once}

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
