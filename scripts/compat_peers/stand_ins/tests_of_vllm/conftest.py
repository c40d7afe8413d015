"""vLLM's `tests.conftest`: the runner of its offline engine, over our LLM in this process."""

from types import TracebackType
from typing import Any

import pytest
from compat_peers import serving
from compat_peers.placeholders import missing

__getattr__ = missing("tests.conftest")


class VllmRunner:
    """Our LLM on the model of the tests, as `llm`."""

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        from routed_experts import LLM

        kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in ("tensor_parallel_size", "gpu_memory_utilization")
        }
        kwargs.setdefault("max_model_len", 1024)  # as vLLM's runner does
        self.llm = LLM(serving.model_path(), gpu_memory_utilization=0.02, **kwargs)

    def __enter__(self) -> "VllmRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.llm.shutdown()


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    """The class: tests make what they need."""
    return VllmRunner
