"""`routed-experts demo`: generates with capture, replays the record, and draws it, in under a minute."""

from routed_experts.models.loading.model_source import demo_model_path

__all__ = ["demo_model_path"]
