"""vLLM's `tests.utils`: RemoteOpenAIServer over `routed-experts serve`, with what a client of vLLM is told to set."""

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import openai
from compat_peers import serving
from compat_peers.placeholders import missing

DIALECT = ("--routed-experts-dialect", "vllm", "--metrics-compat", "vllm")
__getattr__ = missing("tests.utils")


class RemoteOpenAIServer:
    """A server for as long as the `with` lasts."""

    DUMMY_API_KEY = "token-abc123"
    uds = None  # servers of ours have a port

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: Mapping[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: Mapping[str, Any] | None = None,
    ) -> None:
        args = [str(arg) for arg in vllm_serve_args]
        self.show_hidden_metrics = any(arg.startswith("--show-hidden-metrics-for-version") for arg in args)
        self.host = "127.0.0.1"
        if auto_port:
            self.port = serving.free_port()
        else:
            at = args.index("--port")
            self.port = int(args[at + 1])
            del args[at : at + 2]
        if seed is not None:
            args += ["--seed", str(seed)]
        env = dict(env_dict or {})
        if "VLLM_API_KEY" in env:
            env["ROUTED_EXPERTS_API_KEY"] = env["VLLM_API_KEY"]
        self._server = serving.Server(model, [*DIALECT, *args], port=self.port, env=env)
        self.proc = self._server.process

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        serving.end(self.port)

    @property
    def url_root(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """The address of a route."""
        return self.url_root + "/" + "/".join(parts)

    def get_client(self, **kwargs: Any) -> openai.OpenAI:
        """OpenAI's client."""
        return openai.OpenAI(**self._options(kwargs))

    def get_async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        """OpenAI's client of coroutines."""
        return openai.AsyncOpenAI(**self._options(kwargs))

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        usual = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": float(os.environ.get("COMPAT_TIMEOUT_S", "60")), **usual, **kwargs}
