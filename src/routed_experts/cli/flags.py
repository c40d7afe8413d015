"""Flags: those of an engine are made from the fields of ServerArgs, so they cannot drift. Knows no command."""

import argparse
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

from routed_experts.core.errors import ConfigError
from routed_experts.core.expert_offload_config import RESIDENCIES, ExpertOffloadConfig
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.placement_config import ON_EXHAUSTED, PLACEMENT_MODES, PlacementConfig
from routed_experts.core.server_args import ServerArgs

# Other spellings that users of vLLM and SGLang know.
_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tokenizer_path": ("--tokenizer",),
        "context_length": ("--max-model-len",),
        "tp_size": ("--tensor-parallel-size",),
        "max_running_requests": ("--max-num-seqs",),
        "max_prefill_tokens": ("--max-num-batched-tokens",),
        "page_size": ("--block-size",),
        "mem_fraction_static": ("--gpu-memory-utilization",),
        "disable_radix_cache": ("--no-enable-prefix-caching",),
        "random_seed": ("--seed",),
        "enable_return_routed_experts": ("--return-routed-experts",),
    }
)

MODEL_HELP = "checkpoint folder, Hugging Face id (org/name), or demo: the small model of this package"
_PLACEMENT_FLAGS: Mapping[str, str] = MappingProxyType(
    {"plan": "placement", "mode": "placement_mode"}
)  # other names than the field's
_PLACEMENT_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mode": PLACEMENT_MODES, "on_exhausted": ON_EXHAUSTED}
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in two lines, not in a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")


class Refused(argparse.Action):
    """A flag that is known elsewhere and refused here; `const` says why."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        parser.error(str(self.const))


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add one flag a field of ServerArgs; those that are not given leave the field to its default."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(ServerArgs):
        if field.name not in leave_out:
            flags = (f"--{field.name.replace('_', '-')}", *_ALIASES.get(field.name, ()))
            told = "chosen by the engine" if field.default is None else field.default
            group.add_argument(
                *flags, dest=field.name, default=argparse.SUPPRESS, help=f"default: {told}", **taking(field.type)
            )
    group.add_argument(
        "--enable-expert-parallel", action="store_true", default=argparse.SUPPRESS, help="ep_size = tp_size"
    )
    why = "code that a checkpoint brings along is never run; use a model of a supported architecture without it"
    group.add_argument("--trust-remote-code", action=Refused, nargs=0, const=why, help=argparse.SUPPRESS)


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerArgs that were given on the command line."""
    given = vars(options)
    fields = {field.name: given[field.name] for field in dataclasses.fields(ServerArgs) if field.name in given}
    if "enable_expert_parallel" in given:
        fields.setdefault("ep_size", fields.get("tp_size", 1))
    return {
        name: tuple(cast("list[int]", value)) if isinstance(value, list) else value for name, value in fields.items()
    }


def add_expert_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field of ExpertOffloadConfig; `residency` takes a name or the file of a plan."""
    group = parser.add_argument_group("experts on the host")
    for field in dataclasses.fields(ExpertOffloadConfig):
        told = "none" if field.default is None else field.default
        of_plan = {"metavar": "|".join((*RESIDENCIES, "FILE.npz"))}
        taken: dict[str, Any] = of_plan if field.name == "residency" else taking(field.type)
        flag = f"--{field.name.replace('_', '-')}"
        group.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, help=f"default: {told}", **taken)


def expert_args(options: argparse.Namespace) -> ExpertOffloadConfig:
    """How experts are to be shared out; without any of those flags, not at all. Raises ConfigError, and what reading a
    plan raises."""
    given = vars(options)
    fields = {field.name: given[field.name] for field in dataclasses.fields(ExpertOffloadConfig) if field.name in given}
    if str(fields.get("residency", "")).endswith(".npz"):
        fields["residency"] = ResidencyMap.read(fields["residency"])
    return ExpertOffloadConfig(**fields)


def add_placement_flags(parser: argparse.ArgumentParser) -> None:
    """Add --placement, and one flag a further field of PlacementConfig."""
    group = parser.add_argument_group("experts on several devices")
    for field in dataclasses.fields(PlacementConfig):
        flag = f"--{_PLACEMENT_FLAGS.get(field.name, field.name).replace('_', '-')}"
        told: dict[str, Any] = {"help": f"default: {'none' if field.default is None else field.default}"}
        if field.name == "plan":
            told = {"metavar": "FILE.npz", "help": "a plan that `placement --save` wrote; it needs --ep-size"}
        elif field.name in _PLACEMENT_CHOICES:
            told["choices"] = _PLACEMENT_CHOICES[field.name]
        else:
            told |= {"metavar": "X"} if field.name == "capacity_factor" else taking(field.type)
        group.add_argument(flag, dest=f"placement_{field.name}", default=argparse.SUPPRESS, **told)


def placement_args(options: argparse.Namespace) -> PlacementConfig | None:
    """Where experts are to be, the plan read; None without any of those flags. Raises ConfigError, and what reading a
    plan raises."""
    given = vars(options)
    names = [field.name for field in dataclasses.fields(PlacementConfig)]
    fields = {name: given[f"placement_{name}"] for name in names if f"placement_{name}" in given}
    if fields and "plan" not in fields:
        told = ", ".join(f"--{_PLACEMENT_FLAGS.get(name, name).replace('_', '-')}" for name in fields)
        raise ConfigError(
            f"{told} without --placement FILE.npz, the plan that it is about; make one with routed-experts placement --save"
        )
    return PlacementConfig.create(PlacementConfig(**fields)) if fields else None


def taking(kind: object) -> dict[str, Any]:
    """What argparse is told of a field's type."""
    if isinstance(kind, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+", "metavar": "N"}
    assert isinstance(kind, type), kind
    return {"type": cast("Callable[[str], object]", kind), "metavar": {int: "N", float: "X"}.get(kind, "NAME")}
