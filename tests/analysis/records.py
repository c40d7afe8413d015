"""Random records and texts for the tests of analysis/."""

import numpy as np

from routed_experts.analysis import RoutedText
from routed_experts.core.routed_experts import RoutedExperts


def random_record(seed=0, *, rows=9, layers=3, experts=7, top_k=3, start=0, prompt=None, valid=None, last=True):
    """Rows of distinct experts; with `last` the sequence ends with one token that has no row."""
    rng = np.random.default_rng(seed)
    order = rng.random((rows, layers, experts)) ** np.linspace(0.3, 3, experts)  # some experts are loved, some are not
    ids = np.argsort(-order, axis=2)[:, :, :top_k].astype(np.uint8 if experts <= 256 else np.uint16)
    return RoutedExperts(
        ids=np.ascontiguousarray(ids),
        start=start,
        num_tokens=start + rows + last,
        num_prompt_tokens=rows // 2 if prompt is None else prompt,
        layer_ids=tuple(range(1, layers + 1)),
        num_hidden_layers=layers + 1,
        num_experts=experts,
        version_spans=((start, start + rows, 0),) if rows else (),
        valid=valid,
    )


def build_text(pieces, seed=0, *, title="a text", cached_tokens=0, **record):
    """A text with a random record of the right length."""
    made = random_record(seed, rows=max(len(pieces) - 1, 0), **{"last": len(pieces) > 0, **record})
    return RoutedText(title=title, pieces=tuple(pieces), record=made, cached_tokens=cached_tokens)
