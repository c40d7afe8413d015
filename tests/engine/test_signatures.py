"""Keywords of the entrances are spelled out, and equal the configuration and the request that they fill."""

import dataclasses
import inspect
import types
import typing

import pytest

import routed_experts
from routed_experts import LLM, ConfigError, Engine, ServerArgs
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.speculative_config import SpeculativeConfig

OF_ENGINE_ALONE = {
    "model",
    "registry",
    "on_phase",
    "on_load",
    "load_format",
    "experts",
    "placement",
    "self_check",
    "seed_stream",
    "dist",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "dist_timeout",
    "watchdog_timeout",
}
OF_DRAFTS = "speculative"


def keywords(function):
    parameters = inspect.signature(function).parameters
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def test_the_keywords_of_an_engine_are_the_fields_of_server_args_with_their_defaults():
    params, fields = keywords(Engine.__init__), {field.name: field for field in dataclasses.fields(ServerArgs)}
    params = {name: parameter for name, parameter in params.items() if not name.startswith(OF_DRAFTS)}
    assert params.keys() - OF_ENGINE_ALONE == fields.keys() and params.keys() >= OF_ENGINE_ALONE
    for name, field in fields.items():
        assert params[name].default == field.default, name
    wider = {"model_path", "tokenizer_path", "precompile_bs_paddings", "precompile_token_paddings", "weight_version"}
    for name in fields.keys() - wider:  # these also take a path, a list, or an integer
        assert params[name].annotation == fields[name].type, name


def test_the_keywords_of_drafts_are_fields_of_their_config_that_are_left_out_by_default():
    params = {name: parameter for name, parameter in keywords(Engine.__init__).items() if name.startswith(OF_DRAFTS)}
    assert params.pop(OF_DRAFTS).default is None
    fields = {f"speculative_{field.name}": field for field in dataclasses.fields(SpeculativeConfig)}
    of_config = (
        "bfs",
        "threshold",
        "match_type",
        "trie_depth",
        "branch_length",
        "capacity",
        "suffix",
    )  # no other value, no effect, or not SGLang's
    others = {name for name in fields if any(part in name for part in of_config)}
    assert params.keys() == fields.keys() - others and len(others) == 12
    assert all(parameter.default is None for parameter in params.values())
    for name in others:
        with pytest.raises(ConfigError, match=rf"give it as {name.removeprefix('speculative_')} of speculative="):
            Engine("nowhere", **{name: 1})
    with pytest.raises(ConfigError, match=r"did you mean speculative_num_steps\?"):
        Engine("nowhere", speculative_num_step=3)


@pytest.mark.parametrize("method", [Engine.generate, Engine.async_generate])
def test_the_keywords_of_generate_are_the_fields_of_a_request_with_their_defaults(method):
    params, fields = keywords(method), {field.name: field for field in dataclasses.fields(GenerateReqInput)}
    params["text"] = params.pop("prompt")
    assert params.keys() == fields.keys()
    for name, field in fields.items():
        assert params[name].default == field.default, name


def classes_in(annotation):
    """The classes of this package that a type names."""
    if typing.get_args(annotation):
        return set().union(*map(classes_in, typing.get_args(annotation)))
    is_ours = isinstance(annotation, type) and annotation.__module__.startswith("routed_experts.")
    return {annotation} if is_ours else set()


def test_what_public_methods_return_can_be_imported_from_the_package():
    returned = set()
    for entrance in (Engine, LLM):
        for name, method in vars(entrance).items():
            if isinstance(method, types.FunctionType) and not name.startswith("_") and name != "new_call":
                returned |= classes_in(typing.get_type_hints(inspect.unwrap(method))["return"])
    assert len(returned) > 5
    assert {kind.__name__ for kind in returned} - set(routed_experts.__all__) == set()


def test_an_unknown_keyword_of_llm_names_the_nearest():
    with pytest.raises(ConfigError, match=r"max_num_seq is no parameter of LLM; did you mean max_num_seqs\?"):
        LLM("nowhere", max_num_seq=4)
