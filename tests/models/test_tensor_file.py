"""Reading a safetensors file: every box of every dtype is what NumPy cuts, nothing is mapped, and a file that shrinks
is reported."""

import itertools
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.loading import tensor_file
from routed_experts.models.loading.checkpoint import Checkpoint, save
from routed_experts.models.loading.tensor_file import TensorFile
from routed_experts.models.loading.weight_loader import load


def sides(size):
    return [slice(low, high) for low, high in itertools.combinations(range(size + 1), 2)]


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "uint8", "int64"])
@pytest.mark.parametrize("block_bytes", [1, 64, 16 << 20])
def test_every_box_is_what_numpy_cuts(tmp_path, monkeypatch, dtype, block_bytes):
    monkeypatch.setattr(tensor_file, "_BLOCK_BYTES", block_bytes)
    whole = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    save_file({"other": np.zeros(5, np.uint8), "w": whole}, tmp_path / "f.safetensors")
    opened = TensorFile.open(tmp_path / "f.safetensors")
    assert opened.read("w").tobytes() == whole.tobytes()
    for box in itertools.product(*(sides(size) for size in whole.shape)):
        read = opened.read("w", box)
        assert read.dtype == whole.dtype and np.array_equal(read, whole[box]), box


def test_scalars_and_empty_tensors_are_read(tmp_path):
    save_file({"scalar": np.array(7.0, np.float32), "empty": np.zeros((0, 3), np.float32)}, tmp_path / "f.safetensors")
    opened = TensorFile.open(tmp_path / "f.safetensors")
    assert opened.read("scalar").shape == () and opened.read("scalar") == 7.0
    assert opened.read("empty").shape == (0, 3)


def test_a_file_is_read_and_never_mapped(tmp_path):
    """Mapped pages count as resident memory: a checkpoint would count twice."""
    folder = save(tmp_path, {}, {"w": np.ones((64, 64), np.float32)})
    with Checkpoint(folder) as checkpoint:
        checkpoint.read("w")
        assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_file_that_shrinks_after_it_was_opened_is_reported(tmp_path):
    folder = save(tmp_path, {}, {"w": np.ones((64, 64), np.float32)})
    checkpoint, file = Checkpoint(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"w cannot be read \(the file ends 100 bytes early\)"):
        checkpoint.read("w")
    file.unlink()
    with pytest.raises(CheckpointError, match="w cannot be read"):
        checkpoint.read("w")


def test_a_dtype_without_an_equal_in_numpy_is_named(tmp_path):
    save_file({"w": np.ones((2, 2), ml_dtypes.float8_e5m2)}, tmp_path / "f.safetensors")
    opened = TensorFile.open(tmp_path / "f.safetensors")
    assert opened.tensors["w"].dtype == "F8_E5M2"
    with pytest.raises(CheckpointError, match=r"w is F8_E5M2; expected one of BF16"):
        opened.read("w")


def test_one_large_matrix_is_loaded_in_parts_that_fit_the_bound(tmp_path):
    """16 MiB, transposed and not, through 1 MiB of host memory."""
    whole = np.arange(4096 * 1024, dtype=np.float32).reshape(4096, 1024)
    checkpoint = Checkpoint(save(tmp_path, {}, {"w": whole}))
    for transpose in (False, True):
        table = [WeightSource(name="w", shape=whole.shape, target="w", transpose=transpose)]
        targets = {"w": jax.ShapeDtypeStruct(whole.T.shape if transpose else whole.shape, jnp.float32)}
        load(checkpoint, table, targets, host_bytes=1 << 20)  # compiles
        tracemalloc.start()
        try:
            loaded = load(checkpoint, table, targets, host_bytes=1 << 20)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 3 << 20, peak
        assert np.array_equal(loaded["w"], whole.T if transpose else whole)
