"""GuardedDrafter: a drafter whose failures cost its drafts alone. Engine thread only.

It gives the drafter the tokens of requests and checks its proposals. Each failure is counted, the first of each
operation is logged, and after MAX_FAILURES the drafter is off."""

import logging

import numpy as np
from jaxtyping import Int32

from routed_experts.core.speculative_stats import SpeculativeTotals
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.speculation.drafter import Draft, Drafter, DraftSample, DraftSequence
from routed_experts.speculation.model_drafter import ModelDrafter

logger = logging.getLogger(__name__)
MAX_FAILURES = 3  # of a drafter, until it is switched off


class GuardedDrafter:
    """A drafter for requests. Token ids of drafts are in [0, vocab_size); failures and bytes are counted in `totals`,
    the latter by `count_bytes`."""

    def __init__(self, drafter: Drafter, vocab_size: int, totals: SpeculativeTotals) -> None:
        self.num_failures = 0
        self.inner: Drafter | None = drafter  # None: it has failed too often
        self._vocab_size, self._totals = vocab_size, totals
        self._indexed: dict[str, int] = {}  # by request: tokens that the drafter has
        self._has_changed = False  # what the drafter holds, since its bytes were counted
        self._logged: set[str] = set()

    @property
    def has_failed(self) -> bool:
        """Whether the drafter has failed too often."""
        return self.inner is None

    @property
    def model(self) -> ModelDrafter | None:
        """The drafter of an engine with a draft model."""
        return self.inner if isinstance(self.inner, ModelDrafter) else None

    def has_indexed(self, req: Req) -> bool:
        """Whether the drafter has tokens of a request."""
        return req.rid in self._indexed

    def index(self, req: Req) -> bool:
        """Give the drafter the known tokens of a request; False where it fails, or has failed too often."""
        known, drafter = self._indexed.get(req.rid), self.inner
        if drafter is None or known == req.num_known:
            return drafter is not None
        self._has_changed = True
        try:
            if known is None:
                drafter.open(req.rid, req.tokens[: req.num_known], _build_draft_sequence(req))
            else:
                drafter.extend(req.rid, req.tokens[known : req.num_known])
        except Exception as error:
            self._failed("index", error)
            return False
        self._indexed[req.rid] = req.num_known
        return True

    def propose(self, req: Req, most: int) -> Draft | None:
        """At most `most` tokens that may follow the indexed ones, or None where the drafter fails or is off."""
        if self.inner is None:
            return None
        self._has_changed = True  # answers are indexed once they are searched
        try:
            draft = self.inner.propose(req.rid, most)
            tokens = draft.tokens
            if tokens.dtype != np.int32 or tokens.ndim != 1 or tokens.size > most or draft.survival.size != tokens.size:
                raise ValueError(f"{tokens.dtype}{list(tokens.shape)}; expected at most {most} int32 ids")
            ids = tokens.tolist()  # few: built-in functions are faster than NumPy's
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
                raise ValueError(f"ids {min(ids)} to {max(ids)} outside [0, {self._vocab_size})")
        except Exception as error:
            self._failed("propose", error)
            return None
        return draft

    def remember(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample) -> None:
        """Give the drafter an answer."""
        if self.inner is not None:
            self._has_changed = True
            try:
                self.inner.remember(prompt, output, sample)
            except Exception as error:
                self._failed("remember", error)

    def forget(self) -> None:
        """Drop all answers that the drafter remembers."""
        if self.inner is not None:
            self._has_changed = True
            try:
                self.inner.forget()
            except Exception as error:
                self._failed("forget", error)

    def close(self, req: Req) -> None:
        """Drop a request, whether or not it was indexed: a draft model drafts for others, too."""
        self._indexed.pop(req.rid, None)
        self._has_changed = True
        if self.inner is not None:
            try:
                self.inner.close(req.rid)
            except Exception as error:
                self._failed("close", error)

    def count_bytes(self) -> None:
        """Bring the totals' `store_bytes` up to date."""
        if self._has_changed:
            self._has_changed = False
            try:
                self._totals.store_bytes = 0 if self.inner is None else self.inner.nbytes
            except Exception as error:
                self._failed("count bytes", error)

    def _failed(self, what: str, error: Exception) -> None:
        """Count a failure of the drafter; its drafts are lost, and nothing else."""
        self.num_failures += 1
        self._totals.skipped["drafter_failed"] += 1
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("the drafter failed (%s), its drafts are dropped: %s", what, error, exc_info=error)
        if self.num_failures >= MAX_FAILURES and self.inner is not None:
            self.inner, self._has_changed = None, True
            self._indexed.clear()
            logger.error("the drafter failed %d times and is off; requests go on without drafts", self.num_failures)


def build_draft_sample(req: Req) -> DraftSample:
    """Which answer to its prompt a request is."""
    sampling = req.source.sampling
    noise = None if sampling.temperature == 0 else (sampling.seed, req.source.choice)
    return DraftSample(namespace=req.source.extra_key, noise=noise)


def _build_draft_sequence(req: Req) -> DraftSequence:
    """What a drafter may know of a request besides its tokens."""
    source = req.source
    return DraftSequence(
        prompt_len=req.prompt_len,
        sample=build_draft_sample(req),
        group=id(source.input_ids) if source.sampling.n > 1 else None,  # one array, as long as one of them is open
        prediction=source.prediction,
    )
