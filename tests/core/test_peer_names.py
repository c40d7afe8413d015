"""Every name of SGLang's, vLLM's and sgl-jax's servers and engines has one class: served, translated, accepted without
effect, or refused. `data/peer_names.json` has the names, read from the sources of these versions."""

import argparse
import collections
import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from routed_experts import LLM, ConfigError, Engine, ServerArgs
from routed_experts.cli.main import make_parser
from routed_experts.core import peer_names
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.keywords import ENGINE_NAMES, FLAG_NAMES, own_value
from routed_experts.core.peer_names import INVERSES, NO_EFFECT, OTHER_NAMES, REFUSED, SHORT_FLAGS
from routed_experts.engine.build.backends import DEFAULT_BACKENDS

DATA = json.loads((Path(__file__).parent / "data" / "peer_names.json").read_text(encoding="utf-8"))["servers"]
PEERS = {name: " ".join(server["names"]).split() for name, server in DATA.items()}
TRANSLATED = {*INVERSES, *(other for others in OTHER_NAMES.values() for other in others)}


def flags_of(command):
    """Names of the flags of a command."""
    commands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    return {flag[2:].replace("-", "_") for flag in commands[command]._option_string_actions if flag.startswith("--")}


def test_the_lists_are_those_of_whole_servers():
    sizes = {name: len(names) for name, names in PEERS.items()}
    assert sizes["sglang"] > 500 and sizes["vllm"] > 300 and sizes["sgl-jax"] > 150
    assert all(len(set(names)) == len(names) for names in PEERS.values())


@pytest.mark.parametrize("server", PEERS)
def test_every_name_of_a_peer_has_a_class(server):
    served = flags_of("serve") - TRANSLATED
    table = {*FLAG_NAMES.no_effect, *FLAG_NAMES.refused}
    without = [name for name in PEERS[server] if name not in served | table | TRANSLATED]
    assert without == []


def test_no_name_has_two_classes():
    names = [name for group in (*NO_EFFECT, *REFUSED) for name in group.names()]
    names += TRANSLATED
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []


def test_what_is_a_flag_or_a_keyword_of_ours_is_not_in_the_table_as_something_else():
    table = {name for group in (*NO_EFFECT, *REFUSED) for name in group.names()}
    assert table & flags_of("serve") == set(), "move these to SERVER_SETTINGS or IN_PROCESS of core/peer_names.py"
    keywords = {*inspect.signature(Engine.__init__).parameters, *inspect.signature(LLM.__init__).parameters}
    assert table & keywords == set()


def test_the_table_has_no_name_that_no_peer_has():
    """Nothing is invented: what is in the table, a script may carry."""
    known = {name for names in PEERS.values() for name in names}
    assert {name for group in (*NO_EFFECT, *REFUSED) for name in group.names()} - known == set()
    ours = {"tp", "dp", "ep", "no_enable_prefix_caching", "return_routed_experts"}  # abbreviations, and vLLM's --no-
    assert TRANSLATED - known <= ours


def test_translations_lead_to_parameters():
    fields = {field.name for field in dataclasses.fields(ServerArgs) + dataclasses.fields(DistConfig)}
    assert OTHER_NAMES.keys() - fields == {"speculative_draft_model_path"} <= flags_of("serve")
    assert set(INVERSES.values()) <= fields
    for name in SHORT_FLAGS.values():
        assert name in flags_of("serve") or FLAG_NAMES.arity(name) is not None, name


def test_a_backend_of_ours_is_not_replaced_by_the_automatic_choice():
    for field, own in (("attention_backend", DEFAULT_BACKENDS.attention), ("moe_backend", DEFAULT_BACKENDS.moe)):
        assert all(own_value(field, name) == name for name in own)
    assert own_value("attention_backend", "fa") == own_value("moe_backend", "epmoe") == "auto"


@pytest.mark.parametrize("off", [None, False, "none", "None", "null", "", [], {}, "{}", "false", ()])
def test_a_refused_name_is_accepted_where_it_asks_for_nothing(off):
    for name in ENGINE_NAMES.refused:
        assert ENGINE_NAMES.refusal(name, off) is None, name


@pytest.mark.parametrize("value", [True, "something", 12345, "12345", ["x"], {"a": 1}, 1.5])
def test_a_refused_name_is_refused_with_a_value_that_would_have_an_effect(value):
    for name, (group, _) in ENGINE_NAMES.refused.items():
        assert ENGINE_NAMES.refusal(name, value) == group.reason, name


def test_values_that_ask_for_what_is_done_anyway_are_accepted_as_text_and_as_values():
    for name, value in (
        ("pp_size", 1),
        ("pp_size", "1"),
        ("kv_cache_dtype", "auto"),
        ("schedule_policy", "lpm"),
        ("scheduling_policy", "fcfs"),
        ("cpu_offload_gb", 0.0),
        ("disaggregation_mode", "null"),
        ("hf_overrides", "{}"),
    ):
        assert ENGINE_NAMES.refusal(name, value) is None, (name, value)
    for name, value in (("pp_size", 2), ("enable_lora", 1)):
        assert ENGINE_NAMES.refusal(name, value) is not None, (name, value)


def test_reasons_are_short_and_say_what_to_do():
    groups = (*NO_EFFECT, *REFUSED, *peer_names.IN_PROCESS, *peer_names.REQUEST_REFUSED)
    for group in groups:
        assert 10 < len(group.reason) <= 110 and group.reason[-1] != ".", group.reason
        assert group.names(), group.reason
    flags = {f"--{name.replace('_', '-')}" for name in flags_of("serve")}
    named = {
        word.strip("`,;:") for group in groups for word in group.reason.split() if word.strip("`").startswith("--")
    }
    assert named - flags == set()


def test_an_engine_takes_no_name_that_is_refused():
    for name in ("quantization_config", "enable_lora", "pipeline_parallel_size", "kt_num_gpu_experts"):
        with pytest.raises(ConfigError, match=rf"^{name}='x' is refused: "):
            Engine("nowhere", **{name: "x"})
        with pytest.raises(ConfigError, match=rf"^{name}='x' is refused: "):
            LLM("nowhere", **{name: "x"})
