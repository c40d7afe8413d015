"""NamespaceTexts: what is counted is what is held, and a full store keeps the newest texts."""

import gc
import itertools
import tracemalloc

import numpy as np
import pytest

from routed_experts.speculation.namespace_texts import BLOCK_TOKENS, NamespaceTexts
from routed_experts.speculation.text_drafter import CopyRule, context_hash
from routed_experts.speculation.text_index import TextIndex

CONTEXTS = context_hash(CopyRule(max_window=24, counts=True))
PROMPT = np.arange(40, dtype=np.int32)
SIZES = [(1, 2), (5, 8), (600, 64), (1, 1024)]  # in every run: each number of namespaces, and each size of a text
LENGTHS = [(1, 1), (30, 20), (1, 200)]  # in every run: each size of a text, and each number of texts


def grid(in_every_run, *axes):
    """All cases; scripts/thorough has those that are not in every run."""
    return [
        pytest.param(*case, marks=[] if case in in_every_run else pytest.mark.thorough)
        for case in itertools.product(*axes)
    ]


def random_tokens(rng, count):
    return rng.integers(0, 30_000, count).astype(np.int32)


def held_tokens(texts, namespace=None):
    """Tokens that can be searched, blocks in turn from the newest."""
    return np.concatenate([np.zeros(0, np.int32), *(block.padded for block in texts.indices(namespace))])


def contains(tokens, text):
    return text.tobytes() in tokens.tobytes()


@pytest.mark.parametrize(("num_namespaces", "size"), grid(SIZES, [1, 5, 600], [2, 8, 64, 1024]))
def test_no_more_memory_is_held_than_is_counted(num_namespaces, size):
    rng, most = np.random.default_rng(0), 1 << 20
    answers = [random_tokens(rng, size) for _ in range(600)]
    gc.collect()
    tracemalloc.start()
    try:
        texts = NamespaceTexts(CONTEXTS, max_bytes=most)
        for number, answer in enumerate(answers):
            texts.add(PROMPT, answer, f"user {number % num_namespaces}")
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert texts.nbytes <= most
    assert 0.75 * texts.nbytes <= held <= texts.nbytes
    assert held_tokens(texts, f"user {599 % num_namespaces}").size >= size


@pytest.mark.parametrize(("size", "num_texts"), grid(LENGTHS, [1, 30], [1, 20, 200]))
def test_an_index_counts_what_it_holds(size, num_texts):
    rng = np.random.default_rng(0)
    texts = [(random_tokens(rng, 24), random_tokens(rng, size)) for _ in range(num_texts)]
    gc.collect()
    tracemalloc.start()
    try:
        indices = [TextIndex(CONTEXTS, texts) for _ in range(20)]
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= sum(index.nbytes for index in indices)


def test_a_namespace_of_any_length_takes_as_much_memory():
    sizes = []
    for namespace in ("a", "a" * 4096, "\ud800" * 4096):
        texts = NamespaceTexts(CONTEXTS, max_bytes=1 << 20)
        texts.add(PROMPT, PROMPT, namespace)
        assert texts.indices(namespace) and not texts.indices(namespace + "a")
        sizes.append(texts.nbytes)
        assert max(map(len, texts._namespaces)) == 16
    assert len(set(sizes)) == 1


def test_a_namespace_that_fills_the_store_loses_its_oldest_texts():
    """The limit is half of the smallest speculative_store_bytes."""
    texts, rng, held = NamespaceTexts(CONTEXTS, max_bytes=1 << 19), np.random.default_rng(0), []
    answers = [rng.integers(0, 50, 200).astype(np.int32) for _ in range(200)]
    for answer in answers:
        texts.add(PROMPT, answer, None)
        assert texts.nbytes <= 1 << 19
        held.append(held_tokens(texts).size)
    full = held.index(max(held[:50]))
    assert min(held[full:]) > max(held) / 2, "it never falls to the newest answer alone"
    tokens = held_tokens(texts)
    assert contains(tokens, answers[-20]) and not contains(tokens, answers[0])


def test_an_answer_is_kept_where_it_fits_alone():
    texts, rng = NamespaceTexts(CONTEXTS, max_bytes=1 << 19), np.random.default_rng(0)
    for size in (30, 7000, 30, 9000, 8000, 9500):
        answer = random_tokens(rng, size)
        texts.add(PROMPT, answer, "a")
        assert contains(held_tokens(texts, "a"), answer)
        assert 0 < texts.nbytes <= 1 << 19
    texts.add(PROMPT, random_tokens(rng, 40_000), "a")
    assert (texts.nbytes, texts.indices("a")) == (0, ())
    texts.add(PROMPT, random_tokens(rng, 30), "a")
    assert len(texts.indices("a")) == 1


def test_a_large_store_has_blocks_of_so_many_tokens():
    texts, rng = NamespaceTexts(CONTEXTS, max_bytes=1 << 27), np.random.default_rng(0)
    answers = [random_tokens(rng, 4096) for _ in range(60)]
    for number, answer in enumerate(answers):
        texts.add(PROMPT, answer, None)
        assert len(texts.indices(None)) <= 4
        assert held_tokens(texts).size >= 2 / 3 * min(4096 * (number + 1), 3 * BLOCK_TOKENS)
    assert all(block.padded.size >= BLOCK_TOKENS for block in texts.indices(None)[1:])
    assert not contains(held_tokens(texts), answers[0])
