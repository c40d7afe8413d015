"""EngineGroup with actors of this process in the place of Ray's."""

import types

import pytest

from routed_experts.fleet import engine_group as module


class RayActorError(Exception):
    pass


class RayTaskError(Exception):
    pass


class Method:
    def __init__(self, call):
        self.remote = call


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


class LocalRay:
    exceptions = types.SimpleNamespace(RayActorError=RayActorError, RayTaskError=RayTaskError)

    def get(self, calls):
        for call in calls:
            if isinstance(call, Exception):
                raise call
        return list(calls)


@pytest.mark.parametrize("method", ["commit_weights", "update_weight_version"])
def test_an_engine_that_has_died_leaves_no_other_held(monkeypatch, method):
    ray = LocalRay()
    monkeypatch.setattr(module, "import_ray", lambda name="ray": ray.exceptions if name == "ray.exceptions" else ray)
    living, dead = LocalActor(), LocalActor(is_dead=True)
    with pytest.raises(module.ReplicaLostError):
        getattr(module.EngineGroup([living, dead]), method)("new")
    assert not living.held and living.label == "old"


def test_an_engine_that_does_not_end_is_killed_after_a_time(monkeypatch):
    waits, killed, silent = [], [], object()

    class SilentRay(LocalRay):
        def get(self, calls, timeout=None):
            assert silent not in calls or timeout is not None, "it waits without bound"
            return []

        def wait(self, calls, *, num_returns, timeout):
            waits.append((len(calls), num_returns, timeout))
            return [call for call in calls if call is not silent], [silent]

        def kill(self, actor):
            killed.append(actor)

    monkeypatch.setattr(module, "import_ray", lambda name="ray": SilentRay.exceptions if "." in name else SilentRay())
    actors = [types.SimpleNamespace(shutdown=Method(lambda result=result: result)) for result in (None, silent)]
    group = module.EngineGroup(actors)
    group.shutdown()
    assert waits == [(2, 2, module.SHUTDOWN_S)] and killed == actors
    group.shutdown()
    assert len(waits) == 1 and len(killed) == 2, "idempotent"
