"""The fields of an answer of /inference/v1/generate that prime-rl's client reads, with vLLM's types."""

from compat_peers.placeholders import missing
from pydantic import BaseModel

__getattr__ = missing("vllm.entrypoints.scale_out.token_in_token_out.protocol")


class Logprob(BaseModel):
    """A token's logprob. `rank` begins at 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class GenerateResponse(BaseModel):
    """An answer. `prompt_logprobs`: by token id, for each token of the prompt; None for the first."""

    request_id: str
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
