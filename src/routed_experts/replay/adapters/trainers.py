"""Adapters of trainers: the rows of one sequence as verl, slime, Megatron, NeMo-RL, Tunix and MaxText want them, both
ways.

target    form                               a row that is not known
verl      int16 [R, L, K], dense 0           refused
slime     int32 [S-1, L, K], dense 0         refused (Miles too)
megatron  M of int64 [S, K], bool mask [S]   mask False, with ids spread over the experts
nemo_rl   int32 [S-1, L, K], dense 0         the whole row -1: the live router
tunix     int16 [S, M, K]                    -1, with missing="gate"; refused otherwise: MaxText below it takes -1 for no output
maxtext   int32 [S, M, K]                    refused: -1 is no expert output; `native` fills in what a live forward chose
All but verl need the rows from the first token on. The last token of a rollout has none: -1, False or left out. It
feeds no
scored logprob. Dims: S tokens, R rows, L hidden layers, M MoE layers, K experts per token."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int16, Int32, Int64

from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.replay.adapters.foreign import (
    Origin,
    by_token,
    drop_last,
    record_of_rows,
    require_complete,
    require_start_zero,
    spread,
)


def to_verl(record: RoutedExperts) -> Int16[np.ndarray, "R L K"]:
    """What verl's rollout workers put into `routed_experts` of a sample; writable. E > 32,768 is refused."""
    return spread(require_complete(record, "verl"), np.int16, dense=0)


def from_verl(rows: Int[np.ndarray, "R columns K"], origin: Origin) -> RoutedExperts:
    """Read [S-1 or S, L or M, K]; a row of zeros is not known."""
    return record_of_rows(np.asarray(rows), origin, target="verl")


def to_slime(record: RoutedExperts) -> Int32[np.ndarray, "S-1 L K"]:
    """`Sample.rollout_routed_experts`: exactly S - 1 rows, all hidden layers."""
    return spread(drop_last(require_start_zero(require_complete(record, "slime"), "slime")), np.int32, dense=0)


def from_slime(rows: Int[np.ndarray, "S-1 L K"], origin: Origin) -> RoutedExperts:
    """Read exactly S - 1 rows; a row of zeros (slime rejects it too) is an error."""
    rows = np.asarray(rows)
    if rows.shape[:1] != (origin.num_tokens - 1,) or origin.start != 0:
        text = f"slime: {list(rows.shape)} rows from token {origin.start} on; wanted {origin.num_tokens - 1} from 0 on"
        raise RoutingAlignmentError(text)
    return record_of_rows(rows, origin, target="slime", lost=False)


def to_megatron(record: RoutedExperts) -> tuple[list[Int64[np.ndarray, "S K"]], Bool[np.ndarray, " S"]]:
    """`RouterReplay` targets in order of MoE layers, and which tokens they are for; where False let the router choose.
    Ids there are spread, so that a forward which ignores the mask loads no expert twice as much."""
    record = require_start_zero(record, "megatron")
    rows = by_token(record, np.int64, missing=-1)
    known = rows[:, 0, 0] >= 0
    tokens = np.arange(record.num_tokens)[:, None, None]
    rows = np.where(known[:, None, None], rows, (tokens * record.top_k + np.arange(record.top_k)) % record.num_experts)
    return [np.ascontiguousarray(rows[:, column]) for column in range(rows.shape[1])], known


def from_megatron(
    layers: Sequence[Int[np.ndarray, "T K"]], origin: Origin, *, mask: Bool[np.ndarray, " T"] | None = None
) -> RoutedExperts:
    """Read one [T, K] a MoE layer, of a recording forward; tokens outside `mask` are not known."""
    if len(layers) != origin.spec.num_moe_layers:
        raise RoutingAlignmentError(
            f"megatron: {len(layers)} layers; wanted {origin.spec.num_moe_layers}, one a MoE layer"
        )
    rows = np.stack([np.asarray(layer) for layer in layers], axis=1).astype(np.int64)
    if mask is not None:
        rows[~np.asarray(mask)] = -1
    return record_of_rows(rows, origin, target="megatron")


def to_nemo_rl(record: RoutedExperts) -> Int32[np.ndarray, "S-1 L K"]:
    """S - 1 rows, all hidden layers; the whole row -1 where the live router is to choose."""
    record = drop_last(require_start_zero(record, "nemo_rl"))
    rows = spread(record, np.int32, dense=0)
    if record.valid is not None:
        rows[~record.valid] = -1
    return rows


def from_nemo_rl(rows: Int[np.ndarray, "S-1 columns K"], origin: Origin) -> RoutedExperts:
    """Read rows of which some may be -1 throughout; a row that is -1 in part is an error."""
    rows = np.asarray(rows)
    moe = rows if rows.ndim != 3 or rows.shape[1] == origin.spec.num_moe_layers else rows[:, origin.spec.layer_ids]
    absent = (moe == -1).reshape(moe.shape[0], -1)
    torn = absent.any(axis=1) & ~absent.all(axis=1)
    if torn.any():
        row = int(np.flatnonzero(torn)[0])
        text = f"nemo_rl, row {origin.start + row}: ids {moe[row].tolist()} are -1 in part; wanted all or none of a row"
        raise RoutingAlignmentError(text)
    return record_of_rows(rows, origin, target="nemo_rl")


def to_tunix(record: RoutedExperts, *, missing: Literal["error", "gate"] = "error") -> Int16[np.ndarray, "S M K"]:
    """`TokenSegment.routed_experts`: a row a token, the last -1. `missing="gate"` says -1 for rows that are not known:
    only where the model below gives such a token to its own router."""
    if missing not in ("error", "gate"):
        raise RoutingAlignmentError(f"missing={missing!r} is unknown; choose error or gate")
    record = require_start_zero(record if missing == "gate" else require_complete(record, "tunix"), "tunix")
    return by_token(record, np.int16, missing=-1)


def from_tunix(rows: Int[np.ndarray, "S M K"], origin: Origin) -> RoutedExperts:
    """Read a row a token; one of -1 is not known."""
    return _without_last(record_of_rows(np.asarray(rows), origin, target="tunix"))


def to_maxtext(record: RoutedExperts, *, native: Int[np.ndarray, "S M K"] | None = None) -> Int32[np.ndarray, "S M K"]:
    """One sample of `forced_routed_experts`, the layer axis counting MoE layers. `native`: ids of a live recording
    forward (`forward(..., return_routed=True).ids`), which stand in for rows that are not known; without it those are
    refused."""
    record = require_start_zero(record if native is not None else require_complete(record, "maxtext"), "maxtext")
    rows = by_token(record, np.int32, missing=-1)
    if native is not None:
        if np.shape(native) != rows.shape:
            raise RoutingAlignmentError(
                f"maxtext: native is {list(np.shape(native))}; wanted {list(rows.shape)}, a row a token"
            )
        rows = np.where(rows[:, :1, :1] < 0, np.asarray(native, np.int32), rows)
    return rows


def from_maxtext(rows: Int[np.ndarray, "S M K"], origin: Origin) -> RoutedExperts:
    """Read a row a token; one of -1 is not known."""
    return _without_last(record_of_rows(np.asarray(rows), origin, target="maxtext"))


def _without_last(record: RoutedExperts) -> RoutedExperts:
    """Leave out the row of the last token of a sequence where it is not known, as a rollout does."""
    ends = record.start + record.num_rows == record.num_tokens
    if record.valid is None or not ends or record.num_rows == 0 or record.valid[-1]:
        return record
    cut = record[: record.start + record.num_rows - 1]
    whole = cut.valid is not None and bool(cut.valid.all())
    return RoutedExperts(
        ids=cut.ids,
        start=cut.start,
        num_tokens=cut.num_tokens,
        num_prompt_tokens=cut.num_prompt_tokens,
        layer_ids=cut.layer_ids,
        num_hidden_layers=cut.num_hidden_layers,
        num_experts=cut.num_experts,
        version_spans=cut.version_spans,
        valid=None if whole else cut.valid,
        router=cut.router,
    )
