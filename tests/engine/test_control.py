"""Pauses and new weights by the doors of the engine: what was running ends as it would have, whatever held it in
between."""

import concurrent.futures
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.full_sequence import FullSequence
from oracles.testbeds import build_model
from routed_experts import (
    CheckpointError,
    Engine,
    EngineDeadError,
    InvalidRequestError,
    RoutingStats,
    UpdateInProgressError,
    WeightsMismatchError,
)
from routed_experts.core.weight_version import WeightVersion
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.loading.checkpoint import save
from support.engines import SMALL, PausedRequests, assert_idle, on_engine_thread, open_engine
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = np.random.default_rng(3).integers(3, 313, 40).tolist()
MODES = ("wait", "retract", "in_place", "abort")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    with Engine(str(folder), enable_return_routed_experts=True, **SMALL) as engine:
        yield engine


@pytest.fixture(autouse=True)
def left_whole(engine):
    yield
    engine.resume()
    assert engine.paused is None
    assert_idle(engine)


def begun(engine, *prompts, max_tokens=60):
    return PausedRequests(
        engine, *prompts, sampling_params=GREEDY | {"max_tokens": max_tokens}, return_routed_experts=True
    )


def ask(engine, prompt=PROMPT, max_tokens=60):
    return engine.generate(
        input_ids=prompt, sampling_params=GREEDY | {"max_tokens": max_tokens}, return_routed_experts=True
    )


def num_steps(engine):
    return on_engine_thread(engine, lambda core: core.num_steps)


def test_waiting_for_requests_to_pause_ends_with_what_refused_them_or_after_its_time(engine):
    with pytest.raises(InvalidRequestError, match="313"):
        PausedRequests(engine, PROMPT, [313])
    assert_idle(engine)
    engine.release_memory_occupation(["kv_cache"])
    with pytest.raises(TimeoutError, match=r"1 requests .* in 0\.5 s"):
        PausedRequests(engine, PROMPT, timeout_s=0.5)
    engine.resume_memory_occupation()


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_holds_and_a_resume_goes_on(engine, mode):
    """Tokens and rows are those of a run without a pause; a request submitted meanwhile waits."""
    whole = ask(engine)
    engine.flush_cache()
    calls = begun(engine, PROMPT)
    engine.pause(mode=mode)
    assert engine.paused == mode
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, engine, PROMPT[:9], 4)
        while on_engine_thread(engine, lambda core: len(core.ranks[0].waiting)) < 1 + (mode == "retract"):
            pass
        running = on_engine_thread(
            engine, lambda core: [(req.num_pages > 0, req.num_output) for req in core.ranks[0].running]
        )
        assert len(running) == (mode == "in_place") and all(holds for holds, _ in running)
        before = num_steps(engine)
        assert engine.check_integrity() == []
        assert num_steps(engine) == before, "nothing moves"
        assert not late.done()
        engine.resume()
        assert late.result(timeout=60)["meta_info"]["completion_tokens"] == 4
    (result,) = calls.results()
    ids, record = result["output_ids"], record_from_meta_info(result)
    assert result["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert ids == whole["output_ids"][: len(ids)] and len(ids) > 0 and (mode == "abort" or len(ids) == 60)
    assert record.num_rows == len(PROMPT) + len(ids) - 1
    same = np.mean(record.ids == record_from_meta_info(whole).ids[: record.num_rows])
    assert same > (
        0.99 if mode == "retract" else 0.999
    )  # a prompt that is read anew may differ in the last bit, at a near tie


def test_a_pause_that_waits_returns_when_what_ran_has_ended(engine):
    calls = begun(engine, PROMPT, PROMPT[:20])
    engine.pause(mode="wait")
    assert on_engine_thread(engine, lambda core: (core.request_table.num_live, len(core.ranks.running))) == (0, 0)
    assert [result["meta_info"]["finish_reason"]["type"] for result in calls.results()] == ["length"] * 2


def test_a_pause_may_be_followed_by_another(engine):
    calls = begun(engine, PROMPT, max_tokens=300)
    for mode in ("in_place", "retract", "in_place", "abort"):
        engine.pause(mode=mode)
        assert engine.paused == mode
    assert calls.results()[0]["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted by a pause"}


def test_a_request_can_be_aborted_while_all_is_frozen(engine):
    calls = begun(engine, PROMPT, max_tokens=300)
    engine.pause(mode="in_place")
    assert engine.abort(abort_all=True) == 1
    (result,) = calls.results()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert record_from_meta_info(result).num_rows == len(PROMPT) + len(result["output_ids"]) - 1


def test_a_resume_without_a_pause_is_nothing_and_a_mode_must_be_named(engine):
    engine.resume()
    for mode in ("later", None, 3):
        with pytest.raises(InvalidRequestError, match="choose one of wait, retract, in_place, abort") as caught:
            engine.pause(mode=mode)
        assert caught.value.param == "mode"
    assert engine.paused is None


def test_shutdown_ends_a_pause_and_its_waiters(tmp_path):
    engine = Engine(str(write_tiny_checkpoint(tmp_path)), enable_return_routed_experts=True, **SMALL)
    calls = begun(engine, PROMPT, max_tokens=400)
    engine.pause(mode="in_place")
    engine.shutdown()
    assert calls.results()[0]["meta_info"]["finish_reason"]["message"] == "the engine was shut down"
    for call in (lambda: engine.pause(mode="wait"), engine.resume, lambda: engine.score(PROMPT)):
        with pytest.raises(EngineDeadError):
            call()


def test_a_resume_releases_a_pause_that_still_waits(engine):
    calls, done = begun(engine, PROMPT, max_tokens=400), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: (engine.pause(mode="wait"), done.set()))
        while engine.paused != "wait" and not done.is_set():
            pass
        engine.resume()
        waits.result(timeout=60)
    engine.abort(abort_all=True)
    calls.results()


# --- weights


def build_oracle(seed):
    return FullSequence(tiny_config(), tiny_tensors(tiny_config(), seed=seed))


def continues(oracle, prompt, output):
    """Is each token of a greedy answer the oracle's own."""
    logits = oracle.run([*prompt, *output]).logits[len(prompt) - 1 : -1]
    return np.mean(logits.argmax(-1) == np.asarray(output)) == 1.0


def next_version(engine):
    return on_engine_thread(engine, lambda core: core.runner.weight_version) + 1


FORMS = {
    "state": lambda model: nnx.split(model)[1],
    "module": lambda model: model,
    "pure dict": lambda model: nnx.to_pure_dict(nnx.split(model)[1]),
    "dotted host arrays": lambda model: {
        ".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.split(model)[1])
    },
    "text keys": lambda model: jax.tree.map(lambda leaf: leaf, as_text(nnx.to_pure_dict(nnx.split(model)[1]))),
}


def as_text(tree):
    return {str(key): as_text(part) for key, part in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_every_form_serve_the_next_request(engine, form):
    seed, version = 11 + list(FORMS).index(form), next_version(engine)
    engine.update_weights(FORMS[form](build_model(tiny_config(), build_oracle(seed).tensors)), version=version)
    result = ask(engine, PROMPT[:20], 8)
    assert continues(build_oracle(seed), PROMPT[:20], result["output_ids"])
    assert result["meta_info"]["weight_version"] == str(version)
    record = record_from_meta_info(result)
    assert record.version_spans == ((0, 27, version),) and record.labels == {version: str(version)}


@pytest.mark.parametrize(
    ("mode", "cache"), [("in_place", "keep"), ("in_place", "flush"), ("retract", "flush"), ("retract", "keep")]
)
def test_a_request_across_an_update_names_the_weights_of_its_rows(engine, mode, cache):
    old = next_version(engine) - 1
    calls = begun(engine, PROMPT, max_tokens=300)
    engine.pause(mode=mode)
    engine.update_weights(
        nnx.split(build_model(tiny_config(), build_oracle(21).tensors))[1], version=old + 1, cache=cache
    )
    engine.resume()
    (result,) = calls.results()
    record = record_from_meta_info(result)
    (low, middle, first), (again, end, second) = record.version_spans
    assert (low, first, second, end) == (0, old, old + 1, len(PROMPT) + 299) and middle == again
    assert len(PROMPT) <= middle < end
    assert len(result["output_ids"]) == 300


def broken(change):
    flat = FORMS["dotted host arrays"](build_model(tiny_config(), tiny_tensors(tiny_config())))
    change(flat)
    return flat


def donated():
    array = jnp.ones(64)
    array.delete()
    return array


MISFITS = {
    "shape": (lambda flat: flat.update(norm=jnp.ones(63)), r"1 arrays differ .*norm: float32\[63\] for float32\[64\]"),
    "dtype": (lambda flat: flat.update(norm=jnp.ones(64, jnp.bfloat16)), r"norm: bfloat16\[64\] for float32\[64\]"),
    "missing": (lambda flat: flat.pop("norm"), r"norm: nothing for float32\[64\]"),
    "unknown": (lambda flat: flat.update(extra=jnp.ones(3)), r"extra: float32\[3\] is not in the model"),
    "no array": (lambda flat: flat.update(norm=1.0), r"norm: no array but 1.0 for float32\[64\]"),
    "donated": (lambda flat: flat.update(norm=donated()), r"norm: a donated float32\[64\] for"),
    "broken": (
        lambda flat: flat.update(norm=jnp.ones(64).at[5].set(jnp.nan)),
        r"1 arrays hold NaN or infinity: norm; the served weights",
    ),
    "all": (lambda flat: flat.clear(), r"and \d+ more; give the served names"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_weights_that_do_not_fit_are_named_and_change_nothing(engine, kind):
    change, match = MISFITS[kind]
    before, version = ask(engine, max_tokens=4), next_version(engine)
    with pytest.raises(WeightsMismatchError, match=match) as caught:
        engine.update_weights(broken(change), version=version)
    assert caught.value.param == "state"
    assert next_version(engine) == version and ask(engine, max_tokens=4)["output_ids"] == before["output_ids"]


def test_what_is_no_weights_and_a_cache_that_is_none_are_refused(engine):
    with pytest.raises(WeightsMismatchError, match=r"must be an nnx\.State, an nnx\.Module or a mapping"):
        engine.update_weights([1, 2], version=next_version(engine))
    with pytest.raises(InvalidRequestError, match="choose flush or keep"):
        engine.update_weights({}, version=next_version(engine), cache="drop")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_are_served_in_the_served_dtype_and_the_callers_arrays_stay_its_own(engine, dtype):
    """The trainer may write to, donate and delete its arrays after the push."""
    oracle = build_oracle(41)
    state = nnx.split(build_model(tiny_config(), oracle.tensors))[1]
    mine = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
    expected = jax.tree.map(lambda leaf: np.asarray(leaf.astype(dtype).astype(jnp.float32)), state)
    try:
        engine.update_weights(mine, version=next_version(engine), copy=True)
        served = on_engine_thread(engine, lambda core: core.runner.state)
        pairs = zip(*(jax.tree.leaves(tree) for tree in (served, mine, expected)), strict=True)
        for own, callers, values in pairs:
            assert own.dtype == jnp.float32 and np.array_equal(own, values)
            assert own.unsafe_buffer_pointer() != callers.unsafe_buffer_pointer() and not callers.is_deleted()
            callers.delete()
        assert engine.score([1, 2, 3]).logprobs.shape == (2,)
    finally:
        engine.update_weights(nnx.split(build_model(tiny_config(), tiny_tensors(tiny_config())))[1], copy=True)


def test_copies_that_cannot_be_are_refused_and_nothing_has_changed(engine):
    before = engine.get_weight_version()
    state = nnx.to_pure_dict(nnx.split(build_model(tiny_config(), tiny_tensors(tiny_config())))[1])
    flat = dict(state)
    for change, text in (
        ({"norm": jnp.ones(64).at[5].set(jnp.inf)}, "1 arrays hold NaN or infinity: norm"),
        ({"norm": jnp.ones(63)}, r"norm: .*float32\[63\] for"),
        ({"norm": jnp.ones(64, jnp.int32)}, r"norm: .*int32\[64\] for"),
        ({"norm": np.ones(64, np.dtype(np.float32).newbyteorder())}, r"norm: >f4\[64\] for"),
        ({"norm": np.ones(64, np.complex64)}, r"norm: complex64\[64\] for"),
        ({"norm": np.ones(64, np.longdouble)}, r"norm: .*\[64\] for"),
    ):
        with pytest.raises(WeightsMismatchError, match=text):
            engine.update_weights({**flat, **change}, copy=True)
    blocks = nnx.to_flat_state(nnx.split(build_model(tiny_config(), tiny_tensors(tiny_config())))[1])
    path, leaf = next((path, leaf) for path, leaf in blocks if len(path) > 1)
    name = ".".join(map(str, path))
    for twice in ({**flat, name: leaf[...]}, {name: leaf[...], **flat}):
        with pytest.raises(WeightsMismatchError, match=f"{name} twice"):
            engine.update_weights(twice, copy=True)
    with pytest.raises(InvalidRequestError, match="donate=True and copy=True"):
        engine.update_weights(state, donate=True, copy=True)
    with pytest.raises(InvalidRequestError, match="copy='yes' must be True or False"):
        engine.update_weights(state, copy="yes")
    assert engine.get_weight_version() == before


def test_donated_weights_are_the_engines_until_others_come_or_memory_is_released(engine):
    donated = [nnx.split(build_model(tiny_config(), build_oracle(seed).tensors))[1] for seed in (31, 32)]
    deleted = lambda: [{leaf.is_deleted() for leaf in jax.tree.leaves(state)} for state in donated]  # noqa: E731
    for state, seed, expected in zip(donated, (31, 32), ([{False}, {False}], [{True}, {False}]), strict=True):
        engine.update_weights(state, version=next_version(engine), donate=True)
        assert deleted() == expected
        assert continues(build_oracle(seed), PROMPT[:20], ask(engine, PROMPT[:20], 8)["output_ids"])
    engine.release_memory_occupation(["weights"])
    assert deleted() == [{True}, {True}]
    engine.resume_memory_occupation(build_model(tiny_config(), build_oracle(33).tensors), version=next_version(engine))
    assert continues(build_oracle(33), PROMPT[:20], ask(engine, PROMPT[:20], 8)["output_ids"])
    with pytest.raises(InvalidRequestError, match="donate='yes' must be True or False"):
        engine.update_weights({}, version=next_version(engine), donate="yes")


def test_a_version_set_meanwhile_waits_for_its_promised_weights(engine):
    """Arrays are donated under a version; a concurrent rename of the served weights is second, and the arrays are
    served."""
    version, started, renamed = next_version(engine), threading.Event(), threading.Event()

    class Slow(dict):
        """Names that take their time."""

        def items(self):
            started.set()
            renamed.wait(1)  # without a turn of its own the rename comes through
            return super().items()

    def rename():
        try:
            return engine.update_weight_version(version)
        finally:
            renamed.set()

    flat = nnx.to_flat_state(nnx.split(build_model(tiny_config(), build_oracle(34).tensors))[1])
    slow = Slow({".".join(map(str, path)): leaf for path, leaf in flat})
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        update = pool.submit(engine.update_weights, slow, version=version, donate=True)
        assert started.wait(30)
        late = pool.submit(rename)
        assert update.result().update_count == version
        assert late.result() == WeightVersion(label=str(version), update_count=version + 1), "second, of the same label"
    assert continues(build_oracle(34), PROMPT[:20], ask(engine, PROMPT[:20], 8)["output_ids"])


def test_a_second_update_meanwhile_is_refused_and_changes_nothing(engine, tmp_path):
    version, started, refused = next_version(engine), threading.Event(), threading.Event()

    class Slow(dict):
        """Names that take until the other update was refused."""

        def items(self):
            started.set()
            assert refused.wait(30)
            return super().items()

    flat = nnx.to_flat_state(nnx.split(build_model(tiny_config(), build_oracle(35).tensors))[1])
    slow = Slow({".".join(map(str, path)): leaf for path, leaf in flat})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        update = pool.submit(engine.update_weights, slow, version=version)
        assert started.wait(30)
        for second in (engine.update_weights_from_disk, engine.update_weights):
            with pytest.raises(UpdateInProgressError, match="another update of the weights is under way") as caught:
                second(tmp_path, version=version + 1)
            assert (caught.value.status, caught.value.code) == (409, "update_in_progress")
        refused.set()
        assert update.result(30).update_count == version
    assert ask(engine, PROMPT[:20], 3)["meta_info"]["weight_version"] == str(version)
    engine.update_weights(slow, version=version + 1)
    assert continues(build_oracle(35), PROMPT[:20], ask(engine, PROMPT[:20], 8)["output_ids"])


@pytest.mark.parametrize("path", [5, None, b"folder"])
@pytest.mark.parametrize("call", [Engine.update_weights_from_disk, Engine.prepare_weights])
def test_what_is_no_path_is_refused_by_the_name_of_its_argument(engine, call, path):
    version = next_version(engine)
    with pytest.raises(InvalidRequestError, match=r"path=.*: expected str or pathlib\.Path; give the folder") as caught:
        call(engine, path)
    assert caught.value.param == "path"
    assert next_version(engine) == version


def test_weights_from_disk_serve_the_next_request(engine, tmp_path):
    version = next_version(engine)
    engine.update_weights_from_disk(write_tiny_checkpoint(tmp_path, seed=31, tokenizer=False), version=version)
    result = ask(engine, PROMPT[:20], 8)
    assert continues(build_oracle(31), PROMPT[:20], result["output_ids"])
    assert result["meta_info"]["weight_version"] == str(version)


def test_a_folder_in_another_dtype_is_read_in_the_served_one(engine, tmp_path):
    folder = write_tiny_checkpoint(tmp_path, seed=32, tokenizer=False, dtype="bfloat16")
    engine.update_weights_from_disk(folder, version=next_version(engine))
    assert len(ask(engine, max_tokens=3)["output_ids"]) == 3


def test_a_folder_of_another_model_or_of_none_is_refused(engine, tmp_path):
    before = next_version(engine)
    other = write_tiny_checkpoint(tmp_path / "other", tokenizer=False, num_experts_per_tok=2)
    with pytest.raises(WeightsMismatchError, match="config differs in router") as caught:
        engine.update_weights_from_disk(other, version=before)
    assert caught.value.param == "model_path"
    tensors = tiny_tensors(tiny_config()) | {"model.norm.weight": np.full(64, np.inf, np.float32)}
    save(tmp_path / "broken", tiny_config(), tensors)
    with pytest.raises(WeightsMismatchError, match="1 arrays hold NaN or infinity: norm"):
        engine.update_weights_from_disk(tmp_path / "broken", version=before)
    with pytest.raises(CheckpointError):
        engine.update_weights_from_disk(tmp_path / "nowhere", version=before)
    assert next_version(engine) == before


def test_scores_while_paused_are_those_of_the_weights_that_are_served(engine):
    tokens, oracle = PROMPT, build_oracle(41)
    engine.pause(mode="in_place")
    engine.update_weights(build_model(tiny_config(), oracle.tensors), version=next_version(engine))
    out = engine.score(tokens)
    assert (out.weight_version, out.update_count) == (str(out.update_count), next_version(engine) - 1)
    expected = oracle.run(tokens, out.routed_experts.ids).logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-4)


def test_counts_are_the_bincount_of_all_rows_when_nothing_is_cached(engine):
    """Prompts of several chunks beside decoding requests, and requests without rows."""
    engine.flush_cache()
    engine.reset_routing_stats()
    prompts = [
        np.random.default_rng(seed).integers(3, 313, length).tolist()
        for seed, length in ((7, 90), (8, 3), (9, 1), (10, 41))
    ]
    answers = engine.generate(input_ids=prompts, sampling_params=GREEDY | {"max_tokens": 9}, return_routed_experts=True)
    stats = engine.routing_stats()
    expected = RoutingStats.from_records([record_from_meta_info(answer) for answer in answers])
    assert (stats.counts == expected.counts).all() and stats.num_tokens.tolist() == expected.num_tokens.tolist() == [
        135,
        32,
    ]
    stats.check_model(expected.layer_ids, expected.num_experts)
    engine.generate(input_ids=prompts[0], sampling_params=GREEDY | {"max_tokens": 9})
    again = (
        engine.reset_routing_stats().num_tokens - stats.num_tokens
    )  # its prefix is known by now: fewer tokens of it are fed
    assert 0 < again[0] < 90 and again[1] == 8
    assert not engine.routing_stats().num_tokens.any()
    engine.generate(input_ids=[[7]], sampling_params=GREEDY | {"max_tokens": 5})  # its prompt fits a step that decodes
    assert engine.reset_routing_stats().num_tokens.tolist() == [1, 4]


def test_replaced_weights_are_free_without_a_collection_of_garbage(tmp_path):
    folder = write_tiny_checkpoint(tmp_path)
    with open_engine(folder) as engine:
        core = engine.components.core
        gc.collect()
        gc.disable()
        try:
            for version, from_disk in enumerate((False, True, True, False, False), start=1):
                served = [weakref.ref(array) for array in jax.tree.leaves(core.runner.state)]
                if from_disk:
                    engine.update_weights_from_disk(folder, version=version)
                else:
                    engine.update_weights(jax.tree.map(jnp.copy, core.runner.state), version=version)
                engine.generate(input_ids=[5], max_new_tokens=2)  # no step of the old weights is in flight any more
                assert not [leaf_ref for leaf_ref in served if leaf_ref() is not None], version
        finally:
            gc.enable()
