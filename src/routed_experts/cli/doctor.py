"""`routed-experts doctor`: prints versions and devices, and checks capture against replay on them, or with --nnodes the
network of a process group."""

import argparse
import dataclasses
import importlib.metadata
import platform
from typing import Any, cast

import numpy as np

from routed_experts.cli.bootstrap import start_jax, version
from routed_experts.cli.flags import add_dist_flags, dist_args
from routed_experts.cli.group_check import check_group
from routed_experts.core.errors import ConfigError
from routed_experts.models.loading.model_source import DEMO

LIBRARIES = (
    "jax jaxlib flax numpy ml_dtypes safetensors pybase64 tokenizers jinja2 starlette uvicorn httptools msgspec "
    "prometheus_client matplotlib scipy huggingface_hub llguidance"
).split()
TOLERANCE = 1e-3  # of a logprob: programs of other shapes sum in another order


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `doctor`."""
    parser.add_argument(
        "--model",
        default=None,
        metavar="MODEL",
        help="checkpoint folder or Hugging Face id to test with; default: demo, the model of the package",
    )
    add_dist_flags(parser)


def run(options: argparse.Namespace, start_time: float) -> int:
    """Print versions and devices, then test. 0 when every check passed, else 1."""
    print(f"routed-experts {version()} · Python {platform.python_version()} · {platform.system()} {platform.machine()}")
    versions = {name: _installed_version(name) for name in LIBRARIES}
    print(" · ".join(f"{name} {number}" for name, number in versions.items() if number))
    missing = [name for name, number in versions.items() if not number]
    print(f"not installed (optional): {', '.join(missing) or 'none'}")
    dist = dist_args(options)
    if dist.is_group:
        if options.model is not None:
            text = f"--model {options.model} has no effect with --nnodes {dist.nnodes}, which checks the network alone"
            raise ConfigError(f"{text}; leave one of them out")
        return check_group(dist)
    cache = start_jax(default_platform=None)
    import jax

    devices = ", ".join(str(device) for device in jax.devices())
    print(f"devices: {devices} · compiled programs are cached in {cache or 'memory alone'}")
    faults = _self_test(options.model or DEMO)
    print(f"FAILED: {'; '.join(faults)}" if faults else "all checks passed")
    return 1 if faults else 0


def _self_test(model: str) -> list[str]:
    """Generate with capture, then score the same tokens with the captured rows, and with rows of other tokens, which
    must differ."""
    from routed_experts.engine.engine import Engine
    from routed_experts.formats.meta_info import record_from_meta_info

    faults: list[str] = []

    def check(claim: str, *, passed: bool) -> None:
        print(f"{'ok    ' if passed else 'FAILED'} {claim}")
        if not passed:
            faults.append(claim)

    sizes: dict[str, Any] = {"precompile_bs_paddings": (4,), "precompile_token_paddings": (64,)}
    with Engine(model, dtype="float32", enable_return_routed_experts=True, logprobs_mode="raw", **sizes) as engine:
        prompt = list(range(5, 25))
        answer = cast(
            "dict[str, Any]",
            engine.generate(
                input_ids=prompt,
                sampling_params={"temperature": 0.8, "seed": 3, "ignore_eos": True},
                max_new_tokens=24,
                return_logprob=True,
                return_routed_experts=True,
            ),
        )
        record = record_from_meta_info(answer)
        assert record is not None, "rows were asked for"
        tokens = [*prompt, *answer["output_ids"]]
        logprobs = np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        scored = engine.score(tokens, routed=record, return_routed_experts=True)
        executed = scored.routed_experts
        assert executed is not None, "rows were asked for"
        same = np.array_equal(executed.ids[: record.num_rows], record.ids)
        check(f"replayed rows are the captured ones, {record.num_rows} rows", passed=same)
        difference = float(np.abs(scored.logprobs[len(prompt) - 1 :] - logprobs).max())
        check(f"replay gives the engine's logprobs, max difference {difference:.1e}", passed=difference <= TOLERANCE)
        wrong = dataclasses.replace(record, ids=np.roll(record.ids, 1, axis=0))
        shifted = engine.score(tokens, routed=wrong, return_routed_experts=True)
        shifted_difference = float(np.abs(shifted.logprobs[len(prompt) - 1 :] - logprobs).max())
        check(
            f"rows of other tokens are noticed, difference {shifted_difference:.1e}",
            passed=shifted_difference > TOLERANCE,
        )
        violations = engine.check_integrity()
        check(f"the engine is consistent afterwards, {len(violations)} violations", passed=not violations)
    return faults


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
