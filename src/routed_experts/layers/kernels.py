"""The bundle of kernels that a model's layers run on, chosen once at build time and passed down. Dims: N tokens, E
experts, M MoE layers, K experts per token, B rows, V vocabulary."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.layer_stack import LayerStackKernel
from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend, reference_linear
from routed_experts.layers.lm_head import HeadProduct, TiedLinear
from routed_experts.layers.logprobs import LogprobsKernel, log_softmax_at
from routed_experts.layers.moe import ExpertCall, MoeBackend, gated
from routed_experts.layers.norm import layer_norm, rms_norm
from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup, row_parallel_linear
from routed_experts.layers.parallel_experts import parallel_moe
from routed_experts.layers.quantized import ScaledRows, Weight
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing, RoutingBlock


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedRouter:
    """Top-k, weights and the write of what was executed into the step's block as one kernel: (logits [N E], rows to
    replay, block or None, MoE layer, spec, selection bias or None) -> (routing, block). Rows to replay come
    without weights. It must decide as `replay_topk` does, up to rounding of the scores; equal scores go to the lower
    id. `supports` tells which routers it implements; others run as plain array code, and so only a kernel of biased
    routers meets a bias. `linear`, where there is one, makes the logits from the routers of the whole run."""

    name: str
    run: Callable[
        [
            Float[Array, "N E"],
            LayerRouting | None,
            RoutingBlock | None,
            Int[Array, ""],
            RouterSpec,
            Float[Array, " E"] | None,
        ],
        tuple[Routing, RoutingBlock | None],
    ]
    linear: LinearBackend | None = None
    supports: Callable[[RouterSpec], bool] = lambda spec: spec.is_plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterBiases:
    """What the routers of a run add: `logits` to the logits themselves, `selection` to the choice alone. `layer`: of
    the run."""

    logits: Float[Array, "R E"] | None = None
    selection: Float[Array, "R E"] | None = None
    layer: Int[Array, ""] | int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts:
    """The experts of a run that every token runs, as one network a layer; with a `gate`, times the sigmoid of the
    token's product with it."""

    gate_up: Weight  # [R, D, 2S]
    down: Weight  # [R, S, D]
    gate: Float[Array, "R D 1"] | None = None


class RoutingSize(NamedTuple):
    """The routed experts of a layer, and how many of them a token has."""

    num_experts: int
    top_k: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamNorm:
    """The norm that follows an addition to the residual stream: the scales of the run, to which `offset` is added, and
    the layer's row. What is added to the stream is multiplied by `residual_scale`. `next_matrices`: those that the
    normed rows are multiplied by first; from them the kernel knows whether to scale rows, too. None: it does not.
    `experts`: whose they are, where they are experts' matrices."""

    scales: Float[Array, "R D"]
    layer: Int[Array, ""]
    eps: float
    offset: float = 0.0
    residual_scale: float = 1.0
    next_matrices: Weight | None = None
    experts: RoutingSize | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormedRows:
    """The normed stream, and the same rows scaled, where products with `StreamNorm.next_matrices` are faster with
    these."""

    plain: Float[Array, "N D"]
    scaled: ScaledRows | None = None

    @property
    def fastest(self) -> Float[Array, "N D"] | ScaledRows:
        """The rows for the product with `StreamNorm.next_matrices`."""
        return self.plain if self.scaled is None else self.scaled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotOutputs:
    """What experts made of a step's rows, in slots n*K + k and, where there are shared experts, N more behind them;
    `inputs` and `gate` (of the run) say how much of the latter counts. `slot_rows`: the row of `slots` that slot (n, k)
    has, where their order is another one."""

    slots: Float[Array, "NK D"] | Float[Array, "NKN D"] | Float[Array, "P D"]
    weights: Float[Array, "N K"]
    valid: Bool[Array, " N"]
    inputs: Float[Array, "N D"]
    shared: SharedExperts | None = None
    slot_rows: Int[Array, "N K"] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedSteps:
    """The operations between the matrices of a layer as few kernels, for steps of at most `max_tokens` tokens, where
    launches count. `normed_rows`: (normed rows, next matrices or None) -> the rows in all forms that `add_slots` would
    make for these matrices. `product`: (x, or rows made for these matrices, matrices [R D O], layer) -> S parts of the
    sums, float32, which the kernel that follows adds up, or one in the dtype of the rows. `add_parts`: (x, parts,
    biases [R D] or None, norm, matrices) -> (x plus the parts, its norm, the norm's product by the layer's matrix in
    parts). `route`: as a FusedRouter, with the biases of the run. `slots`: (call, shared experts or None, the call's
    rows scaled or None) -> each slot's expert applied to its row, and the shared ones to all rows, and the `slot_rows`
    of SlotOutputs; the call's `first_expert` is the layer's offset in the run. `add_slots`: (x, outputs, norm) -> (x
    plus the weighted slots, its norm). `unrolled`: layers in the body of the loop over layers; a loop's counter and the
    layers' numbers are launches of their own."""

    max_tokens: int
    normed_rows: Callable[[Float[Array, "N D"], Weight | None], NormedRows]
    product: Callable[[Float[Array, "N D"] | NormedRows | ScaledRows, Weight, Int[Array, ""]], Float[Array, "S N O"]]
    add_parts: Callable[
        [Float[Array, "N D"], Float[Array, "S N D"], Float[Array, "R D"] | None, StreamNorm, Float[Array, "R D O"]],
        tuple[Float[Array, "N D"], NormedRows, Float[Array, "P N O"]],
    ]
    route: Callable[
        [
            Float[Array, "S N E"],
            LayerRouting | None,
            RoutingBlock | None,
            Int[Array, ""],
            RouterSpec,
            RouterBiases,
        ],
        tuple[Routing, RoutingBlock | None],
    ]
    slots: Callable[
        [ExpertCall, SharedExperts | None, ScaledRows | None], tuple[Float[Array, "P D"], Int[Array, "N K"] | None]
    ]
    add_slots: Callable[[Float[Array, "N D"], SlotOutputs, StreamNorm], tuple[Float[Array, "N D"], NormedRows]]
    features: frozenset[str] = frozenset()  # of `FamilyConfig.stack_needs`, beside those of fused attention
    unrolled: int = 1


def float32_product(x: Float[Array, "N D"], matrix: Float[Array, "D O"]) -> Float[Array, "N O"]:
    """Rows in the dtype of the matrix times it; the result is float32, in full precision where the matrix is."""
    return reference_linear(x, matrix[None], 0, jnp.float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowKernels:
    """Operations of a layer between the matrices that its other kernels read: `rms_norm` and `layer_norm` as in
    norm.py, `gated` as in moe.py, each over the last axis, and `product` with a small matrix of one layer. `add_gated`:
    (y, output of the shared experts, their input, its gate) -> y and the gated output; None: array code."""

    rms_norm: Callable[..., Float[Array, "... D"]] = rms_norm
    layer_norm: Callable[..., Float[Array, "... D"]] = layer_norm
    gated: Callable[..., Float[Array, "N F"]] = gated
    product: Callable[[Float[Array, "N D"], Float[Array, "D O"]], Float[Array, "N O"]] = float32_product
    add_gated: (
        Callable[
            [Float[Array, "N D"], Float[Array, "N D"], Float[Array, "N D"], Float[Array, "D 1"]], Float[Array, "N D"]
        ]
        | None
    ) = None


REFERENCE_ROWS = RowKernels()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One way to run each part of a layer. `router` None: plain array code, and a write of the ids of its own.
    `fused_layer` None: no fused kernels for steps of few tokens. `layer_stack` None: no kernel that runs all layers of
    a run at once. `argmax` returns the best token of each row of logits, as `best_token` does, and its logprob; None:
    plain array code. `logprobs`: of tokens of such rows, in the same bits. `tied_linear`: the product with a table of
    embeddings in place; None: with its transpose. `rows`: norms and gates of a layer that runs in pieces. `group`: the
    devices that share the layers' work; `ranks`: the data ranks that share the experts.

    `code_formats`: of the weights that all of its matrix kernels take as codes and scales, in the order of
    `outputs_first`; others are dequantised when they are loaded. `code_stack_fits`: whether they read a stack of so
    many bytes of codes on one device; larger ones are cut (models/decoder/code_selection.py). `code_runs`: codes of 4
    bits are packed in the first run of these that `packed_run` allows, and dequantised where it allows none.
    `code_spans`: outputs that may share a scale, the largest first; where they may not, each has its own.
    `takes_bf16_scales`: whether scales of codes of 4 bits may be bfloat16 and take no more memory so; array code on a
    CPU makes a copy of such stacks in float32.

    `stream_dtype`: of the residual stream, and so of all values between the products of a layer, whatever the
    weights' dtype is; None: that of the weights. With float32, half precision rounds in these places alone, in a
    run of layers and in pieces alike: the inputs of a product with matrices of bfloat16, where the processor
    multiplies pairs or tiles (not of routers, nor of the gate of shared experts); scaled queries and weights of
    attention, where it multiplies tiles; what is stored for later tokens, in the dtype of the pool (keys, values,
    latent rows, inputs of a convolution); and the normalised output of the last layer, which has the weights'
    dtype."""

    moe: MoeBackend
    linear: LinearBackend = REFERENCE_LINEAR
    rows: RowKernels = REFERENCE_ROWS
    router: FusedRouter | None = None
    fused_layer: FusedSteps | None = None
    layer_stack: LayerStackKernel | None = None
    argmax: Callable[[Float[Array, "B V"]], tuple[Int[Array, " B"], Float[Array, " B"]]] | None = None
    logprobs: LogprobsKernel = log_softmax_at
    tied_linear: TiedLinear | None = None
    group: AxisGroup = SINGLE_DEVICE
    ranks: AxisGroup = SINGLE_DEVICE
    code_formats: frozenset[str] = frozenset()
    outputs_first: bool = False
    code_runs: tuple[int, ...] = (1,)
    code_spans: tuple[int, ...] = (1,)
    takes_bf16_scales: bool = False
    code_stack_fits: Callable[[int], bool] = lambda num_bytes: True
    stream_dtype: jnp.dtype | None = None

    @property
    def batch_invariant(self) -> bool:
        """Whether deterministic mode may use them: the kernels of a bundle are alike."""
        return self.moe.batch_invariant

    @property
    def lm_head(self) -> HeadProduct:
        """The product with the vocabulary matrix, whose rows are sharded."""
        return self._head_product(self.linear)

    @property
    def prompt_head(self) -> HeadProduct:
        """The same for blocks of a prompt's rows: `linear` where their bits are then those of a step's rows."""
        return self._head_product(self.linear if self.linear.batch_invariant else REFERENCE_LINEAR)

    def _head_product(self, linear: LinearBackend) -> HeadProduct:
        tied = self.tied_linear if self.group.count == 1 else None
        return HeadProduct(linear=row_parallel_linear(linear, self.group), tied=tied)

    def with_group(
        self, group: AxisGroup, *, experts: AxisGroup | None = None, ranks: AxisGroup = SINGLE_DEVICE
    ) -> "Kernels":
        """The same kernels on one device's share of the weights. Kernels that span an all-reduce are
        left out. With data ranks, `group` are the devices of one, `experts` those of all, and `ranks` one of each."""
        experts = experts or group
        if experts.count == 1:
            return self
        moe = parallel_moe(self.moe, experts, ranks)
        return dataclasses.replace(self, moe=moe, fused_layer=None, layer_stack=None, group=group, ranks=ranks)
