"""`routed-experts demo`: what the package does, shown on a very small model in under a minute. Knows only public
doors."""

from importlib.resources import files
from pathlib import Path


def demo_model_path() -> Path:
    """The checkpoint folder that the package brings: Qwen3-MoE, 6 layers (the first dense), 32 experts, top-4."""
    return Path(str(files("routed_experts") / "demo_model"))
