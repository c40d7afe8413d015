"""What a layer of a family does beside the plain one, as a static value that fused kernels are given."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackTraits:
    """What a layer does; the defaults are Qwen3-MoE's. `qk_norm`: "head", of each head; "bare", the same without a
    scale; "whole", of the whole projection; "", none. `qk_norm_offset` is added to its scale; `norm_after_rope`: it
    follows the rotary positions. `rotary`: whether the layer rotates by the angles of the step, which are its first
    dims where they are fewer; `interleaved`: in pairs of neighbours. `gated`: each head's output is multiplied by the
    sigmoid of the numbers beside its query. `window`, `chunk`, `scale`: as in AttentionFeatures. `activation`: of the
    experts."""

    qk_norm: str = "head"
    qk_norm_offset: float = 0.0
    norm_after_rope: bool = False
    rotary: bool = True
    interleaved: bool = False
    gated: bool = False
    window: int = 0
    chunk: int = 0
    scale: float = 0.0
    activation: str = "silu"


PLAIN_TRAITS = StackTraits()
