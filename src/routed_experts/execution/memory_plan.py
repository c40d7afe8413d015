"""Memory plan: what an engine will allocate, from shapes, before it allocates anything.

The pools get what `mem_fraction_static` of the device leaves after the weights and the other arrays; at most what every
running request can use twice over (once running, once cached). Temporaries of a step are not planned: they use the
rest."""

import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np
from flax import nnx

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.execution.memory_demand import NO_DRAFT_MODEL, DraftDemand, MemoryDemand, format_size
from routed_experts.memory.kv_pool import KVPoolSpec

_COMPUTED = ("bfloat16", "float16", "float32")
_LISTED = 4  # names of each dtype in an error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the pool that fits, on each of `num_devices`. `capture_device` is two steps' rows,
    `capture_host` the stores by slot, of all of `num_ranks` data ranks, `rank_weights` the weights that are whole in
    every rank, `verify_scores` what the largest verify step samples from, `verify_inputs` what
    its recurrent layers store. A slot has `row_bytes` (0 without capture): expert ids of `id_bytes` each, and combine
    weights of `combine_bytes`. A quantised checkpoint has `checkpoint_bytes`, and `checkpoint_form` names its formats;
    `has_kv_scales`: it has scales of keys and values, which the pool's codes have."""

    pool: KVPoolSpec
    weights: int
    penalties: int
    capture_device: int
    capture_host: int
    row_bytes: int
    limit: int
    num_devices: int = 1
    experts_host: int = 0  # of the host's store of offloaded experts
    verify_scores: int = 0
    draft: DraftDemand = NO_DRAFT_MODEL
    verify_inputs: int = 0
    num_ranks: int = 1
    rank_weights: int = 0
    combine_bytes: int = 0
    id_bytes: int = 1
    checkpoint_bytes: int = 0
    checkpoint_form: str = ""
    has_kv_scales: bool = False

    @property
    def kv(self) -> int:
        """Bytes of the KV pool, states of requests included."""
        return self.pool.bytes_per_token * self.pool.num_slots + self.pool.state_bytes

    @property
    def draft_model(self) -> int:
        """Bytes of a draft model: its weights, and what its layers keep of all slots."""
        return self.draft.weights + self.draft.bytes_per_token * self.pool.num_slots

    @property
    def of_drafts(self) -> int:
        """Bytes that only speculative decoding needs."""
        return self.verify_scores + self.verify_inputs + self.draft_model

    def with_pages(self, num_pages: int) -> "MemoryPlan":
        """The plan with so many pages, the padding page included."""
        pool = dataclasses.replace(self.pool, num_pages=num_pages)
        capture_host = pool.num_slots * self.row_bytes * self.num_ranks
        return dataclasses.replace(self, pool=pool, capture_host=capture_host)

    def lines(self) -> list[str]:
        """The plan as it is printed, one purpose a line."""
        tokens = (self.pool.num_pages - 1) * self.pool.page_size
        rows = f"{self.pool.num_slots * self.num_ranks:,} slots of {self.row_bytes:,} bytes, {self.id_bytes} an id"
        if self.combine_bytes:
            rows += f"; of them {self.combine_bytes:,} are combine weights"
        each = f"each of {self.num_devices} devices, as is all of this but the host's part"
        device = "the device" if self.num_devices == 1 else each
        store = f"experts, host   {format_size(self.experts_host)}  all of them; residents are among the weights, too"
        scores = "scores, noise and new counts of the largest verify step"
        verify = f"verify scores   {format_size(self.verify_scores)}  {scores}"
        per_token = f"weights, and {self.draft.bytes_per_token:,} bytes a token"
        draft = f"draft model     {format_size(self.draft_model)}  {per_token}"
        inputs = f"verify inputs   {format_size(self.verify_inputs)}  of recurrent layers in the largest verify step"
        penalties = "token counts of request slots, five bytes a vocabulary entry"
        of_ranks = f"of these whole in each of {self.num_ranks} data ranks, which have pages and requests of their own"
        stored = f"checkpoint      {format_size(self.checkpoint_bytes)}  {self.checkpoint_form}"
        form = ", e4m3" if self.pool.codes else ""
        form = f"{form} with the checkpoint's scales" if self.has_kv_scales else form
        return [
            *([stored] if self.checkpoint_form else []),
            f"weights         {format_size(self.weights)}",
            *([f"  by data rank  {format_size(self.rank_weights)}  {of_ranks}"] if self.num_ranks > 1 else []),
            f"penalties       {format_size(self.penalties)}  {penalties}",
            f"KV pages        {format_size(self.kv)}  {tokens:,} tokens of {self.pool.bytes_per_token:,} bytes{form}",
            f"capture, device {format_size(self.capture_device)}  {'rows of two steps' if self.row_bytes else 'off'}",
            f"capture, host   {format_size(self.capture_host)}  {rows if self.row_bytes else 'off'}",
            *([verify] if self.verify_scores else []),
            *([draft] if self.draft.weights else []),
            *([inputs] if self.verify_inputs else []),
            *([store] if self.experts_host else []),
            f"limit           {format_size(self.limit)}  mem_fraction_static of {device}",
        ]


def plan_memory(
    args: ServerArgs,
    model: KVPoolSpec,
    state: nnx.State[Any, Any],
    capture: CaptureSpec | None,
    *,
    context_length: int,
    vocab_size: int,
    num_drafts: int = 0,
    draft: DraftDemand = NO_DRAFT_MODEL,
) -> MemoryPlan:
    """Size the pool. `model` carries the model's shapes; its num_pages is not read. Of several devices, `model` and
    `state` are what one holds. `num_drafts`: the longest draft, 0 without speculative decoding; `draft`: of a
    model that drafts. Raises MemoryPlanError, with the values that would fit, if it does not."""
    demand = MemoryDemand(
        args=args,
        model=model,
        weights=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        row_bytes=0 if capture is None else capture.stored_bytes,
        vocab_size=vocab_size,
        context_length=context_length,
        device=device_bytes(args.tp_size),
        num_drafts=num_drafts,
        draft=draft,
    )
    demand.require_fit()
    slots = args.max_total_tokens or 2 * args.running_limit * context_length
    pages = min(max(1, slots // args.page_size), demand.fitting_pages)
    pool = dataclasses.replace(model, num_pages=pages + 1)
    return MemoryPlan(
        pool=pool,
        weights=demand.weights,
        penalties=demand.penalties,
        capture_device=demand.capture_device,
        capture_host=pool.num_slots * demand.row_bytes * args.dp_size,
        row_bytes=demand.row_bytes,
        combine_bytes=0 if capture is None else capture.weight_bytes,
        id_bytes=1 if capture is None else capture.dtype.itemsize,
        limit=demand.limit,
        num_devices=args.tp_size,
        num_ranks=args.dp_size,
        verify_scores=demand.verify_scores,
        draft=draft,
        verify_inputs=demand.verify_inputs,
    )


def common_dtype(state: nnx.State[Any, Any]) -> np.dtype[Any]:
    """The dtype of all weights. Variables with metadata "wide", numbers that choose experts, may be float32 beside the
    others; codes and their scales (metadata "quantized") do not count. A checkpoint's tensors are cast as they are
    loaded; a module is not: raises ConfigError where dtypes differ, or where kernels do not compute in theirs."""
    names_by_dtype: dict[str, list[str]] = {}
    for path, leaf in nnx.to_flat_state(state):
        dtype = np.dtype(leaf.dtype).name
        if leaf.get_metadata("quantized", False):
            continue
        if dtype != "float32" or not leaf.get_metadata("wide", False):
            names_by_dtype.setdefault(dtype, []).append(".".join(map(str, path)))
    if len(names_by_dtype) > 1 or not names_by_dtype.keys() <= set(_COMPUTED):
        summary = "; ".join(
            f"{len(names)} are {dtype} ({', '.join(names[:_LISTED])}, ...)" for dtype, names in names_by_dtype.items()
        )
        text = f"the arrays of this model cannot be computed with together: {summary}"
        expected = f"one of {', '.join(_COMPUTED)} for all but those that the architecture keeps in float32"
        cast = "nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))"
        raise ConfigError(f"{text}; expected {expected}; cast: {cast}")
    return np.dtype(next(iter(names_by_dtype)))


def device_bytes(devices: int = 1) -> int:
    """Memory of one device, from its runtime; on CPU its share of the machine's memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices
