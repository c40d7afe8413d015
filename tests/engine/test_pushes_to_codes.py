"""Pushes of plain weights to engines whose matrices are codes: names, shapes and dtypes are compared before anything is
quantised, and a refused push changes nothing.

Three engines of the tiny MoE: all matrices are codes; one of three equal layers is plain, and the kernels read no stack
of more than two layers, so that the trainer's blocks are others than those that are served."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts import Engine, WeightsMismatchError
from routed_experts.engine.build.backends import BackendEntry, BackendRegistry
from routed_experts.engine.control.weights import to_state
from routed_experts.execution.compile_count import CompileCount
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.models.decoder.coded_arrays import CodedArray
from routed_experts.models.decoder.decoder import decoder_shapes
from routed_experts.models.model_folder import ModelFolder
from support.engines import assert_idle
from support.quantized_checkpoints import forms, quantize_folder
from support.quantized_families import ENGINE, answers
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

ARRAY_CODE = dict(dtype="float32", moe_backend="tiled", attention_backend="paged", **ENGINE)
CODED, PLAIN = "blocks.1.0.gate_up", "blocks.1.0.input_norm"  # of the layers behind the first one, in every engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("plain"), tokenizer=False)


@pytest.fixture(scope="module")
def plain(folder):
    """What a trainer pushes: plain arrays by dotted name."""
    state = nnx.state(ModelFolder.open(folder).load(jnp.dtype("float32")))
    return {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state)}


def two_layers():
    """Kernels that read the experts of two layers in one stack."""
    kernels = Kernels(moe=MOE_BACKENDS["tiled"], code_formats=frozenset({"e4m3"}))
    return dataclasses.replace(kernels, code_stack_fits=lambda num_bytes: num_bytes <= 2 * 16 * 64 * 64)


@pytest.fixture(
    scope="module",
    params=[pytest.param("all layers", marks=pytest.mark.thorough), "all but one", "two layers a block"],
)
def engine(request, folder, tmp_path_factory):
    served, options = folder, dict(quantization="fp8_block")
    if request.param == "two layers a block":
        options["registry"] = BackendRegistry(moe={"tiled": BackendEntry(load=two_layers)})
    if request.param == "all but one":
        root, form = tmp_path_factory.mktemp("mixed"), forms()["fp8 blocks"]
        form.config["modules_to_not_convert"] = ["model.layers.2"]
        served, options = root / "small", {}
        quantize_folder(folder, served, root / "copy", form, chosen=_is_coded)
    with Engine(str(served), **options, **ARRAY_CODE) as engine:
        blocks = [run.repeats for run in engine.components.served.coded_config.blocks]
        assert blocks == {"all layers": [1, 3], "all but one": [1, 1, 1, 1]}.get(request.param, [1, 2, 1])
        yield engine
        assert_idle(engine)


def _is_coded(name):
    matrix = name.endswith("_proj.weight")
    return matrix and not name.startswith("model.layers.2.")


def without(arrays, name):
    return {key: array for key, array in arrays.items() if key != name}


def deleted(array):
    copy = jnp.copy(array)
    copy.delete()
    return copy


WRONG = {  # a push, and what its refusal says
    "matrix is missing": lambda given: (
        without(given, CODED),
        rf"1 arrays .*{CODED}: nothing for float32\[48, 64, 64\]",
    ),
    "norm is missing": lambda given: (without(given, PLAIN), rf"1 arrays .*{PLAIN}: nothing for float32"),
    "unknown name": lambda given: (given | {"extra": given["norm"]}, r"1 arrays .*extra: float32\[64\] is not in"),
    "unknown block": lambda given: (
        given | {"blocks.9.0.out": given["blocks.1.0.out"]},
        r"1 arrays .*blocks\.9\.0\.out: float32\[3, 64, 64\] is not in the model",
    ),
    "inputs of a matrix": lambda given: (
        given | {CODED: given[CODED][:, :-8]},
        rf"1 arrays .*{CODED}: float32\[48, 56, 64\] for float32\[48, 64, 64\]",
    ),
    "outputs of a matrix": lambda given: (given | {CODED: given[CODED][..., :-8]}, rf"1 arrays .*{CODED}: float32"),
    "shape of a norm": lambda given: (given | {PLAIN: given[PLAIN][:, :-1]}, rf"1 arrays .*{PLAIN}: float32"),
    "integers": lambda given: (given | {CODED: given[CODED].astype(jnp.int32)}, rf"1 arrays .*{CODED}: int32"),
    "a donated matrix": lambda given: (given | {CODED: deleted(given[CODED])}, rf"1 arrays .*{CODED}: a donated"),
    "scales without codes": lambda given: (given | {f"{CODED}_scale": given["norm"]}, rf"{CODED}_scale: float32\[64\]"),
    "nothing": lambda given: ({}, r"arrays differ from the served weights"),
}


def test_a_wrong_push_is_refused_before_anything_is_quantised(engine, plain):
    """Programs count: after the caches are empty, quantising the first array of any push compiles one."""
    engine.update_weights(dict(plain))
    expected, version = answers(engine), engine.get_weight_version()
    pushes = {name: make(plain) for name, make in WRONG.items()}
    jax.clear_caches()
    with contextlib.closing(CompileCount()) as count:
        for name, (push, message) in pushes.items():
            for how in (dict(), dict(copy=True), dict(donate=True)):
                with pytest.raises(WeightsMismatchError, match=message) as caught:
                    engine.update_weights(push, **how)
                assert caught.value.param == "state", name
            assert count.startup == 0, f"{name}: {count.startup} programs were compiled"
        assert not any(array.is_deleted() for array in plain.values())
        assert answers(engine) == expected and engine.get_weight_version() == version
        engine.update_weights({name: array * np.float32(1.25) for name, array in plain.items()})
        assert count.startup > 0 and count.is_complete, "a push that fits is quantised, and its programs are counted"
    assert answers(engine) != expected


def test_a_module_is_quantised_into_blocks_that_are_cut(folder):
    """An engine over a decoder answers as one that quantises the folder."""
    with Engine(str(folder), quantization="fp8_block", **ARRAY_CODE) as engine:
        expected = answers(engine)
    registry = BackendRegistry(moe={"tiled": BackendEntry(load=two_layers)})
    model = ModelFolder.open(folder).load(jnp.dtype("float32"))
    with Engine(model=model, quantization="fp8_block", registry=registry, **ARRAY_CODE) as engine:
        assert [run.repeats for run in engine.components.served.coded_config.blocks] == [1, 2, 1]
        own = answers(engine)
    for (tokens, logprobs, rows), (other_tokens, other_logprobs, other_rows) in zip(own, expected, strict=True):
        assert tokens == other_tokens and rows == other_rows
        pairs = zip(logprobs, other_logprobs, strict=True)
        assert max(abs(value - other) for (value, *_), (other, *_) in pairs) < 2e-5, "the order of sums"


def test_plain_weights_for_codes_of_4_bits_in_other_blocks_are_refused(folder, plain):
    """Of experts that are int4 in the last two layers; an engine needs no such checkpoint to refuse it."""
    config = ModelFolder.open(folder).config
    coded = (CodedArray(name="gate_up", group=32, segments=(32, 32), format="int4"),)
    layers = tuple(dataclasses.replace(layer, coded=coded if n >= 2 else ()) for n, layer in enumerate(config.layers))
    config = dataclasses.replace(config, layers=layers)
    with pytest.raises(
        WeightsMismatchError, match=r"plain numbers for blocks\.2\.0\.gate_up.* codes of 4 bits \(int4\)"
    ):
        to_state(plain, decoder_shapes(config, jnp.dtype("float32")), config)


def test_matrices_may_be_pushed_in_half_precision_where_all_their_layers_are_codes(engine, plain):
    """They are quantised from float32, so both dtypes of the same numbers are the same codes."""
    is_mixed = not all(layer.coded for layer in engine.components.served.config.layers)
    matrices = {name for name, array in plain.items() if array.ndim == 3 and "router" not in name}
    assert {"blocks.0.0.qkv", CODED} < matrices
    halves = {name: plain[name].astype(jnp.bfloat16) for name in matrices}
    engine.update_weights(plain | {name: array.astype(jnp.float32) for name, array in halves.items()})
    expected = answers(engine)
    engine.update_weights(dict(plain))
    assert answers(engine) != expected
    if is_mixed:
        with pytest.raises(WeightsMismatchError, match=r"4 arrays .*blocks\.1\.0\.down: bfloat16.* for float32"):
            engine.update_weights(plain | halves)
        halves |= {name: halves[name].astype(jnp.float32) for name in matrices if name.startswith("blocks.1.")}
    engine.update_weights(plain | halves)
    assert answers(engine) == expected


def served_arrays(engine):
    """Copies of the codes, scales and plain arrays that are served, by dotted name."""
    leaves = nnx.to_flat_state(engine.components.core.runner.state)
    return {".".join(map(str, path)): jnp.copy(leaf.get_raw_value()) for path, leaf in leaves}


WITH_SCALES = {  # a push of plain numbers or of codes, and what its refusal says
    "numbers with all scales": lambda plain, served, scales: (plain | scales, r"arrays of plain numbers come with sca"),
    "numbers with one scale": lambda plain, served, scales: (
        plain | {f"{CODED}_scale": scales[f"{CODED}_scale"]},
        rf"1 arrays .*{CODED}: float32.* with {CODED}_scale: float32\[.*codes of float8_e4m3fn.* leave the scales out",
    ),
    "codes of one array in float32": lambda plain, served, scales: (
        served | {CODED: served[CODED].astype(jnp.float32)},
        rf"1 arrays .*{CODED}: float32.* with {CODED}_scale: float32",
    ),
    "numbers that e4m3 rounds": lambda plain, served, scales: (
        served | {CODED: served[CODED].astype(jnp.float16) * np.float16(1.03)},
        rf"1 arrays .*{CODED}: float16.* with {CODED}_scale: float32",
    ),
    "codes of another form of 8 bits": lambda plain, served, scales: (
        served | {CODED: served[CODED].astype(jnp.float8_e5m2)},
        rf"1 arrays .*{CODED}: float8_e5m2.* for float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("push", WITH_SCALES)
def test_plain_numbers_with_scales_are_refused_before_anything_is_cast(engine, plain, push):
    """Programs count: a cast of the first array of any push compiles one."""
    engine.update_weights(dict(plain), copy=True)
    expected, version, served = answers(engine), engine.get_weight_version(), served_arrays(engine)
    scales = {name: array for name, array in served.items() if name.endswith("_scale")}
    weights, message = WITH_SCALES[push](plain, served, scales)
    jax.clear_caches()
    with contextlib.closing(CompileCount()) as count:
        for how in (dict(), dict(copy=True), dict(donate=True)):
            with pytest.raises(WeightsMismatchError, match=message) as caught:
                engine.update_weights(weights, **how)
            assert caught.value.param == "state"
        assert count.startup == 0, f"{count.startup} programs were compiled"
    assert not any(array.is_deleted() for array in weights.values())
    assert answers(engine) == expected and engine.get_weight_version() == version
    engine.update_weights(served, copy=True)
    assert answers(engine) == expected, "codes of the served dtype are taken"


@pytest.mark.parametrize("value", [-0.5, -0.0])
def test_negative_scales_are_refused_and_compile_nothing(engine, plain, value):
    """As from disk, in arrays of the device and of the host; the check compiles no program for another push."""
    engine.update_weights(dict(plain), copy=True)
    expected, version, served = answers(engine), engine.get_weight_version(), served_arrays(engine)
    scale = f"{CODED}_scale"
    wrong = served | {scale: served[scale].at[0, 0, 0].set(value)}
    with contextlib.closing(CompileCount()) as count:
        for push in (wrong, {name: np.asarray(array) for name, array in wrong.items()}):
            for how in (dict(), dict(copy=True), dict(donate=True)):
                with pytest.raises(WeightsMismatchError, match=rf"1 arrays .*invalid scales: {scale}; expected finite"):
                    engine.update_weights(push, **how)
        warm = count.startup
        engine.update_weights(dict(served), copy=True)
        with pytest.raises(WeightsMismatchError, match="expected finite scales that are not negative"):
            engine.update_weights(wrong, copy=True)
        assert count.startup == warm and count.is_complete
    assert not any(array.is_deleted() for array in wrong.values())
    assert answers(engine) == expected and engine.get_weight_version().label == version.label
