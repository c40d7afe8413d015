"""The command line: `routed-experts COMMAND`. The only room that reads the environment."""

from routed_experts.cli.bootstrap import LoadBar
from routed_experts.cli.flags import (
    add_engine_flags,
    add_expert_flags,
    add_placement_flags,
    add_speculative_flags,
    engine_args,
    expert_args,
    placement_args,
    speculative_args,
)
from routed_experts.cli.main import main, make_parser

__all__ = [
    "LoadBar",
    "add_engine_flags",
    "add_expert_flags",
    "add_placement_flags",
    "add_speculative_flags",
    "engine_args",
    "expert_args",
    "main",
    "make_parser",
    "placement_args",
    "speculative_args",
]
