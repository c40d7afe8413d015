"""Every form in which a record leaves the engine or comes back. NumPy only; names are imported on first use (PEP 562).

A framework's layout is a module with `encode(record) -> array` and `decode(array, SequenceInfo(...)) -> RoutedExperts`;
where the framework trains on padded batches, also `encode_batch` and `decode_batch`:

    layout    of one sequence                    a row that is not known
    sglang    int32 [R, L, K], dense -1 or 0     refused
    vllm      uint8 or uint16 [R, L, K], dense 0 refused
    vllm021   int16 [P, M, K], int16 [G, M, K]   refused
    verl      int16 [R, L, K], dense 0           refused
    slime     int32 [S-1, L, K], dense 0         refused
    megatron  M of int64 [S, K], bool [S]        with missing="gate": outside the mask
    nemo_rl   int32 [S-1, L, K], dense 0         with missing="gate": the whole row -1
    tunix     int16 [S, M, K]                    with missing="gate": -1
    maxtext   int32 [S, M, K]                    with native=: ids of a live forward

`wire` has the forms that the server speaks (`packed` is one of them), `meta_info` reads answers, `archive` has files.
Dims: S tokens, R rows,
P and G rows of prompt and answer, L hidden layers, M MoE layers, K experts per token."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routed_experts.formats import (
        archive,
        maxtext,
        megatron,
        meta_info,
        metadata,
        nemo_rl,
        packed,
        sglang,
        slime,
        tunix,
        verl,
        vllm,
        vllm021,
        wire,
    )
    from routed_experts.formats.archive import (
        ArchivedAnswer,
        decode_answers,
        decode_record,
        encode_answers,
        encode_record,
    )
    from routed_experts.formats.layout import SequenceInfo
    from routed_experts.formats.meta_info import (
        extract_routed_experts_from_meta_info,
        record_from_meta_info,
        record_from_response,
    )
    from routed_experts.formats.wire import (
        decode_routed_experts,
        encode_as_lists,
        encode_meta_info,
        encode_routed_experts,
        record_from_npy,
    )

FRAMEWORKS = ("sglang", "vllm", "vllm021", "verl", "slime", "megatron", "nemo_rl", "tunix", "maxtext")
WITH_MARK = ("megatron", "nemo_rl", "tunix")  # their encode takes `missing`

__all__ = [
    "FRAMEWORKS",
    "WITH_MARK",
    "ArchivedAnswer",
    "SequenceInfo",
    "archive",
    "decode_answers",
    "decode_record",
    "decode_routed_experts",
    "encode_answers",
    "encode_as_lists",
    "encode_meta_info",
    "encode_record",
    "encode_routed_experts",
    "extract_routed_experts_from_meta_info",
    "maxtext",
    "megatron",
    "meta_info",
    "metadata",
    "nemo_rl",
    "packed",
    "record_from_meta_info",
    "record_from_npy",
    "record_from_response",
    "sglang",
    "slime",
    "tunix",
    "verl",
    "vllm",
    "vllm021",
    "wire",
]

_HOMES = {
    "ArchivedAnswer": "archive",
    "SequenceInfo": "layout",
    "decode_answers": "archive",
    "decode_record": "archive",
    "decode_routed_experts": "wire",
    "encode_answers": "archive",
    "encode_as_lists": "wire",
    "encode_meta_info": "wire",
    "encode_record": "archive",
    "encode_routed_experts": "wire",
    "extract_routed_experts_from_meta_info": "meta_info",
    "record_from_meta_info": "meta_info",
    "record_from_npy": "wire",
    "record_from_response": "meta_info",
}


def __getattr__(name: str) -> object:
    """Import a module, or a name from its module, on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    module = import_module(f"{__name__}.{_HOMES.get(name, name)}")
    return vars(module)[name] if name in _HOMES else module
