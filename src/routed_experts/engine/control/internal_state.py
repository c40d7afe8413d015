"""`internal_states` of get_server_info: what an engine does at this moment, in the words of SGLang and sgl-jax."""

from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.stats import engine_stats

_NEW_TOKEN_RATIO = 0.0  # of the tokens to come, for which admission holds room: a request that lacks room is retracted


def internal_state(components: EngineComponents, *, page_size: int, is_paused: bool) -> dict[str, object]:
    """The present state, of all data ranks together, from any thread. Tokens are KV slots; those of cached prefixes are
    available, for they are evicted when room runs short. `forward_ct_decode` counts steps since the last flush."""
    stats = engine_stats(components)
    core = components.core
    running = [req for scheduler in core.ranks for req in tuple(scheduler.running)]
    is_idle = not core.has_step_in_flight
    state: dict[str, object] = {
        "num_running_reqs": stats.running,
        "num_queue_reqs": stats.waiting,
        "running_batch_size": stats.running,
        "running_batch_rids": [req.rid for req in running],
        "waiting_queue_size": stats.waiting,
        "req_to_token_pool_used": stats.running,
        "available_kv_tokens": (stats.free_pages + stats.cached_pages) * page_size,
        "tree_cache_size": stats.cached_pages * page_size,
        "cur_batch_is_none": is_idle,
        "last_batch_is_none": is_idle,
        "chunked_req_is_none": all(req.is_prefilled or not req.num_dispatched for req in running),
        "forward_ct_decode": core.num_steps - core.flushed_at_step,
        "new_token_ratio": _NEW_TOKEN_RATIO,
        "init_new_token_ratio": _NEW_TOKEN_RATIO,
        "engine_paused": is_paused,
        "last_step_age_s": stats.last_step_age_s,
        "weight_version": stats.weight_version,
        "update_count": stats.update_count,
    }
    if stats.speculative is not None:
        state["avg_spec_accept_length"] = stats.speculative.requests.accept_length
    return state
