"""What a peer's test imports of its own project and we have no stand-in for: a name that may be imported, and not used.

A name of vllm, sglang or sgl_jax is looked for among our stand-ins, then among the helpers that the checkout itself has
(HELPERS), and else it is a placeholder. To call a placeholder, or to read an attribute of it, raises PeersOwn; the
plugin counts such a test as not applicable."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_KITS = "abort_timeout pause_generation matched_stop anthropic_messages".split()
_CLIENT = ("utils.http_utils", "utils.types", "rollout.sglang_rollout", "backends.sglang_utils.sglang_engine")
_SLIME = (
    *_CLIENT,
    *("utils.misc", "observability.trace_utils"),
    *("backends.sglang_utils.server_control", "backends.sglang_utils.external"),
)
_MILES = (*_CLIENT, "utils.misc", "utils.lora", "utils.multi_lora")
_SKYRL = (
    *("env_vars", "backends.utils", "backends.skyrl_train.utils.routed_experts"),
    *(
        f"backends.skyrl_train.inference_servers.{name}"
        for name in ("base", "generate_wire", "remote_inference_client")
    ),
)
_PRIME_RL = (
    *("utils.client", "utils.logger", "transports.rollouts", "transports.rollouts.types"),
    *("orchestrator.trajectories", "orchestrator.inference_metrics", "orchestrator.concurrency"),
)
PEERS = ("vllm", "sglang", "sgl_jax", "slime", "miles", "skyrl", "prime_rl")
HELPERS = {  # modules that hold tests, or the client of a trainer: taken from the checkout, from this folder of it
    **{f"sglang.test.kits.{name}_kit": "python" for name in _KITS},
    **{f"slime.{name}": "." for name in _SLIME},
    **{f"miles.{name}": "." for name in _MILES},
    **{f"skyrl.{name}": "." for name in _SKYRL},
    **{f"prime_rl.{name}": "src" for name in _PRIME_RL},
    **{f"prime_rl.{name}": "packages/prime-rl-configs/src" for name in ("configs.shared", "utils.config")},
}
OTHERS = ("torch", "ray", "sglang_router", "fastapi", "wandb")  # placeholders where they are not installed


class PeersOwn(Exception):
    """A test uses a part of the peer's own program, which no server can give."""


class _Placeholder(type):
    """The type of placeholders: classes, so that they can be bases, annotations and what `except` names."""

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise PeersOwn(cls.peer_name)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.peer_name}.{name}")


def placeholder(name: str) -> type:
    """A class that stands for `name`, and that cannot be used."""
    return _Placeholder(name.rpartition(".")[2], (Exception,), {"peer_name": name, "__module__": name})


def missing(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a stand-in module: names that it lacks are its modules, or placeholders."""

    def get(name: str) -> Any:
        if name.startswith(("__", "pytest")):
            raise AttributeError(name)
        path = getattr(sys.modules.get(module), "__path__", None)
        if path and importlib.machinery.PathFinder.find_spec(f"{module}.{name}", path) is not None:
            return importlib.import_module(f"{module}.{name}")
        return placeholder(f"{module}.{name}")

    return get


class PeerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the peers that no stand-in is there for. The last finder that is asked."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """A helper's file of the checkout, or a module of placeholders."""
        root = fullname.partition(".")[0]
        if root not in (*PEERS, *OTHERS) or (root in OTHERS and path is not None and list(path)):
            return None  # a module that an installed package lacks
        if fullname in HELPERS:
            name = Path(os.environ["COMPAT_CHECKOUT"], HELPERS[fullname], *fullname.split("."))
            if name.with_suffix(".py").is_file():
                return importlib.util.spec_from_file_location(fullname, name.with_suffix(".py"))
            if (name / "__init__.py").is_file():  # its modules are looked for as it is
                file = name / "__init__.py"
                return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module whose every name is a placeholder."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run."""
        module.__path__ = []
        module.__getattr__ = missing(module.__name__)  # type: ignore[method-assign]


def install() -> None:
    """Add the finder, once."""
    if not any(isinstance(finder, PeerFinder) for finder in sys.meta_path):
        sys.meta_path.append(PeerFinder())
