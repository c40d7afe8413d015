"""The ids of a reduced draft vocabulary: `d2t` and `t2d` of an EAGLE-3 folder. d2t[i] is the difference between the
target's id and the draft's id i; t2d marks the target's ids that occur. Dims: V vocabulary, W draft vocabulary."""

import numpy as np
from jaxtyping import Int32

from routed_experts.core.errors import CheckpointError
from routed_experts.models.loading.checkpoint import Checkpoint

_DTYPES = frozenset({"I64", "I32"}), frozenset({"BOOL", "U8", "I8", "I32", "I64"})


def check_token_map(checkpoint: Checkpoint, d2t: str, t2d: str | None, *, vocab_size: int, draft_size: int) -> None:
    """Raise CheckpointError unless the headers of the tensors named `d2t` and `t2d` have their shapes and dtypes."""
    headers, expected = checkpoint.names(), {d2t: (draft_size, _DTYPES[0])}
    if t2d is not None:
        expected[t2d] = vocab_size, _DTYPES[1]
    for name, (size, dtypes) in expected.items():
        shape, dtype = headers[name]
        if shape != (size,) or dtype not in dtypes:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {dtype} {list(shape)}, expected {' or '.join(sorted(dtypes))} [{size}]; "
                "copy the head again"
            )


def read_token_map(
    checkpoint: Checkpoint, d2t: str, t2d: str | None, *, vocab_size: int, draft_size: int
) -> Int32[np.ndarray, " W"] | None:
    """The target's id of each draft id; None where they are the same. Raises CheckpointError where an id is outside the
    vocabulary, occurs twice, or disagrees with t2d."""
    ids = np.arange(draft_size) + checkpoint.read(d2t).astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        first = int(outside[0])
        raise CheckpointError(
            f"{checkpoint.path}: {d2t}[{first}] makes draft id {first} the target's id {ids[first]}, expected one "
            f"below {vocab_size}; {d2t} holds differences, not ids; copy the head again"
        )
    if len(np.unique(ids)) != draft_size:
        raise CheckpointError(
            f"{checkpoint.path}: {d2t} maps {draft_size} draft ids to {len(np.unique(ids))} ids of the target; "
            "expected each id once; copy the head again"
        )
    if t2d is not None:
        marked = np.flatnonzero(checkpoint.read(t2d))
        if not np.array_equal(np.sort(ids), marked):
            raise CheckpointError(
                f"{checkpoint.path}: {d2t} reaches {draft_size} ids and {t2d} marks {marked.size}, of which "
                f"{np.intersect1d(ids, marked).size} agree; expected the same ids; copy the head again"
            )
    return None if draft_size == vocab_size and np.array_equal(ids, np.arange(draft_size)) else ids.astype(np.int32)
