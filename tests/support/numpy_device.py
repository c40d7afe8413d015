"""A device in NumPy: runs the batches of a scheduler with a rule instead of a model.

After a verify step it drafts, and keeps for each slot where it stands: a batch that is ahead is completed from there.

Its KV pool keeps which token was fed at which position. The next token follows from all tokens that a row reads through
its page table, so one page that is wrong, shared wrongly or overwritten changes the output; the rule itself needs no
pages. Dims: N padded tokens, B padded requests, V vocabulary."""

import dataclasses

import numpy as np

from routed_experts.core.io_struct import RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import FROM_DEVICE, ForwardMode, StepResult
from routed_experts.core.sampling_params import SamplingParams

VOCAB = 97
NEVER_WRITTEN = -7  # what a slot of the pool holds that was never written


def next_token(tokens) -> int:
    """The rule: a hash of the whole sequence."""
    value = 17
    for token in tokens:
        value = (value * 31 + int(token) + 1) % 1_000_003
    return value % VOCAB


def expected_logprob(tokens, following) -> float:
    """The logprob that the rule gives to a successor; any number that depends on both will do."""
    return -float((next_token(tokens) * 7 + int(following)) % 13) / 4


def expected_tokens(prompt, max_tokens, *, stops=(), min_tokens=0) -> list[int]:
    """What a request must generate, by the rule alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops and len(tokens) - len(prompt) >= min_tokens:
            break
    return tokens[len(prompt) :]


def source(
    prompt,
    *,
    rid="r",
    max_tokens=4,
    group=None,
    choice=0,
    stops=(),
    logprob_start=None,
    extra_key=None,
    include_last=False,
    **sampling,
):
    """A validated request."""
    params = SamplingParams(max_tokens=max_tokens, **sampling).resolve()
    return TokenizedGenerateReqInput(
        rid=rid,
        group=rid if group is None else group,
        choice=choice,
        input_ids=np.asarray(prompt, np.int32),
        sampling=params,
        stop_token_ids=frozenset(stops),
        extra_key=extra_key,
        stream=False,
        return_logprob=logprob_start is not None,
        logprob_start_len=-1 if logprob_start is None else logprob_start,
        top_logprobs_num=0,
        routed_experts=RoutingOptions(include_last=include_last),
    )


class NumpyDevice:
    """A pool; of every slot the last token, the next position and drafts, each of which is right with a probability of
    its own."""

    def __init__(self, *, num_slots, num_request_slots, page_size, draft_seed=0, most_drafts=8) -> None:
        self.page_size = page_size
        self.noise, self.most_drafts = np.random.default_rng(draft_seed), most_drafts
        self.next_position = np.full(num_request_slots, NEVER_WRITTEN)
        self.drafts = np.full((num_request_slots, most_drafts), NEVER_WRITTEN)
        self.tokens = np.full(num_slots, NEVER_WRITTEN)
        self.positions = np.full(num_slots, NEVER_WRITTEN)
        self.last = np.full(num_request_slots, NEVER_WRITTEN)

    def run(self, batch) -> StepResult:
        """Feed the tokens of a batch and sample from every row, chunks too, as the real one does."""
        real = batch.num_tokens
        if batch.is_ahead:
            batch = self.locate(batch)
        ids = batch.token_ids[:real].copy()
        unknown = ids == FROM_DEVICE
        ids[unknown] = self.last[batch.request_slots[batch.token_rows[:real]]][unknown]
        assert (ids >= 0).all(), "a token was fed that was not sampled"
        self.tokens[batch.kv_slots], self.positions[batch.kv_slots] = ids, batch.positions[:real]
        if batch.mode is ForwardMode.TARGET_VERIFY:
            return self._verify(batch, ids)
        sampled = np.zeros(batch.request_slots.size, np.int32)
        logprobs = np.zeros(sampled.size, np.float32)
        scores = np.zeros(batch.token_ids.size, np.float32)
        for row in range(batch.num_requests):
            read = self.read(batch.page_table[row], int(batch.seq_lens[row]))
            sampled[row] = next_token(read)
            logprobs[row] = expected_logprob(read, sampled[row])
            first, last = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
            for at in range(first, last) if batch.prompt_targets is not None else ():
                scores[at] = expected_logprob(read[: batch.positions[at] + 1], batch.prompt_targets[at])
        self.last[batch.request_slots[: batch.num_requests]] = sampled[: batch.num_requests]
        return StepResult(
            tokens=sampled,
            logprobs=logprobs,
            top_logprobs=None,
            top_ids=None,
            prompt_top_logprobs=None,
            prompt_top_ids=None,
            prompt_logprobs=None if batch.prompt_targets is None else scores,
            rows=None,
            weight_version=0,
        )

    def _verify(self, batch, ids) -> StepResult:
        """Sample after every token of a request, and count the leading drafts that are what was sampled before."""
        sampled = np.zeros(batch.token_ids.size, np.int32)
        logprobs, accepted = np.zeros(sampled.size, np.float32), np.zeros(batch.num_requests, np.int32)
        for row in range(batch.num_requests):
            first, last = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
            read = self.read(batch.page_table[row], int(batch.seq_lens[row]))
            for at in range(first, last):
                sampled[at] = next_token(read[: batch.positions[at] + 1])
                logprobs[at] = expected_logprob(read[: batch.positions[at] + 1], sampled[at])
            while first + accepted[row] + 1 < last and ids[first + accepted[row] + 1] == sampled[first + accepted[row]]:
                accepted[row] += 1
            self.last[batch.request_slots[row]] = sampled[first + accepted[row]]
            self.draft(batch.request_slots[row], read[: batch.positions[first] + 1 + accepted[row]])
        return StepResult(
            tokens=sampled,
            logprobs=logprobs,
            top_logprobs=None,
            top_ids=None,
            prompt_top_logprobs=None,
            prompt_top_ids=None,
            prompt_logprobs=None,
            rows=None,
            weight_version=0,
            accepted=accepted,
        )

    def draft(self, slot, fed) -> None:
        """Note where a slot stands, and draft what follows the tokens fed and the last one."""
        self.next_position[slot] = fed.size
        ahead = expected_tokens([*fed.tolist(), int(self.last[slot])], self.most_drafts)
        wrong = self.noise.random(self.most_drafts) > self.noise.random()
        self.drafts[slot] = np.where(wrong, self.noise.integers(0, VOCAB, self.most_drafts), ahead)

    def locate(self, batch):
        """A batch that is ahead, token by token, with what the slots hold."""
        ids, positions, lengths = batch.token_ids.copy(), batch.positions.copy(), batch.seq_lens.copy()
        kv_slots = np.zeros(batch.num_tokens, np.int64)
        for at in range(batch.num_tokens):
            row, place = batch.token_rows[at], int(batch.positions[at])
            slot = batch.request_slots[row]
            positions[at] = self.next_position[slot] + place
            if place > 0 and batch.continuations is None:
                ids[at] = self.drafts[slot, place - 1]
            elif place > 0:
                first, *text = batch.continuations[row].tolist()
                text = dict(enumerate(text, start=first))
                ids[at] = max(text.get(int(positions[at]), 0), 0)
            page, offset = divmod(int(positions[at]), self.page_size)
            kv_slots[at] = batch.page_table[row, page] * self.page_size + offset
        for row in range(batch.num_requests):
            lengths[row] += self.next_position[batch.request_slots[row]]
        return dataclasses.replace(batch, token_ids=ids, positions=positions, seq_lens=lengths, kv_slots=kv_slots)

    def read(self, pages, length) -> np.ndarray:
        """The tokens at positions 0 .. length-1 of a row of the page table."""
        where = np.arange(length)
        slots = pages[where // self.page_size] * self.page_size + where % self.page_size
        assert (slots >= self.page_size).all(), f"the padding page is read: {pages.tolist()}, {length} tokens"
        assert np.array_equal(self.positions[slots], where), (
            f"positions {self.positions[slots].tolist()} in slots {slots.tolist()}"
        )
        return self.tokens[slots]
