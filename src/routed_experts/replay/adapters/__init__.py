"""Adapters: records and batches in the forms of other engines and trainers. Pure functions on NumPy arrays; knows none
of their code.

A form that cannot say "this row is not known" refuses such rows; nothing is filled in silently."""

from routed_experts.replay.adapters.batches import (
    batch_from_maxtext,
    batch_from_tunix,
    batch_from_verl,
    batch_to_maxtext,
    batch_to_tunix,
    batch_to_verl,
)
from routed_experts.replay.adapters.foreign import Origin
from routed_experts.replay.adapters.serving import from_sglang, from_vllm, from_vllm021, to_sglang, to_vllm, to_vllm021
from routed_experts.replay.adapters.trainers import (
    from_maxtext,
    from_megatron,
    from_nemo_rl,
    from_slime,
    from_tunix,
    from_verl,
    to_maxtext,
    to_megatron,
    to_nemo_rl,
    to_slime,
    to_tunix,
    to_verl,
)

__all__ = [
    "Origin",
    "batch_from_maxtext",
    "batch_from_tunix",
    "batch_from_verl",
    "batch_to_maxtext",
    "batch_to_tunix",
    "batch_to_verl",
    "from_maxtext",
    "from_megatron",
    "from_nemo_rl",
    "from_sglang",
    "from_slime",
    "from_tunix",
    "from_verl",
    "from_vllm",
    "from_vllm021",
    "to_maxtext",
    "to_megatron",
    "to_nemo_rl",
    "to_sglang",
    "to_slime",
    "to_tunix",
    "to_verl",
    "to_vllm",
    "to_vllm021",
]
