"""A server as trainers have it: rows are captured, and weights come from a folder. And what the rollouts of slime and
Miles, of one origin, ask for: a state with a tokenizer, arguments, and an HTTP client of theirs."""

import argparse
import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

import httpx

from compat_peers import serving

_T = TypeVar("_T")

NUM_LAYERS, TOP_K = 6, 4  # of the demo model


@contextlib.contextmanager
def trained_server(folder: Path, *args: str) -> Iterator[tuple[str, str]]:
    """The address of a server, and a folder with weights that it may be updated from."""
    weights = folder / "step"
    shutil.copytree(serving.model_path(), weights)
    port = serving.free_port()
    serving.Server("policy", ["--enable-return-routed-experts", "--weights-root", str(folder), *args], port=port)
    try:
        yield f"http://127.0.0.1:{port}", str(weights)
    finally:
        serving.end(port)


class RolloutState:
    """GenerateState of the peer without its processes: a tokenizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm.tokenizers import get_tokenizer

        self.tokenizer, self.processor = get_tokenizer("policy"), None


def rollout_args(url: str, **more: object) -> argparse.Namespace:
    """The peer's arguments of a rollout by the server at `url`."""
    address = urlparse(url)
    return argparse.Namespace(
        ci_test=False,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        use_rollout_routing_replay=True,
        num_layers=NUM_LAYERS,
        moe_router_topk=TOP_K,
        sglang_speculative_algorithm=None,
        **more,
    )


def engine_of(engine_type: Any, url: str) -> Any:
    """The peer's handle of a server, without its Ray actor."""
    address = urlparse(url)
    engine = engine_type.__new__(engine_type)
    engine.node_rank, engine.server_host, engine.server_port = 0, address.hostname, address.port
    return engine


def run(http_utils: Any, make: Callable[[], Awaitable[_T]], *, limit_s: float = 100) -> _T:
    """Run a coroutine with the HTTP client of the peer's module."""

    async def main() -> _T:
        async with httpx.AsyncClient(timeout=limit_s, trust_env=False) as client:
            http_utils._http_client = client
            return await asyncio.wait_for(make(), limit_s)

    return asyncio.run(main())
