"""New weights in two halves, and admission that is held between them: what several engines need to swap as one."""

import itertools
import threading

import numpy as np
import pytest

from oracles.full_sequence import FullSequence
from routed_experts import CheckpointError, Engine, InvalidRequestError, WeightsMismatchError
from support.engines import SMALL, assert_idle, on_engine_thread
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

PROMPT = np.random.default_rng(5).integers(3, 313, 20).tolist()
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        seed: write_tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed, tokenizer=False)
        for seed in (0, 51)
    }


@pytest.fixture(scope="module")
def engine(folders):
    with Engine(str(folders[0]), enable_return_routed_experts=True, skip_tokenizer_init=True, **SMALL) as engine:
        yield engine


@pytest.fixture(autouse=True)
def left_whole(engine):
    yield
    engine.drop_weights()
    engine.open_admission()
    engine.resume()
    assert_idle(engine)


def ask(engine, max_tokens=6):
    result = engine.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_tokens": max_tokens})
    return result["output_ids"], result["meta_info"]["update_count"]


def is_of(seed, output_ids):
    """Whether the tokens are greedy ones of the model of this seed, by the oracle."""
    oracle = FullSequence(tiny_config(), tiny_tensors(tiny_config(), seed=seed))
    tokens = [*PROMPT, *output_ids]
    logits = oracle.run(tokens[:-1]).logprobs[len(PROMPT) - 1 :]
    chosen = np.take_along_axis(logits, np.asarray(output_ids)[:, None], axis=1)[:, 0]
    return bool((logits.max(axis=1) - chosen < 1e-4).all())


def test_prepared_weights_serve_from_their_commit_on_and_not_before(engine, folders):
    version = engine.stats().update_count + 1
    engine.prepare_weights(folders[51], version=version)
    assert engine.prepared_version == str(version)
    tokens, served = ask(engine)
    assert served == version - 1 and is_of(0, tokens) and not is_of(51, tokens)
    engine.score(PROMPT)  # prepared weights are in nobody's way
    engine.commit_weights(version)
    tokens, served = ask(engine)
    assert served == version and is_of(51, tokens) and not is_of(0, tokens)
    assert engine.prepared_version is None
    engine.update_weights_from_disk(folders[0], version=version + 1)


def test_dropped_weights_never_serve_and_their_version_may_come_again(engine, folders):
    version = engine.stats().update_count + 1
    for _ in range(2):
        engine.prepare_weights(folders[51], version=version)
        engine.drop_weights()
        engine.drop_weights()
    tokens, served = ask(engine)
    assert served == version - 1 and is_of(0, tokens)
    with pytest.raises(InvalidRequestError, match=f"version='{version}' cannot be committed: none are prepared"):
        engine.commit_weights(version)


def test_a_refused_folder_prepares_nothing(engine, folders, tmp_path):
    version = engine.stats().update_count + 1
    other = write_tiny_checkpoint(tmp_path / "other", tokenizer=False, num_experts_per_tok=2)
    for folder, wrong, error in (
        (other, version, WeightsMismatchError),
        (tmp_path / "nowhere", version, CheckpointError),
        (folders[51], "x" * 257, InvalidRequestError),
    ):
        with pytest.raises(error):
            engine.prepare_weights(folder, version=wrong)
        assert engine.prepared_version is None
    assert ask(engine)[1] == version - 1


def test_while_weights_are_prepared_nothing_else_replaces_or_moves_them(engine, folders):
    version = engine.stats().update_count + 1
    engine.prepare_weights(folders[51], version=version)
    refused = f"while weights of version '{version}' are prepared; call commit_weights or drop_weights first"
    for operation in (
        lambda: engine.prepare_weights(folders[51], version=version + 1),
        lambda: engine.update_weights_from_disk(folders[51], version=version),
        lambda: engine.update_weights({}, version=version),
        lambda: engine.update_weight_version(version),
        engine.release_memory_occupation,
    ):
        with pytest.raises(InvalidRequestError, match=refused):
            operation()
    with pytest.raises(
        InvalidRequestError, match=f"version='{version + 1}' cannot be committed: those of label '{version}' are"
    ):
        engine.commit_weights(version + 1)
    with pytest.raises(InvalidRequestError, match="cache='half' is unknown"):
        engine.commit_weights(version, cache="half")
    assert engine.prepared_version == str(version) and ask(engine)[1] == version - 1


def test_a_hold_lets_started_requests_end_and_queues_new_ones(engine):
    started = engine.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_tokens": 40}, stream=True)
    next(started)
    engine.hold_admission()
    answers, thread = [], threading.Thread(target=lambda: answers.append(ask(engine)))
    thread.start()
    *_, last = started
    assert len(last["output_ids"]) == 40, "what had started runs to its end"
    while engine.stats().waiting == 0:
        assert thread.is_alive()
        engine.thread.run_between_steps(lambda: None)
    assert engine.admission_held and not answers and engine.paused is None
    on_engine_thread(engine, lambda core: setattr(core, "last_progress", core.last_progress - 1000))
    assert engine.stats().last_step_age_s == 0.0, "no step is due, so that none is late"
    engine.open_admission()
    assert engine.stats().last_step_age_s < 900
    thread.join(30)
    assert len(answers[0][0]) == 6


def test_a_hold_holds_scores_too(engine):
    engine.hold_admission()
    scores, thread = [], threading.Thread(target=lambda: scores.append(engine.score(PROMPT)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not scores
    engine.open_admission()
    thread.join(30)
    assert scores[0].update_count == engine.stats().update_count


@pytest.mark.parametrize("order", list(itertools.permutations(["hold", "open", "pause", "resume"])))
def test_pauses_and_holds_do_not_end_each_other(engine, order):
    """After every step of every order, a request starts exactly when neither a pause nor a hold is on."""
    calls = {
        "hold": engine.hold_admission,
        "open": engine.open_admission,
        "pause": lambda: engine.pause(mode="in_place"),
        "resume": engine.resume,
    }
    held = paused = False
    for name in order:
        calls[name]()
        held = {"hold": True, "open": False}.get(name, held)
        paused = {"pause": True, "resume": False}.get(name, paused)
        assert (engine.admission_held, engine.paused) == (held, "in_place" if paused else None)
        assert engine.components.core.ranks[0].accepts_new is not (held or paused), (order, name)
