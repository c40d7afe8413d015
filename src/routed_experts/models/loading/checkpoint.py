"""Files of a Hugging Face checkpoint: headers, tensors, and the check against a model's table of names. Pickle is
never read.

The table maps every tensor to its part of the model's stacked arrays. `check` compares it with the headers;
weight_loader.py fills the arrays."""

import errno
import fnmatch
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import CheckpointError
from routed_experts.core.paths import is_folder, shown_path
from routed_experts.models.base.config_reader import read_json_object
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.loading.model_source import GGUF, GGUF_REFUSED
from routed_experts.models.loading.quantized_part import QuantizedPart
from routed_experts.models.loading.tensor_file import WEIGHT_DTYPES, TensorFile

_FP8_TENSORS = "fp8 or compressed-tensors"
_PACKED: Mapping[str, str] = MappingProxyType(  # how names of tensors end that quantisations add
    {
        ".weight_scale_inv": "fp8 blocks",
        ".weight_scale": _FP8_TENSORS,
        ".weight_packed": "compressed-tensors",
        ".weight_global_scale": "NVFP4",
        ".weight_scale_2": "NVFP4",
        ".qweight": "GPTQ or AWQ",
        ".qzeros": "GPTQ or AWQ",
        ".absmax": "bitsandbytes",
        ".SCB": "bitsandbytes",
        "_proj_blocks": "MXFP4",
    }
)
MAX_VALUE_DIGESTS = 64
_NUM_READERS = 8
_LISTED = 8  # names of each kind in an error


class Checkpoint:
    """Safetensors of one folder: headers at once, tensors on request. After `close()`, or outside `with`, nothing can
    be read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._files: dict[str, TensorFile] = {}  # by tensor name
        self._names: dict[str, tuple[tuple[int, ...], str]] = {}
        for file, promised in _weight_files(self.path).items():
            self._open(file, promised)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as they are stored."""
        return sum(file.tensors[name].num_bytes for name, file in self._files.items())

    def names(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor, from the headers alone; a dtype we cannot read keeps safetensors' own
        word."""
        return dict(self._names)

    def read(self, name: str, box: tuple[slice, ...] = ()) -> np.ndarray:
        """Copy one tensor, or the part of it that `box` names, to the host. Raises CheckpointError where it cannot be
        read."""
        return self._files[name].read(name, box)

    def read_part(self, name: str, box: tuple[slice, ...]) -> QuantizedPart | None:
        """The codes and scales of the part; None for a tensor whose numbers are stored, or can only be computed on the
        host. Raises as `read` does."""
        return None

    def value_digests(self) -> dict[str, str]:
        """Digests of samples of the values, by the tensor's name, or of at most MAX_VALUE_DIGESTS runs of names where
        there are more: equal copies of a checkpoint have equal ones, and other training steps other ones. Raises
        CheckpointError."""
        with ThreadPoolExecutor(_NUM_READERS) as pool:  # many small reads, of a disk or a network
            parts = list(pool.map(TensorFile.samples, {file.path: file for file in self._files.values()}.values()))
        samples = sorted((name, sample) for part in parts for name, sample in part.items())
        size = -(-len(samples) // MAX_VALUE_DIGESTS) or 1
        runs = [samples[first : first + size] for first in range(0, len(samples), size)]
        return {
            run[0][0] if len(run) == 1 else f"{run[0][0]} to {run[-1][0]}": _digest(sample for _, sample in run)
            for run in runs
        }

    def close(self) -> None:
        self._files.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, file: Path, promised: Sequence[str]) -> None:
        try:
            opened = TensorFile.open(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} does not exist, but the index names it; copy the missing shard") from None
        present = opened.tensors
        if absent := sorted(set(promised) - set(present)):
            raise CheckpointError(
                f"{file} lacks {_some(absent)}, which the index places there; copy the checkpoint again"
            )
        if twice := sorted(set(self._names) & set(present)):
            raise CheckpointError(
                f"{file} holds {_some(twice)}, which another shard holds too; expected each tensor once"
            )
        for name, tensor in present.items():
            self._names[name], self._files[name] = (tensor.shape, tensor.dtype), opened


def _digest(samples: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(samples)).hexdigest()[:16]


def check(
    sources: Iterable[WeightSource],
    checkpoint: Checkpoint,
    *,
    ignore: Iterable[str] = (),
    among: Iterable[str] = ("*",),
) -> None:
    """Raise one CheckpointError that names every missing, unexpected and misshapen tensor and every dtype we cannot
    read.

    `ignore` holds shell patterns of unused tensors that are allowed, such as "*.rotary_emb.inv_freq"; one without any
    number is allowed, too: transformers writes them for zero shared experts. `among`: patterns of the tensors that are
    compared; others are not looked at."""
    expected, patterns, compared = {source.name: source for source in sources}, tuple(ignore), tuple(among)
    present = {
        name: header
        for name, header in checkpoint.names().items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in compared)
    }
    shared = [(name, source.shape, *present[name]) for name, source in expected.items() if name in present]
    if methods := _quantizations(name for name in present if name not in expected):
        raise CheckpointError(
            f"{checkpoint.path} holds weights that look quantised by {' or '.join(methods)}, though its config.json "
            "does not say so; expected "
            "plain bfloat16, float16 or float32 weights; use an unquantised checkpoint"
        )
    faults = {
        "missing": [name for name, source in expected.items() if name not in present and not source.optional],
        "unexpected": [
            name
            for name, (shape, _) in present.items()
            if name not in expected and 0 not in shape and not any(fnmatch.fnmatchcase(name, p) for p in patterns)
        ],
        "misshapen": [
            f"{name} is {list(shape)}, expected {list(want)}" for name, want, shape, _ in shared if shape != want
        ],
        "of a dtype other than bfloat16, float16, float32": [
            f"{n} is {d}" for n, _, _, d in shared if d not in WEIGHT_DTYPES
        ],
    }
    messages = [f"{len(names)} {kind} ({_some(names)})" for kind, names in faults.items() if names]
    if messages:
        raise CheckpointError(
            f"{checkpoint.path} does not fit its config.json: {'; '.join(messages)}; expected the tensors of that "
            "architecture"
        )


def _quantizations(names: Iterable[str]) -> list[str]:
    """The quantisations that tensors of these names may be of, sorted."""
    methods = {method for name in names for end, method in _PACKED.items() if name.endswith(end)}
    if "NVFP4" in methods:  # its other tensors are named as those of others
        return ["NVFP4"]
    return sorted(methods - {_FP8_TENSORS} if "compressed-tensors" in methods else methods)


def save(path: Path | str, config: Mapping[str, object], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write config.json and model.safetensors as Hugging Face does, and create the folder. Raises WriteError; then both
    files are unchanged, except that the weights are new if only the rename of config.json failed."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.require(tensor, requirements="C") for name, tensor in tensors.items()}
    with atomic_write(folder / "config.json") as config_file, atomic_write(folder / "model.safetensors") as weights:
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        try:
            save_file(contiguous, weights, metadata={"format": "pt"})
        except SafetensorError as error:  # its text alone holds the system's message
            raise OSError(errno.EIO, str(error), os.fspath(weights)) from error
    return folder


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a folder, each with the tensors that the index lists for it."""
    if not is_folder(folder):
        raise CheckpointError(
            f"no checkpoint folder {shown_path(folder)}; expected a folder with config.json and safetensors; check "
            "the path"
        )
    if (folder / "model.safetensors").exists():
        return {folder / "model.safetensors": []}
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        names = sorted(file.name for file in folder.iterdir())
        pickled = [name for name in names if Path(name).suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"}]
        if gguf := [name for name in names if name.lower().endswith(GGUF)]:
            raise CheckpointError(f"{folder} holds GGUF weights ({_some(gguf)}), {GGUF_REFUSED}")
        if pickled:
            raise CheckpointError(
                f"{folder} holds pickled weights ({_some(pickled)}), which can run code and are never read; expected "
                "model.safetensors; convert them with safetensors"
            )
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json; download the weights"
        )
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map; expected tensor names and their files; copy the checkpoint again"
        )
    files: dict[Path, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} places {name} in {file!r}; expected a .safetensors file of the same folder")
        files[folder / file].append(str(name))
    return files


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join([*names[:_LISTED], *([f"and {more} more"] if more > 0 else [])])
