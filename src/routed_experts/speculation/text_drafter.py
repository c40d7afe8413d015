"""TextDrafter: drafts that are copied from text: the sequence itself, and where allowed other answers.

    NGRAM     the latest earlier occurrence of the longest repeated suffix is continued, behind the end of the
              sequence by its own copy (prompt lookup)
    SUFFIX    the most frequent continuation of its latest 16 occurrences (SuffixDecoding, arXiv 2411.04975)
    others    an earlier answer or a prediction is followed from its start, and found again by its contexts

Of the drafts of all sources the one is taken whose expected number of accepted tokens is largest. A sequence sees the
choices of its own prompt that have ended, its own prediction, and, with a store, answers of its own namespace. Dims: S
tokens of a sequence, G generated tokens, k drafts."""

import dataclasses
from collections.abc import Hashable

import numpy as np
from jaxtyping import Int32

from routed_experts.core.errors import ConfigError
from routed_experts.speculation.compiled_search import CompiledFunctions, CompiledSearch, TextTable
from routed_experts.speculation.context_index import ContextIndex
from routed_experts.speculation.continuations import (
    LONGEST_MATCH,
    MOST_OCCURRENCES,
    NO_CONTINUATION,
    Continuation,
    frequent_continuation,
    latest_continuation,
    most_expected,
)
from routed_experts.speculation.drafter import NO_DRAFT, Draft, DraftSample, DraftSequence, DraftSource
from routed_experts.speculation.followed_text import FollowedText
from routed_experts.speculation.matcher import Matcher
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.rollouts import PromptRollouts, Rollout, RolloutStore
from routed_experts.speculation.sorted_contexts import ContextHash
from routed_experts.speculation.text_index import TextIndex

ROLLOUT_RUN, PREDICTION_RUN = 24, 4  # tokens: what a rollout of the same noise, and a prediction, are trusted with


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyRule:
    """How a sequence's own text is continued. Contexts have min_window..max_window tokens. `counts`: the most frequent
    continuation is drafted, while its estimated probability is at least `min_probability`, and at most `max_factor`
    tokens for each matching one; else the latest. Raises ConfigError unless 1 <= min_window <= max_window <= 64."""

    min_window: int = 1
    max_window: int = 12
    counts: bool = False
    max_factor: float = 1.0
    min_probability: float = 0.1

    def __post_init__(self) -> None:
        """Check the windows."""
        if not 1 <= self.min_window <= self.max_window <= LONGEST_MATCH:
            raise ConfigError(
                f"n-gram windows are {self.min_window} to {self.max_window}; expected "
                f"1 <= min_window <= max_window <= {LONGEST_MATCH}"
            )


class _Sequence:
    """One open sequence, and the texts that it may copy."""

    def __init__(
        self,
        tokens: Int32[np.ndarray, " S"],
        info: DraftSequence,
        contexts: ContextHash,
        *,
        counts: bool,
        compiled: CompiledSearch | None,
    ) -> None:
        self.info, self._counts = info, counts
        self.index = ContextIndex(tokens, contexts, keep_all=counts, compiled=compiled)
        self.own: Matcher[ContextIndex] | None = None  # compiled code searches this text by itself
        if compiled is None:
            self.own = Matcher(self.index, self.index, most=MOST_OCCURRENCES if counts else 1)
        self.rollouts: PromptRollouts | None = None
        self.prediction: TextIndex | None = None
        self.aligned: list[FollowedText] = []  # from the start of the answer
        self.rejoined: FollowedText | None = None  # from where one of its contexts matched
        self.others: list[tuple[DraftSource, Matcher[TextIndex]]] = []  # in the texts of:
        self._answers: TextIndex | None = None
        self._blocks: tuple[TextIndex, ...] | None = None
        self.table: TextTable | None = None  # this text and the others, for compiled code
        self._output = tokens[info.prompt_len :]

    def follow(self, text: Int32[np.ndarray, " G"], source: DraftSource, run: int) -> None:
        """Follow a text from the start of the answer; called before the sequence grows."""
        followed = FollowedText(text, source, run=run)
        followed.advance(self._output.tolist())
        self.aligned.append(followed)

    def extend(self, tokens: Int32[np.ndarray, " m"]) -> None:
        """Append tokens."""
        self.index.extend(tokens)
        if self.aligned or self.rejoined is not None:
            appended = tokens.tolist()
            for followed in self.aligned:
                followed.advance(appended)
            if self.rejoined is not None:
                self.rejoined.advance(appended)

    def best_followed(self) -> FollowedText | None:
        """The text with the longest run that goes on."""
        best, rejoined = None, self.rejoined
        for followed in self.aligned:
            if followed.offset < followed.text.size and (best is None or followed.run > best.run):
                best = followed
        if rejoined is not None and rejoined.offset < rejoined.text.size and (best is None or rejoined.run > best.run):
            return rejoined
        return best

    def search(
        self, answers: TextIndex | None, blocks: tuple[TextIndex, ...]
    ) -> list[tuple[DraftSource, Matcher[TextIndex]]]:
        """Return what searches the prediction, the answers to the prompt and the blocks of the namespace."""
        if answers is not self._answers or blocks is not self._blocks:
            self.table = None
            texts = [] if self.prediction is None else [(DraftSource.PREDICTION, self.prediction)]
            texts += [] if answers is None else [(DraftSource.ROLLOUT, answers)]
            texts += [(DraftSource.NAMESPACE, block) for block in blocks]
            searched = {matcher.text: matcher for _, matcher in self.others}
            self._answers, self._blocks, self.others = answers, blocks, []
            for source, text in texts:
                matcher = searched.get(text) or Matcher(self.index, text, most=MOST_OCCURRENCES)
                self.others.append((source, matcher))
        return self.others

    def searched_table(self) -> TextTable:
        """Return what the compiled search reads: this text and those that `search` has returned."""
        if self.table is None:
            texts = [self.index.searched_text(), *(matcher.text.searched_text() for _, matcher in self.others)]
            is_capped = [self._counts, *(source is DraftSource.NAMESPACE for source, _ in self.others)]
            self.table = TextTable(texts, counts=self._counts, is_capped=is_capped)
        return self.table

    def rejoin(self, source: DraftSource, index: TextIndex, position: int, length: int) -> None:
        """Follow a text from a position that matches `length` tokens, unless that which is followed has done better."""
        if self.rejoined is not None and length < self.rejoined.run:
            return
        number, offset = index.locate(position)
        text = self.info.prediction
        if source is DraftSource.ROLLOUT and self.rollouts is not None:
            text = self.rollouts.text(number)
        assert text is not None, source
        self.rejoined = FollowedText(text, source, offset=offset, run=length)

    def drop_rollouts(self) -> None:
        """Follow and search no answers of others."""
        if self.rollouts is not None:
            self.rollouts.leave()
        self.rollouts, self.rejoined, self.others = None, None, []
        self._answers = self._blocks = self.table = None
        self.aligned = [followed for followed in self.aligned if followed.source is DraftSource.PREDICTION]


class _Group:
    """Choices of one prompt: those that are open, and the answers of those that have ended."""

    def __init__(self, rollouts: PromptRollouts) -> None:
        self.rollouts, self.num_open = rollouts, 0


class TextDrafter:
    """A Drafter. `store`: earlier answers by prompt; `texts`: those of a namespace, for a rule that counts; None: text
    of other sequences is not used, but for ended choices of the same prompt.

    `compiled`: compiled code; without it the same drafts are found in Python. A step of a request takes 4 to 13
    us with it, and 5 to 62 us without; `open` takes 0.1 to 1.3 us a token. `contexts`: the hash of `texts`, where
    there are some."""

    def __init__(
        self,
        rule: CopyRule,
        *,
        store: RolloutStore | None = None,
        texts: NamespaceTexts | None = None,
        contexts: ContextHash | None = None,
        compiled: CompiledFunctions | None = None,
    ) -> None:
        self._rule, self._store, self._texts = rule, store, texts
        self._hash = contexts or context_hash(rule)
        self._compiled: CompiledSearch | None = None
        if compiled is not None:
            self._compiled = CompiledSearch(
                compiled,
                self._hash,
                max_factor=rule.max_factor,
                min_probability=rule.min_probability,
            )
        self._sequences: dict[Hashable, _Sequence] = {}
        self._groups: dict[Hashable, _Group] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of all open sequences and of what is remembered, in bytes."""
        total = 0 if self._store is None else self._store.nbytes
        total += 0 if self._texts is None else self._texts.nbytes
        shared: dict[int, int] = {}  # the index of a prompt's answers has several users
        for sequence in self._sequences.values():
            total += sequence.index.nbytes
            if sequence.prediction is not None:
                total += sequence.prediction.nbytes
            if sequence.rollouts is not None:
                shared[id(sequence.rollouts)] = sequence.rollouts.index_nbytes
        return total + sum(shared.values()) + sum(group.rollouts.nbytes for group in self._groups.values())

    def open(self, key: Hashable, tokens: Int32[np.ndarray, " S"], info: DraftSequence) -> None:
        """Index a sequence; one that is open under this key is replaced."""
        self.close(key)
        sequence = _Sequence(tokens, info, self._hash, counts=self._rule.counts, compiled=self._compiled)
        if info.prediction is not None and info.prediction.size:
            sequence.prediction = TextIndex(self._hash, [(info.prediction[:0], info.prediction)])
            sequence.follow(info.prediction, DraftSource.PREDICTION, PREDICTION_RUN)
        if info.group is not None:
            group = self._groups.get(info.group)
            if group is None:
                group = self._groups[info.group] = _Group(PromptRollouts(self._prompt_end(tokens, info)))
            group.num_open += 1
            sequence.rollouts = group.rollouts
        if self._store is not None:
            remembered = self._store.find(tokens[: info.prompt_len], info.sample.namespace)
            sequence.rollouts = remembered or sequence.rollouts
        if sequence.rollouts is not None:
            sequence.rollouts.use()
            same = sequence.rollouts.find(info.sample.noise)
            if same is not None:
                sequence.follow(same.tokens, DraftSource.ROLLOUT, ROLLOUT_RUN)
        self._sequences[key] = sequence

    def extend(self, key: Hashable, tokens: Int32[np.ndarray, " S"]) -> None:
        """Append tokens to an open sequence."""
        sequence = self._sequences[key]
        sequence.extend(tokens)
        rollouts = sequence.rollouts
        if rollouts is not None and not rollouts.is_indexed and not self._is_in_step(sequence.best_followed()):
            rollouts.index(self._hash)  # built while a step runs

    def propose(self, key: Hashable, most: int) -> Draft:
        """Propose at most `most` tokens; none where no context of an allowed length occurred earlier."""
        if most < 1:
            return NO_DRAFT
        sequence = self._sequences[key]
        followed, rollouts, texts = sequence.best_followed(), sequence.rollouts, self._texts
        best = NO_CONTINUATION if followed is None else followed.continuation(most)
        if sequence.index.size == 0 or self._is_in_step(followed):
            return best.draft()
        others: list[tuple[DraftSource, Matcher[TextIndex]]] = []
        if rollouts is not None or texts is not None or sequence.prediction is not None:
            answers = None if rollouts is None else rollouts.index(self._hash)
            blocks = () if texts is None else texts.indices(sequence.info.sample.namespace)
            others = sequence.search(answers, blocks)
        if self._compiled is not None:
            return self._copy_compiled(self._compiled, sequence, others, best, most)
        best = _better(best, self._copy_own(sequence, most))
        for source, matcher in others:
            if source is DraftSource.NAMESPACE:
                best = self._copy_namespace(matcher, best, most)
            else:
                best = self._copy_answer(sequence, source, matcher, best, most)
        return best.draft()

    def close(self, key: Hashable) -> None:
        """Drop a sequence and its memory; an unknown key is ignored. Open choices of its prompt may copy its answer."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        info, group = sequence.info, self._groups.get(sequence.info.group)
        if sequence.rollouts is not None:
            sequence.rollouts.leave()
        if info.group is None or group is None:
            return
        group.num_open -= 1
        output = sequence.index.tokens_from(info.prompt_len, sequence.index.size)
        if group.num_open == 0:
            del self._groups[info.group]
        elif output.size:
            group.rollouts.add(Rollout(info.sample.noise, output))

    def remember(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample) -> None:
        """Take an answer for later sequences of its namespace; without a store it is ignored."""
        if self._store is not None and output.size:
            self._store.add(prompt, output, sample, window=self._hash.max_window)
        if self._texts is not None and output.size:
            self._texts.add(prompt, output, sample.namespace)

    def forget(self) -> None:
        """Drop all answers that are remembered, also where sequences follow them."""
        if self._store is not None:
            self._store.clear()
        if self._texts is not None:
            self._texts.clear()
        for group in self._groups.values():
            group.rollouts.clear()
        for sequence in self._sequences.values():
            sequence.drop_rollouts()

    def _prompt_end(self, tokens: Int32[np.ndarray, " S"], info: DraftSequence) -> Int32[np.ndarray, " W"]:
        return tokens[max(info.prompt_len - self._hash.max_window, 0) : info.prompt_len].copy()

    def _is_in_step(self, followed: FollowedText | None) -> bool:
        """Whether a text is followed so well that nothing is searched."""
        return followed is not None and followed.run >= self._rule.max_window

    def _copy_compiled(
        self,
        compiled: CompiledSearch,
        sequence: _Sequence,
        others: list[tuple[DraftSource, Matcher[TextIndex]]],
        followed: Continuation,
        most: int,
    ) -> Draft:
        """What the sequence's own text and the others propose, or what is followed, by the compiled search."""
        index, best, expected = sequence.index, -1, followed.expected
        matches, accepted = compiled.search(index.searched_text(), index.size, sequence.searched_table(), most)
        for number, (length, position, count) in enumerate(matches):
            if count == 0:
                continue
            if number > 0:
                source, matcher = others[number - 1]
                if source is not DraftSource.NAMESPACE:
                    sequence.rejoin(source, matcher.text, position, length)
            if accepted[number] > expected:
                best, expected = number, accepted[number]
        if best < 0:
            return followed.draft()
        return compiled.draft(best, matches[best][2], others[best - 1][0] if best else DraftSource.CONTEXT)

    def _copy_own(self, sequence: _Sequence, most: int) -> Continuation:
        """What the sequence's own text proposes."""
        assert sequence.own is not None, "compiled code searches this sequence"
        occurrences, rule, source = sequence.own.match(), self._rule, DraftSource.CONTEXT
        if rule.counts:
            most = min(most, int(rule.max_factor * occurrences.length))
        if occurrences.length == 0 or most < 1:
            return NO_CONTINUATION
        if rule.counts:
            return frequent_continuation(sequence.index, occurrences, most, source, rule.min_probability)
        tokens = sequence.index.continuations(occurrences.positions[-1:], most)[0]
        return latest_continuation(tokens, occurrences.length, source)

    def _copy_namespace(self, matcher: Matcher[TextIndex], best: Continuation, most: int) -> Continuation:
        """Return the better one of `best` and what texts of the namespace propose. Nothing is searched or counted where
        that is `best`, whatever they propose."""
        rule, expected = self._rule, best.expected
        longest = matcher.longest_possible
        if most_expected(longest, min(most, int(rule.max_factor * longest))) <= expected:
            return best
        occurrences = matcher.match()
        most = min(most, int(rule.max_factor * occurrences.length))
        if most_expected(occurrences.length, most) <= expected:
            return best
        source, least = DraftSource.NAMESPACE, rule.min_probability
        return _better(best, frequent_continuation(matcher.text, occurrences, most, source, least, to_exceed=expected))

    def _copy_answer(
        self, sequence: _Sequence, source: DraftSource, matcher: Matcher[TextIndex], best: Continuation, most: int
    ) -> Continuation:
        """Return the better one of `best` and what earlier answers, or the prediction, propose. They are followed from
        there on, also where that is `best`."""
        occurrences, least = matcher.match(), self._rule.min_probability
        if occurrences.length == 0:
            return best
        draft = frequent_continuation(matcher.text, occurrences, most, source, least, to_exceed=best.expected)
        if draft.tokens:
            sequence.rejoin(source, matcher.text, draft.position, occurrences.length)
        return _better(best, draft)


def context_hash(rule: CopyRule, *, position_bits: int = 24) -> ContextHash:
    """The hash of the contexts of a rule. Texts have fewer than 2**position_bits tokens."""
    return ContextHash(min_window=rule.min_window, max_window=rule.max_window, position_bits=position_bits)


def _better(first: Continuation, second: Continuation) -> Continuation:
    """The one with more expected accepted tokens; the first of equals."""
    if not second.tokens or (first.tokens and first.expected >= second.expected):
        return first
    return second
