"""The GPU kernels as one bundle."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.gpu.capability import converts_e4m3
from routed_experts.layers.gpu.expert_tiles import tiles_for
from routed_experts.layers.gpu.linear import LARGEST, linear_in_place, partial_sums
from routed_experts.layers.gpu.moe import gpu_experts, slot_outputs
from routed_experts.layers.gpu.operands import is_addressable
from routed_experts.layers.gpu.packed_codes import RUNS
from routed_experts.layers.gpu.residual import add_parts_and_multiply, add_slots, normed_rows
from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.gpu.warpgroup_experts import suits_warpgroups, tiled_outputs
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.kernels import FusedRouter, FusedSteps, Kernels, NormedRows, SharedExperts
from routed_experts.layers.linear import LinearBackend
from routed_experts.layers.moe import ALL_EXPERTS, ExpertCall, MoeBackend
from routed_experts.layers.quantized import CODE_DTYPES, E4M3, SPANS, ScaledRows, Weight

_UNROLLED = 4  # layers; with more, a program takes longer to compile
_FUSED_FEATURES = ALL_EXPERTS | {
    *("layers of several kinds", "several epsilons", "offset norms", "a residual scale"),
    *("input biases", "an output bias", "shared experts", "gated shared experts"),
    *("a float32 router", "a router bias", "a selection bias"),
}


def gpu_kernels(*, interpret: bool, warpgroups: Warpgroups | None = None) -> Kernels:
    """The bundle; `interpret` runs it on any device, slowly, for tests. `warpgroups`: those of a Hopper GPU. Matrices
    of e4m3 stay codes from compute capability 8.9 on."""

    def product(
        x: Float[Array, "N D"] | NormedRows | ScaledRows, weights: Weight, layer: Int[Array, ""]
    ) -> Float[Array, "S N O"]:
        rows, dtype = (x.fastest, x.plain.dtype) if isinstance(x, NormedRows) else (x, x.dtype)
        if isinstance(x, ScaledRows):
            dtype = jnp.bfloat16  # rows of no other dtype are scaled
        return partial_sums(rows, weights, layer, dtype=dtype, warpgroups=warpgroups, interpret=interpret)

    def slots(
        call: ExpertCall, shared: SharedExperts | None, scaled: ScaledRows | None
    ) -> tuple[Float[Array, "P D"], Int[Array, "N K"] | None]:
        stride = call.num_experts
        if warpgroups is not None and shared is None and suits_warpgroups(call):
            return tiled_outputs(call, warpgroups, scaled_x=scaled, stride=stride, interpret=interpret)
        tiles = tiles_for(call, shared)
        return slot_outputs(call, tiles, shared, scaled_x=scaled, stride=stride, interpret=interpret), None

    linear = LinearBackend(
        name="gpu",
        run=functools.partial(linear_in_place, warpgroups=warpgroups, interpret=interpret),
        takes_stacked=True,
    )
    fused = FusedSteps(
        max_tokens=LARGEST,
        normed_rows=functools.partial(normed_rows, interpret=interpret),
        product=product,
        add_parts=functools.partial(add_parts_and_multiply, interpret=interpret),
        route=functools.partial(route_rows, interpret=interpret),
        slots=slots,
        add_slots=functools.partial(add_slots, interpret=interpret),
        features=_FUSED_FEATURES,
        unrolled=1 if interpret else _UNROLLED,  # interpreted kernels take long to compile
    )
    return Kernels(
        moe=MoeBackend(
            name="gpu",
            run=functools.partial(gpu_experts, warpgroups=warpgroups, interpret=interpret),
            features=ALL_EXPERTS,
        ),
        linear=linear,
        router=FusedRouter(
            name="gpu",
            run=functools.partial(route_rows, interpret=interpret),
            linear=linear,
            supports=lambda spec: True,
        ),
        fused_layer=fused,
        code_formats=frozenset(form for form in CODE_DTYPES if form != E4M3 or interpret or converts_e4m3()),
        outputs_first=True,
        code_runs=RUNS,
        code_spans=SPANS,
        takes_bf16_scales=True,
        code_stack_fits=is_addressable,
    )
