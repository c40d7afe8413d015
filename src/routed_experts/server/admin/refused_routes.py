"""Routes of other servers that this one does not have. Each is refused with what to use; a 404 would not say it.

They take tensors over HTTP, NCCL or shared memory, call methods of workers by name, or load adapters."""

from collections.abc import Mapping
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

from routed_experts.server.errors import ApiError

_FROM_DISK = (
    "weights come from disk: write a checkpoint below --weights-root, then POST /update_weights_from_disk "
    '{"model_path": folder}'
)
_NO_UPDATE_PHASES = "an update is one call; " + _FROM_DISK
_NO_LORA = "there are no adapters: merge them into the weights; " + _FROM_DISK
_NO_RPC = "workers have no methods to call; use /pause, /update_weights, /sleep and /wake_up"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        # SGLang, slime, Miles
        **dict.fromkeys(
            (
                "/update_weights_from_tensor",
                "/update_weights_from_distributed",
                "/update_weights_from_ipc",
                "/init_weights_update_group",
                "/destroy_weights_update_group",
                "/init_weights_send_group_for_remote_instance",
                "/send_weights_to_remote_instance",
                "/pull_weights",
            ),
            _FROM_DISK,
        ),
        **dict.fromkeys(("/begin_weight_update", "/end_weight_update", "/post_process_weights"), _NO_UPDATE_PHASES),
        "/weights_checker": "compare GET /get_weight_version and the version_spans of rows",
        # vLLM, prime-rl, SkyRL
        **dict.fromkeys(("/init_weight_transfer_engine", "/init_broadcaster", "/fetch_weights"), _FROM_DISK),
        **dict.fromkeys(("/start_weight_update", "/finish_weight_update"), _NO_UPDATE_PHASES),
        "/weight_checker": "compare GET /get_weight_version and the version_spans of rows",
        "/collective_rpc": _NO_RPC,
        # adapters
        **dict.fromkeys(
            (
                "/load_lora_adapter",
                "/unload_lora_adapter",
                "/load_lora_adapter_from_tensors",
                "/load_lora_adapter_from_distributed",
                "/v1/load_lora_adapter",
                "/v1/unload_lora_adapter",
                "/skyrl/v1/load_lora_adapter",
            ),
            _NO_LORA,
        ),
    }
)


async def refuse(request: Request) -> Response:
    """Raise ApiError (400) with what to use instead."""
    path: str = request.scope["path"]
    name = path.rpartition("/")[2]  # an error shows no path of several parts
    raise ApiError(f"{name} is not supported: {REFUSED[path]}", status=400, code="unsupported_route")
