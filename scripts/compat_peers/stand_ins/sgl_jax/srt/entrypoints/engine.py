"""Our Engine on the model of the tests; devices, folders and memory are the machine's."""

from typing import Any

from compat_peers import serving

import routed_experts

LEFT_OUT = ("tp_size", "device", "download_dir", "mem_fraction_static")


def Engine(model_path: str, **kwargs: Any) -> routed_experts.Engine:  # the name that tests call
    """As sgl-jax's is called."""
    kept = {name: value for name, value in kwargs.items() if name not in LEFT_OUT}
    own = {"max_total_tokens": serving.POOL, "context_length": serving.CONTEXT}
    return routed_experts.Engine(serving.model_path(), **{**own, **kept})
