"""Count the drafts that a model sampled itself.

A draft is accepted where the token sampled before it is the same token, and all drafts before it were accepted: then
the model was fed exactly what it would have been fed one by one ("Coupling without communication and drafter-invariant
speculative decoding", Daliri, Musco and Suresh, arXiv 2408.07978). Dims: B requests, S rows, Q tokens of a request."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def count_accepted(
    sampled: Int[Array, " S"], fed: Int[Array, " S"], query_starts: Int[Array, " B1"], *, num_drafts: int
) -> Int[Array, " B"]:
    """Drafts of each request that were accepted, before the first that was not. `sampled[n]` was sampled after token
    `fed[n]`; the tokens of request b are [query_starts[b], query_starts[b + 1]), its drafts all but the first."""
    if num_drafts == 0:
        return jnp.zeros(query_starts.shape[0] - 1, jnp.int32)
    is_accepted = sampled[:-1] == fed[1:]
    offsets = jnp.arange(num_drafts)
    first, proposed = query_starts[:-1, None], (query_starts[1:] - query_starts[:-1] - 1)[:, None]
    rows = jnp.minimum(first + offsets, is_accepted.shape[0] - 1)
    matches = is_accepted[rows] & (offsets < proposed)  # [B, Q - 1]
    return jnp.sum(jnp.cumprod(matches.astype(jnp.int32), axis=1), axis=1)
