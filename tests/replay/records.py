"""Records of random routes for tests of the training side."""

import numpy as np

from routed_experts import RoutedExperts
from routed_experts.core.capture_spec import CaptureSpec

SPEC = CaptureSpec(num_hidden_layers=4, layer_ids=(1, 2, 3), num_experts=16, top_k=4)


def random_ids(rng, rows, spec=SPEC):
    """[rows, M, K] distinct experts in random order."""
    ids = rng.permuted(np.tile(np.arange(spec.num_experts), (rows, spec.num_moe_layers, 1)), axis=-1)[..., : spec.top_k]
    return np.ascontiguousarray(ids.astype(spec.dtype))


def random_record(
    rng,
    num_tokens,
    *,
    prompt_len=None,
    start=0,
    last=False,
    valid=None,
    spec=SPEC,
    version=0,
    weights=False,
    router=None,
):
    """A record as generate gives it (S - 1 rows), or with a row for the `last` token, as score does."""
    rows = num_tokens - start - (not last)
    ids = random_ids(rng, rows, spec)
    return RoutedExperts(
        ids=ids,
        start=start,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens if prompt_len is None else prompt_len,
        layer_ids=spec.layer_ids,
        num_hidden_layers=spec.num_hidden_layers,
        num_experts=spec.num_experts,
        version_spans=((start, start + rows, version),) if rows else (),
        valid=valid,
        router=router,
        weights=rng.random(ids.shape, np.float32) if weights else None,
    )
