"""Finds the folder of a model: a path, the model of the package (`demo`), or a repository of the Hugging Face hub.

A repository is fetched into the hub's own cache by huggingface_hub (extra `hf`), which also reads HF_TOKEN, HF_HOME,
HF_ENDPOINT and HF_HUB_OFFLINE. Configs and tokenizer come first and weights last, so a snapshot with all weights of its
index is whole."""

import dataclasses
import errno
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from routed_experts.core.errors import CheckpointError, ConfigError, WriteError
from routed_experts.core.installation import import_optional
from routed_experts.core.paths import is_file, is_folder, shown_path
from routed_experts.core.server_args import ServerArgs
from routed_experts.models.base.config_reader import read_json_object

DEMO = "demo"
GGUF = ".gguf"
GGUF_REFUSED = "which are not read; expected model.safetensors; take the checkpoint that they were converted from"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
_WEIGHTS = ("*.safetensors",)
_SUBFOLDERS = ("*/*", "consolidated*")  # the same weights once more, in other forms
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def demo_model_path() -> Path:
    """The checkpoint folder that the package brings: Qwen3-MoE, 6 layers (the first dense), 32 experts, top-4."""
    return Path(str(files("routed_experts") / "demo_model"))


def demo_head_path() -> Path:
    """The EAGLE-3 head of the demo model, in the package."""
    return demo_model_path() / "draft_head"


def draft_folder_path(path: str | os.PathLike[str]) -> Path:
    """The folder of a draft head: a path, or `demo`, the head of the demo model."""
    return demo_head_path() if os.fspath(path) == DEMO and not is_folder(path) else Path(path)


def model_path(path: str | os.PathLike[str]) -> Path:
    """The path of a model on this machine: itself, or of `demo` the folder in the package."""
    return demo_model_path() if os.fspath(path) == DEMO and not is_folder(path) else Path(path)


def local_folder(model: str) -> Path | None:
    """The folder of a model on this machine; None for the id of a repository. Raises CheckpointError for neither."""
    folder = Path(model)
    if is_folder(folder):
        return folder
    if model == DEMO:
        return demo_model_path()
    if model.lower().endswith(GGUF) and is_file(folder):
        raise CheckpointError(f"{shown_path(model)} is a file of GGUF weights, {GGUF_REFUSED}")
    if not _is_repository(model):
        known = f"give a folder with config.json and safetensors, a Hugging Face id such as org/name, or {DEMO}"
        raise CheckpointError(f"no checkpoint folder {shown_path(model)}; {known}")
    return None


def model_name(model: str) -> str:
    """The name under which a model is served: the name of its folder, or the id of its repository."""
    return Path(model).resolve().name if is_folder(model) else model


def full_path(model: str) -> str:
    """The absolute path of a folder, also that of the demo model; the id of a repository as it is."""
    folder = model_path(model)
    return str(folder.resolve()) if is_folder(folder) else model


def find_model(model: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model; a repository is fetched, without `weights` its configs and tokenizer alone.

    What is in the cache is not fetched again, and what was interrupted goes on. Raises ConfigError without
    huggingface_hub, CheckpointError for a repository that cannot be had, and WriteError where the disk is full."""
    folder = local_folder(model)
    if folder is not None:
        if revision is not None:
            raise ConfigError(f"revision={revision!r} with the folder {model}, which has no revisions; leave it out")
        return folder
    purpose = f"no folder {model}, and to fetch it from the Hugging Face hub"
    hub = import_optional("huggingface_hub", purpose=purpose, extra="hf", otherwise="give the folder of a checkpoint")
    return _fetch(hub, model, revision, weights=weights)


def with_local_model(args: ServerArgs, *, weights: bool = True) -> ServerArgs:
    """The same arguments with the folders of the model and of its tokenizer. Raises as `find_model` does."""
    folders: dict[str, str] = {}
    if args.model_path is not None:
        folders["model_path"] = str(find_model(args.model_path, revision=args.revision, weights=weights))
    if args.tokenizer_path is not None and (_is_repository(args.tokenizer_path) or _is_demo(args.tokenizer_path)):
        folders["tokenizer_path"] = str(find_model(args.tokenizer_path, weights=False))
    return dataclasses.replace(args, revision=None, **folders)


def _is_demo(model: str) -> bool:
    return model == DEMO and not is_folder(model)


def _is_repository(model: str) -> bool:
    return _REPOSITORY.fullmatch(model) is not None and not Path(model).exists()


def _fetch(hub: Any, model: str, revision: str | None, *, weights: bool) -> Path:
    try:
        folder = Path(
            hub.snapshot_download(model, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=_SUBFOLDERS)
        )
        if weights:
            commit = folder.name
            hub.snapshot_download(model, revision=commit, allow_patterns=_WEIGHTS, ignore_patterns=_SUBFOLDERS)
            _check_whole(hub, model, folder)
    except CheckpointError:
        raise
    except Exception as error:
        raise _explain(hub, model, revision, error) from error
    return folder


def _check_whole(hub: Any, model: str, folder: Path) -> None:
    """Raise CheckpointError unless every weight file of the snapshot is there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json_object(index).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) else set[str]()
        missing = sorted(str(name) for name in names if not (folder / str(name)).is_file())
        if missing:
            raise CheckpointError(f"{model} is not whole in {folder}: {missing[0]} is missing; {_again(hub)}")
    elif not any(folder.glob("*.safetensors")):
        others = [
            name
            for name in hub.list_repo_files(model, revision=folder.name)
            if name.endswith((".bin", ".pt", ".pth", ".gguf"))
        ]
        kinds = f"has only {', '.join(others[:3])}, which" if others else "has no weights that"
        raise CheckpointError(f"{model} {kinds} cannot be read; choose a repository with *.safetensors, or convert it")


def _explain(hub: Any, model: str, revision: str | None, error: Exception) -> ConfigError:
    """The error that a reader can act on, for one of the hub's."""
    errors, site = hub.errors, f"{hub.constants.ENDPOINT}/{model}"
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{model} is gated; accept its terms at {site}, then log in with: hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{model} has no revision {revision!r}; choose a branch, tag or commit of {site}")
    if isinstance(error, errors.RepositoryNotFoundError):
        text = f"no folder {model}, and {hub.constants.ENDPOINT} shows no such repository to this login"
        return CheckpointError(f"{text}; correct the name, or log in with: hf auth login")
    if isinstance(error, errors.LocalEntryNotFoundError):
        cache, name = hub.constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}"
        state = "not whole in" if (Path(cache) / name / "snapshots").is_dir() else "not in"
        why, fix = f"{hub.constants.ENDPOINT} cannot be reached", "connect"
        if hub.constants.HF_HUB_OFFLINE:
            why, fix = "HF_HUB_OFFLINE is set", "unset it"
        text = f"no folder {model}; as a repository it is {state} the cache {cache}, and {why}"
        return CheckpointError(f"{text}; {fix}, or give the folder of a checkpoint")
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{model} is neither a folder nor the id of a repository ({cause}); correct it")
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        text = f"no space for {model} in {hub.constants.HF_HUB_CACHE} ({error.strerror})"
        return WriteError(f"{text}; make room, or set HF_HOME to a folder of another disk, and {_again(hub)}")
    return CheckpointError(f"fetching {model} was interrupted ({cause}); {_again(hub)}")


def _again(hub: Any) -> str:
    offline = " without HF_HUB_OFFLINE" if hub.constants.HF_HUB_OFFLINE else ""
    return f"start again{offline}: what was fetched is kept"
