"""Compiled code proposes and sorts what Python does, to the last bit, whatever texts a sequence may copy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.layers.native import text_drafts, toolchain
from routed_experts.speculation import compiled_search
from routed_experts.speculation.compiled_search import CompiledSearch
from routed_experts.speculation.context_index import ContextIndex
from routed_experts.speculation.drafter import DraftSample, DraftSequence
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.rollouts import RolloutStore
from routed_experts.speculation.sorted_contexts import NO_TOKEN, ContextHash, SortedContexts
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash

SPACES = (None, "a")


def make_drafter(rule, functions):
    contexts = context_hash(rule)
    return TextDrafter(
        rule,
        store=RolloutStore(max_bytes=1 << 20),
        texts=NamespaceTexts(contexts, max_bytes=1 << 20) if rule.counts else None,
        contexts=contexts,
        compiled=functions,
    )


def draw_rule(rng):
    min_window = int(rng.integers(1, 4))
    return CopyRule(
        min_window=min_window,
        max_window=int(rng.integers(min_window, 65)),
        counts=bool(rng.integers(0, 3)),
        max_factor=float(rng.choice([0.5, 1.0, 2.5])),
        min_probability=float(rng.choice([0.0, 0.1, 0.4])),
    )


def copied(rng, texts, alphabet, length):
    """Pieces of the texts, with random tokens between some."""
    tokens = []
    while len(tokens) < length:
        text = texts[int(rng.integers(len(texts)))]
        start = int(rng.integers(len(text)))
        tokens += text[start : start + int(rng.integers(1, 60))].tolist()
        if rng.random() < 0.5:
            tokens.append(int(rng.integers(alphabet)))
    return np.array(tokens[:length], np.int32)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_both_searches_propose_the_same(compiled_functions, seed):
    rng = np.random.default_rng(seed)
    rule, alphabet = draw_rule(rng), int(rng.choice([2, 3, 20, 300]))
    drafters = [make_drafter(rule, None), make_drafter(rule, compiled_functions)]
    texts = [rng.integers(0, alphabet, int(rng.integers(10, 800))).astype(np.int32) for _ in range(4)]
    prompts = [copied(rng, texts, alphabet, int(rng.integers(0, 900))) for _ in range(2)]
    opened = {}
    for number in range(400):
        action = rng.random()
        if action < 0.03 or not opened:
            prompt = prompts[int(rng.integers(2))]
            info = DraftSequence(
                prompt_len=prompt.size,
                sample=DraftSample(namespace=SPACES[int(rng.integers(2))], noise=int(rng.integers(4))),
                group="group" if rng.integers(2) else None,
                prediction=copied(rng, texts, alphabet, int(rng.integers(0, 90))) if rng.random() < 0.3 else None,
            )
            for drafter in drafters:
                drafter.open(number, prompt, info)
            opened[number] = prompt, prompt[:0], info
        key = list(opened)[int(rng.integers(len(opened)))]
        prompt, output, info = opened[key]
        if action > 0.99:
            for drafter in drafters:
                drafter.forget()
        elif action > 0.95:
            for drafter in drafters:
                drafter.remember(prompt, output, info.sample)
                drafter.close(key)
            del opened[key]
        else:
            added = copied(rng, [*texts, np.append(prompt, 0)], alphabet, int(rng.choice([1, 1, 1, 2, 5, 70])))
            most, proposals = int(rng.integers(1, 9)), []
            for drafter in drafters:
                drafter.extend(key, added)
                draft = drafter.propose(key, most)
                proposals.append((draft.tokens.tolist(), draft.survival.tolist(), draft.source))
            assert proposals[0] == proposals[1], (seed, number)
            opened[key] = prompt, np.append(output, added), info


@pytest.mark.parametrize(("max_factor", "min_probability"), [(2, 0), (1, 1)])
def test_whole_numbers_of_a_rule_are_those_numbers(compiled_functions, max_factor, min_probability):
    text, drafts = np.tile(np.arange(5, dtype=np.int32), 6), []
    for number in (int, float):
        rule = CopyRule(counts=True, max_factor=number(max_factor), min_probability=number(min_probability))
        for functions in (None, compiled_functions):
            drafter = make_drafter(rule, functions)
            drafter.open("a", text, DraftSequence(prompt_len=text.size))
            drafts.append(drafter.propose("a", 7).tokens.tolist())
    assert drafts == 4 * [[0, 1, 2, 3, 4, 0, 1]]


@pytest.mark.parametrize("keep_all", [False, True])
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_contexts_that_are_entered_have_the_keys_of_those_that_are_sorted(compiled_functions, keep_all, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        min_window = int(rng.integers(1, 4))
        contexts = ContextHash(min_window=min_window, max_window=int(rng.integers(min_window, 25)))
        texts = [rng.integers(0, int(rng.choice([1, 2, 3, 40, 300])), 200).astype(np.int32) for _ in range(2)]
        text = copied(rng, texts, 300, int(rng.integers(1, 600)))
        padded = np.concatenate([np.full(contexts.max_window, NO_TOKEN, np.int32), text])
        first, last = sorted(rng.integers(0, text.size + 1, 2).tolist())
        search = CompiledSearch(compiled_functions, contexts, max_factor=1.0, min_probability=0.1)
        earlier, whole = (SortedContexts(contexts, padded, np.arange(n), keep_all=keep_all) for n in (first, last))
        assert search.grow(earlier, padded, first, last).keys == whole.keys, (seed, first, last)


def test_an_index_that_compiled_code_searches_is_not_searched_in_python(compiled_functions):
    contexts = ContextHash(min_window=1, max_window=4)
    search = CompiledSearch(compiled_functions, contexts, max_factor=1.0, min_probability=0.1)
    index = ContextIndex(np.array([1, 2, 1], np.int32), contexts, compiled=search)
    with pytest.raises(AssertionError, match="compiled code searches this index"):
        index.search(index.query(), 1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MOST_OCCURRENCES", 17, "occurrences: 16 in text_drafts.cpp, 17 in Python"),
        ("MOST_DRAFTS", 30, "drafts: 31 in text_drafts.cpp, 30 in Python"),
        ("LONGEST_MATCH", 65, "tokens of a match: 64 in text_drafts.cpp, 65 in Python"),
        ("_RULE_FIELDS", 10, "bytes of a rule: 72 in text_drafts.cpp, 80 in Python"),
        ("_TEXT_FIELDS", 7, "bytes of a text: 64 in text_drafts.cpp, 56 in Python"),
        ("_RESULT", np.dtype(np.int64), "bytes of a result: 408 in text_drafts.cpp, 8 in Python"),
    ],
)
def test_compiled_code_of_another_layout_is_refused(compiled_functions, monkeypatch, name, value, message):
    monkeypatch.setattr(compiled_search, name, value)
    with pytest.raises(RuntimeError, match=message):
        CompiledSearch(compiled_functions, ContextHash(min_window=1, max_window=4), max_factor=1.0, min_probability=0.1)


def test_without_a_compiler_drafts_are_searched_in_python(monkeypatch):
    monkeypatch.setattr(toolchain, "compiler", lambda: None)
    with pytest.raises(OSError, match="no C\\+\\+ compiler was found"):
        toolchain.text_drafts_library.__wrapped__()
    monkeypatch.setattr(toolchain, "text_drafts_library", toolchain.text_drafts_library.__wrapped__)
    assert text_drafts.text_draft_functions.__wrapped__() is None


@pytest.mark.usefixtures("compiled_functions")
def test_the_two_libraries_have_files_of_their_own():
    command = toolchain.compiler()
    assert command is not None
    kernels, drafts = (toolchain.library_file(command, source) for source in (toolchain.KERNELS, toolchain.TEXT_DRAFTS))
    assert kernels != drafts and kernels == toolchain.library_file(command)
