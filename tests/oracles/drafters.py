"""Drafters and policies of tests: one that knows the answers, one that guesses, one that fails; lengths at random.

None of them may change anything but counters and the number of steps."""

import numpy as np

from routed_experts.speculation.drafter import Draft


def draft_of(tokens):
    """A draft that claims to be right."""
    return Draft(np.asarray(tokens, np.int32), np.ones(len(tokens)))


class OracleDrafter:
    """Knows the output of each request; each token of a draft is right with probability `alpha`. `answers`: output ids
    by request id."""

    nbytes = 0

    def __init__(self, answers, alpha, *, vocab_size, seed=0):
        self.answers, self.alpha, self.vocab_size = answers, alpha, vocab_size
        self.noise, self.known, self.prompts = np.random.default_rng(seed), {}, {}

    def open(self, key, tokens, info):
        """`tokens`: the prompt and what has been generated."""
        assert info.prompt_len == len(self.answers[key][0])
        assert key not in self.known, "a request is opened once"
        self.known[key] = np.array(tokens)

    def extend(self, key, tokens):
        self.known[key] = np.concatenate([self.known[key], tokens])

    def close(self, key):
        self.known.pop(key, None)

    def remember(self, prompt, output, sample):
        pass

    def forget(self):
        pass

    def propose(self, key, most):
        ahead = self.rest(key)[:most].astype(np.int32)
        wrong = self.noise.random(ahead.size) >= self.alpha
        ahead[wrong] = (ahead[wrong] + self.noise.integers(1, self.vocab_size, wrong.sum())) % self.vocab_size
        return draft_of(ahead)

    def rest(self, key):
        """What the request will generate after its known tokens."""
        prompt, answer = self.answers[key]
        known = self.known[key]
        done = known.size - len(prompt)
        assert known.tolist() == [*prompt, *answer[:done]], f"{key} has tokens of another request, or in another order"
        return np.asarray(answer[done:], np.int32)


class Adversary(OracleDrafter):
    """Always as many tokens as it may: random ids, and sometimes the answer, one token late."""

    def propose(self, key, most):
        tokens = self.noise.integers(0, self.vocab_size, most).astype(np.int32)
        late = self.rest(key)[1 : most + 1]
        if self.noise.random() < 0.3:
            tokens[: late.size] = late
        return draft_of(tokens)


class BrokenDrafter(OracleDrafter):
    """Fails in one way: `propose` raises, or returns what is no draft."""

    def __init__(self, answers, failure, *, vocab_size):
        super().__init__(answers, 1.0, vocab_size=vocab_size)
        self.failure, self.calls = failure, 0

    def propose(self, key, most):
        self.calls += 1
        if self.failure == "raises":
            raise RuntimeError("no draft today")
        tokens = {
            "ids above the vocabulary": np.array([self.vocab_size], np.int32),
            "negative ids": np.array([-1], np.int32),
            "more than most": np.zeros(most + 1, np.int32),
            "floats": np.zeros(1, np.float32),
            "two dims": np.zeros((1, 1), np.int32),
        }[self.failure]
        return Draft(tokens, np.ones(tokens.size))


class EveryDraft:
    """A policy: each draft as it is, cut to `most`."""

    def __init__(self, most=100):
        self.most = most

    is_off = False

    def should_try(self, step):
        return True

    def choose(self, survivals, num_requests):
        assert len(survivals) <= num_requests
        return [min(survival.size, self.most) for survival in survivals]

    def choose_ahead(self, survivals, num_requests, *, joined_gain):
        assert joined_gain > 0
        return self.choose(survivals, num_requests)

    def tried(self, *, num_requests, num_drafts, num_emitted, is_joined=True):
        assert num_requests <= num_emitted <= num_requests + num_drafts

    def expect(self, survivals, num_requests):
        return False

    def renew(self):
        pass


class RandomPolicy(EveryDraft):
    """Any length for any request, and now and then steps without drafts, which overlap."""

    def __init__(self, seed):
        super().__init__()
        self.noise = np.random.default_rng(seed)

    def should_try(self, step):
        return bool(self.noise.random() < 0.6)

    def choose(self, survivals, num_requests):
        return [int(self.noise.integers(0, survival.size + 1)) for survival in survivals]


class NeverDraft(EveryDraft):
    """A policy that rests: drafts are watched now and then, and no step verifies one."""

    is_off = True

    def should_try(self, step):
        return False
