"""`internal_states` of get_server_info: what an engine does at this moment, in the words of SGLang and sgl-jax."""

from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.stats import engine_stats


def internal_state(components: EngineComponents, *, page_size: int, is_paused: bool) -> dict[str, object]:
    """The present state, of all data ranks together, from any thread. Tokens are KV slots; those of cached prefixes are
    available, for they are evicted when room runs short."""
    stats = engine_stats(components)
    running = [req.rid for scheduler in components.core.ranks for req in tuple(scheduler.running)]
    state: dict[str, object] = {
        "num_running_reqs": stats.running,
        "num_queue_reqs": stats.waiting,
        "running_batch_size": stats.running,
        "running_batch_rids": running,
        "waiting_queue_size": stats.waiting,
        "req_to_token_pool_used": stats.running,
        "available_kv_tokens": (stats.free_pages + stats.cached_pages) * page_size,
        "tree_cache_size": stats.cached_pages * page_size,
        "engine_paused": is_paused,
        "last_step_age_s": stats.last_step_age_s,
        "weight_version": stats.weight_version,
        "update_count": stats.update_count,
    }
    if stats.speculative is not None:
        state["avg_spec_accept_length"] = stats.speculative.requests.accept_length
    return state
