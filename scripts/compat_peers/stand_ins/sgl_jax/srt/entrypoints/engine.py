"""Our Engine on the model of the tests; tp_size and device are the machine's."""

from typing import Any

from compat_peers import serving

import routed_experts


class Engine(routed_experts.Engine):
    """As sgl-jax's is called."""

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        kept = {name: value for name, value in kwargs.items() if name not in ("tp_size", "device")}
        super().__init__(serving.model_path(), **kept)
