"""FinishedRequest: what a finished sequence adds to the metrics."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """What a finished sequence adds. Times are in seconds since the request arrived."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int  # that the request allows
    n: int  # sequences of its prompt
    first_token_s: float | None  # None: the request does not stream, so it is not known
    total_s: float
    queue_s: float | None  # from acceptance to its first step
