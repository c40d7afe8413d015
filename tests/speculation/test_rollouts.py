"""Rollouts: an answer of the same noise is followed and found again; other namespaces never see a token of it."""

import gc
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.speculation.drafter import DraftSample, DraftSequence, DraftSource
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.rollouts import MOST_ROLLOUTS, OVERHEAD, RolloutStore
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash

NGRAM, SUFFIX = CopyRule(), CopyRule(max_window=24, counts=True)


def ids(tokens):
    return np.asarray(tokens, np.int32)


def sharing_drafter(functions, rule=NGRAM, *, max_bytes=1 << 22, max_rollouts=None):
    contexts = context_hash(rule)
    return TextDrafter(
        rule,
        store=RolloutStore(max_bytes=max_bytes, max_rollouts=max_rollouts),
        texts=NamespaceTexts(contexts, max_bytes=max_bytes) if rule.counts else None,
        contexts=contexts,
        compiled=functions,
    )


def info(prompt, noise=None, namespace=None, **fields):
    return DraftSequence(prompt_len=len(prompt), sample=DraftSample(namespace=namespace, noise=noise), **fields)


PROMPT = list(range(1000, 1020))
FIRST, SECOND = list(range(100, 160)), list(range(300, 360))
IN_EVERY_RUN = [(64, 2), (64, 64), (1, 1024)]  # answers of a prompt, and tokens of each: each value once


@pytest.fixture(params=[NGRAM, SUFFIX], ids=["ngram", "suffix"])
def drafter(functions, request):
    drafter = sharing_drafter(functions, request.param)
    drafter.remember(ids(PROMPT), ids(FIRST), DraftSample(noise=(7, 0)))
    drafter.remember(ids(PROMPT), ids(SECOND), DraftSample(noise=(7, 1)))
    return drafter


@pytest.mark.parametrize(("noise", "answer"), [((7, 0), FIRST), ((7, 1), SECOND)])
def test_the_answer_of_the_same_noise_is_followed_from_its_start(drafter, noise, answer):
    drafter.open("a", ids(PROMPT), info(PROMPT, noise))
    for place in range(0, 60, 7):
        draft = drafter.propose("a", 7)
        assert (draft.tokens.tolist(), draft.source) == (answer[place : place + 7], DraftSource.ROLLOUT)
        assert draft.survival[0] > 0.9
        drafter.extend("a", ids(answer[place : place + 7]))
    assert drafter.propose("a", 7).tokens.size == 0


def test_after_a_wrong_token_the_answer_goes_on_at_the_same_distance(drafter):
    drafter.open("a", ids(PROMPT), info(PROMPT, (7, 0)))
    drafter.extend("a", ids([*FIRST[:10], 5]))
    draft = drafter.propose("a", 4)
    assert draft.tokens.tolist() == FIRST[11:15]
    assert draft.survival[0] < 0.5
    drafter.extend("a", ids(FIRST[11:14]))
    assert drafter.propose("a", 4).survival[0] > draft.survival[0]


def test_an_answer_is_found_again_at_another_distance_and_in_another_answer(drafter):
    drafter.open("a", ids(PROMPT), info(PROMPT, (7, 0)))
    drafter.extend("a", ids([*FIRST[:10], 5, 5, 5, *FIRST[20:24]]))
    assert drafter.propose("a", 4).tokens.tolist() == FIRST[24:28]
    drafter.extend("a", ids([*FIRST[24:27], 5, *SECOND[30:33]]))
    assert drafter.propose("a", 4).tokens.tolist() == SECOND[33:37]
    drafter.extend("a", ids(SECOND[33:50]))  # followed, and no longer searched
    assert drafter.propose("a", 4).tokens.tolist() == SECOND[50:54]


def test_another_seed_copies_the_answers_to_its_prompt(drafter):
    drafter.open("a", ids(PROMPT), info(PROMPT, (8, 0)))
    draft = drafter.propose("a", 4)  # both answers begin after the prompt: the latest of equally frequent ones
    assert draft.tokens.tolist() == SECOND[:4]
    drafter.extend("a", ids(FIRST[:2]))
    assert drafter.propose("a", 4).tokens.tolist() == FIRST[2:6]


def test_a_part_of_an_answer_may_be_known_when_a_sequence_is_opened(drafter):
    drafter.open("a", ids(PROMPT + FIRST[:30]), info(PROMPT, (7, 0)))
    assert drafter.propose("a", 4).tokens.tolist() == FIRST[30:34]
    drafter.open("a", ids(PROMPT + FIRST[:30] + [3]), info(PROMPT, (7, 0)))
    assert drafter.propose("a", 2).survival[0] < 0.5


def test_another_prompt_sees_nothing_but_with_suffix(drafter):
    other = list(range(2000, 2010))
    drafter.open("a", ids([*other, *FIRST[5:9]]), info([*other, *FIRST[5:9]]))
    draft = drafter.propose("a", 4)
    counts = drafter._rule.counts
    assert draft.tokens.tolist() == (FIRST[9:13] if counts else [])
    assert draft.source is (DraftSource.NAMESPACE if counts else DraftSource.CONTEXT)


def test_what_is_forgotten_is_no_longer_followed(drafter):
    drafter.open("a", ids(PROMPT), info(PROMPT, (7, 0)))
    drafter.extend("a", ids(FIRST[:3]))
    assert drafter.nbytes > 4 * len(FIRST + SECOND)
    drafter.forget()
    assert drafter.propose("a", 4).tokens.size == 0
    drafter.close("a")
    assert drafter.nbytes == 0


def test_a_newer_answer_of_the_same_noise_replaces_the_older(drafter):
    newer = list(range(500, 540))
    drafter.remember(ids(PROMPT), ids(newer), DraftSample(noise=(7, 0)))
    drafter.open("a", ids(PROMPT), info(PROMPT, (7, 0)))
    assert drafter.propose("a", 5).tokens.tolist() == newer[:5]
    entry = drafter._store.find(ids(PROMPT), None)
    assert [rollout.tokens.tolist() for rollout in entry.rollouts] == [newer, SECOND]


def test_ended_choices_of_a_prompt_are_copied_without_a_store(functions):
    drafter = TextDrafter(NGRAM, compiled=functions)
    for choice in range(3):
        drafter.open(choice, ids(PROMPT), info(PROMPT, (1, choice), group="call"))
    drafter.open("other call", ids(PROMPT), info(PROMPT, (1, 0), group="another"))
    drafter.extend(0, ids(FIRST))
    drafter.extend(1, ids(FIRST[:4]))
    assert drafter.propose(1, 3).tokens.size == 0
    drafter.close(0)
    assert drafter.propose(1, 3).tokens.tolist() == FIRST[4:7]
    drafter.extend("other call", ids(FIRST[:4]))
    assert drafter.propose("other call", 3).tokens.size == 0
    for key in (1, 2, "other call"):
        drafter.close(key)
    assert drafter.nbytes == 0


def test_a_prediction_is_followed_and_found_again(functions):
    drafter = TextDrafter(NGRAM, compiled=functions)
    drafter.open("a", ids(PROMPT), info(PROMPT, (1, 0), prediction=ids(FIRST)))
    draft = drafter.propose("a", 4)
    assert (draft.tokens.tolist(), draft.source) == (FIRST[:4], DraftSource.PREDICTION)
    drafter.extend("a", ids([*FIRST[:8], 5, 6, 7, *FIRST[10:13]]))
    draft = drafter.propose("a", 4)
    assert (draft.tokens.tolist(), draft.source) == (FIRST[13:17], DraftSource.PREDICTION)
    drafter.open("b", ids(PROMPT), info(PROMPT, (1, 0)))
    assert drafter.propose("b", 4).tokens.size == 0
    drafter.open("c", ids(PROMPT), info(PROMPT, prediction=ids([])))
    assert drafter.propose("c", 4).tokens.size == 0


@settings(max_examples=60)
@given(data=st.data(), counts=st.booleans())
def test_no_draft_of_a_namespace_ever_contains_another_ones_text(functions, data, counts):
    """Each namespace has ids of its own, prompts included but for one prompt that all send."""
    drafter = sharing_drafter(
        functions, SUFFIX if counts else NGRAM, max_bytes=data.draw(st.sampled_from([2000, 1 << 22]))
    )
    shared_prompt, spaces, texts = [1, 2, 3], ["a", "b", None], {}
    allowed = {space: {1, 2, 3, *range(10 * (1 + at), 10 * (1 + at) + 5)} for at, space in enumerate(spaces)}
    for number in range(data.draw(st.integers(1, 40))):
        space = data.draw(st.sampled_from(spaces))
        own = st.lists(st.sampled_from(sorted(allowed[space] - {1, 2, 3})), max_size=12)
        action = data.draw(st.sampled_from(["open", "extend", "close", "remember", "forget"]))
        noise = data.draw(st.sampled_from([None, (1, 0), (1, 1)]))
        prompt = shared_prompt if data.draw(st.booleans()) else [*shared_prompt, *data.draw(own)]
        keys = [key for key, (where, _) in texts.items() if where == space]
        if action == "open":
            group = data.draw(st.sampled_from([None, ("group", space)]))
            prediction = ids(data.draw(own)) if data.draw(st.booleans()) else None
            drafter.open(number, ids(prompt), info(prompt, noise, space, group=group, prediction=prediction))
            texts[number] = space, prompt
        elif action == "remember":
            drafter.remember(ids(prompt), ids(data.draw(own)), DraftSample(namespace=space, noise=noise))
        elif action == "forget" and data.draw(st.booleans()):
            drafter.forget()
        elif keys and action == "extend":
            drafter.extend(keys[0], ids(data.draw(own)))
        elif keys and action == "close":
            drafter.close(keys[-1])
            del texts[keys[-1]]
        for key, (where, _) in texts.items():
            draft = drafter.propose(key, 7)
            assert set(draft.tokens.tolist()) <= allowed[where], (key, where)
            assert (draft.tokens >= 0).all() and draft.survival.size == draft.tokens.size
    for key in texts:
        drafter.close(key)
    drafter.forget()
    assert drafter.nbytes == 0


@pytest.mark.parametrize("limit", ["bytes", "rollouts"])
def test_the_least_recently_used_prompts_are_dropped_first(functions, limit):
    bounds = {"max_bytes": 40_000} if limit == "bytes" else {"max_bytes": 1 << 30, "max_rollouts": 7}
    drafter, rng = sharing_drafter(functions, **bounds), np.random.default_rng(0)
    for number in range(400):
        drafter.remember(ids([number]), ids(rng.integers(0, 9, 300)), DraftSample(noise=number % 5))
        store = drafter._store
        entries = store._prompts.values()
        assert store.nbytes == sum(entry.nbytes for entry in entries)
        assert store.nbytes <= 40_000 or limit == "rollouts"
        assert (
            store._num_rollouts == sum(len(entry.rollouts) for entry in entries) <= (7 if limit == "rollouts" else 400)
        )
        assert store.find(ids([0]), None) is not None, "it is used each time"
    assert store.find(ids([1]), None) is None
    assert store.find(ids([399]), None) is not None


def test_a_prompt_has_so_many_answers_at_most(functions):
    drafter = sharing_drafter(functions)
    for seed in range(MOST_ROLLOUTS + 10):
        drafter.remember(ids(PROMPT), ids([seed]), DraftSample(noise=(seed, 0)))
    entry = drafter._store.find(ids(PROMPT), None)
    assert [rollout.noise[0] for rollout in entry.rollouts] == list(range(MOST_ROLLOUTS + 9, 9, -1))


@pytest.mark.parametrize("limit", ["bytes", "rollouts"])
def test_a_prompt_that_fills_the_store_loses_its_oldest_answers(limit):
    bounds = {"max_bytes": 1 << 20} if limit == "bytes" else {"max_bytes": 1 << 30, "max_rollouts": 10}
    store = RolloutStore(**bounds)
    store.add(ids([5]), ids(FIRST), DraftSample(noise=None), window=12)
    for seed in range(64):
        store.add(ids(PROMPT), ids([seed] * 8000), DraftSample(noise=(seed, 0)), window=12)
        entry = store.find(ids(PROMPT), None)
        most = ((1 << 20) - OVERHEAD - 4 * 12) // (4 * 8000 + OVERHEAD) if limit == "bytes" else 10
        retained = [rollout.noise[0] for rollout in entry.rollouts]
        assert retained == list(range(seed, max(seed - most, -1), -1)), "the newest ones"
        assert store.nbytes == sum(other.nbytes for other in store._prompts.values()) <= bounds["max_bytes"]
        assert store._num_rollouts == sum(len(other.rollouts) for other in store._prompts.values())
    assert store.find(ids([5]), None) is None


@pytest.mark.parametrize("bounds", [{"max_bytes": 1 << 20}, {"max_bytes": 1 << 30, "max_rollouts": 0}])
def test_an_answer_that_does_not_fit_alone_drops_no_other(bounds):
    store = RolloutStore(**bounds)
    store.add(ids(PROMPT), ids(FIRST), DraftSample(noise=0), window=12)
    before = store.nbytes
    store.add(ids([1]), ids(range(1 << 18)), DraftSample(noise=1), window=12)
    assert store.find(ids([1]), None) is None
    assert store.nbytes == before
    assert (store.find(ids(PROMPT), None) is None) == (before == 0) == ("max_rollouts" in bounds)


def test_an_answer_in_use_may_be_dropped(functions):
    """A sequence goes on with what is left of the answers to its prompt."""
    drafter = sharing_drafter(functions, max_bytes=4 * 100 + 3 * OVERHEAD)
    drafter.remember(ids(PROMPT), ids(FIRST), DraftSample(noise=0))
    drafter.open("a", ids(PROMPT), info(PROMPT, 1))
    assert drafter.propose("a", 4).tokens.tolist() == FIRST[:4]
    drafter.remember(ids(PROMPT), ids(SECOND), DraftSample(noise=2))
    assert [rollout.noise for rollout in drafter._store.find(ids(PROMPT), None).rollouts] == [2]
    drafter.extend("a", ids(SECOND[10:23]))
    assert drafter.propose("a", 4).tokens.tolist() == SECOND[23:27]


@pytest.mark.parametrize(
    ("num_answers", "size"),
    [
        pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.thorough)
        for case in itertools.product([1, 64], [2, 64, 1024])
    ],
)
def test_no_more_memory_is_held_for_answers_than_is_counted(num_answers, size):
    """The names of namespaces are not held."""
    rng, most = np.random.default_rng(0), 1 << 20
    answers = [(number, ids(rng.integers(0, 30_000, size))) for number in range(3000)]
    gc.collect()
    tracemalloc.start()
    try:
        store = RolloutStore(max_bytes=most)
        for number, answer in answers:
            sample = DraftSample(
                noise=(2**40 + number, 1000 + number), namespace="x" * 4000 + str(number // num_answers)
            )
            store.add(ids([number // num_answers] * 30), answer, sample, window=24)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.4 * store.nbytes <= held <= store.nbytes <= most
    assert store._num_rollouts > num_answers


def test_answers_are_known_by_prompt_and_namespace():
    store = RolloutStore(max_bytes=1 << 20)
    spaces = (None, "", "a", "b", "\ud800", "x" * 4096)
    for number, space in enumerate(spaces):
        for prompt in ([1], [1, 2]):
            store.add(ids(prompt), ids([number, len(prompt)]), DraftSample(namespace=space), window=12)
    for number, space in enumerate(spaces):
        for prompt in ([1], [1, 2]):
            (rollout,) = store.find(ids(prompt), space).rollouts
            assert rollout.tokens.tolist() == [number, len(prompt)]


def test_a_million_tokens_stay_in_the_stores_bound(functions):
    drafter, rng = sharing_drafter(functions, SUFFIX, max_bytes=2 << 20), np.random.default_rng(0)
    for number in range(1000):
        drafter.remember(
            ids([number % 50]), ids(rng.integers(0, 300, 1000)), DraftSample(noise=number, namespace=str(number % 7))
        )
        assert drafter.nbytes <= 2 * (2 << 20)
