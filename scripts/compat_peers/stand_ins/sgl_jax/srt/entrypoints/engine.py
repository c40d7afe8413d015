"""Our Engine on the model of the tests; devices, folders and memory are the machine's."""

from typing import Any

from compat_peers import serving

import routed_experts


class Engine(routed_experts.Engine):
    """As sgl-jax's is called."""

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        left_out = ("tp_size", "device", "download_dir", "mem_fraction_static")
        kept = {name: value for name, value in kwargs.items() if name not in left_out}
        super().__init__(serving.model_path(), max_total_tokens=serving.POOL, context_length=serving.CONTEXT, **kept)
