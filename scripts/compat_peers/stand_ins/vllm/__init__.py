"""Stand-ins for the names of vLLM that its tests of a server use; LLM and SamplingParams are ours."""

from typing import Any

from compat_peers.placeholders import missing


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        import routed_experts

        return getattr(routed_experts, name)
    return missing("vllm")(name)
