"""A model that does not fit is refused before a weight is loaded; with the values of the error, it serves."""

import gc

import jax
import pytest

import routed_experts
from routed_experts.cli import main, make_parser
from routed_experts.core.errors import MemoryPlanError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.execution.memory_plan import device_bytes
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

SIZES = {"precompile_bs_paddings": (1, 2), "precompile_token_paddings": (8,), "context_length": 512, "page_size": 16}
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


def refused(folder, **kwargs):
    gc.collect()  # what other tests left may go at any time
    loaded, alive = [], len(jax.live_arrays())
    with pytest.raises(MemoryPlanError) as excinfo:
        routed_experts.Engine(folder, on_load=lambda *bytes_: loaded.append(bytes_), **kwargs)
    gc.collect()
    assert not loaded and len(jax.live_arrays()) <= alive, (
        "nothing is loaded or allocated before the plan is known to fit"
    )
    return excinfo.value


def test_it_serves_with_the_values_that_the_error_gives(folder):
    fraction = 1.2 * MIB / device_bytes()  # the weights take 1.1 MiB
    ways = refused(folder, **SIZES, mem_fraction_static=fraction).ways
    contexts = [way for way in ways if "context_length" in way]
    for way in [
        *contexts,
        {"mem_fraction_static": next(way["mem_fraction_static"] for way in ways if "mem_fraction_static" in way)},
    ]:
        kwargs = SIZES | {"mem_fraction_static": fraction} | way
        with routed_experts.Engine(folder, **kwargs, enable_return_routed_experts=True) as engine:
            out = engine.generate(input_ids=[5, 6, 7], max_new_tokens=2, return_routed_experts=True)
            assert len(out["output_ids"]) >= 1 and any(line.startswith("weights") for line in engine.memory_plan)


@pytest.mark.parametrize("kwargs", [{"max_total_tokens": 10**13}, {"mem_fraction_static": 1e-9}])
def test_inspect_gives_the_error_of_an_engine(folder, kwargs, capsys):
    error = refused(folder, **SIZES, **kwargs)
    with pytest.raises(MemoryPlanError) as excinfo:
        inspect_model(ServerArgs(model_path=folder, **SIZES, **kwargs))
    assert str(excinfo.value) == str(error) and "above the limit of" in str(error) and "it fits with" in str(error)
    flags: list[str] = []
    for name, value in (SIZES | kwargs).items():
        flags += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    assert main(["inspect", folder, *flags]) == 1
    out, err = capsys.readouterr()
    text = make_parser().command_parser("inspect").name_flags(str(error))
    assert "--mem-fraction-static" in text and out == "" and text in err and err.count("\n") == 1
