"""SpeculativeConfig: what it refuses, by name, value, limit and fix; both dialects."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.core.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(algorithm="NGRAMS"), ["NGRAMS", "NGRAM"]),
        (dict(algorithm=3), ["3", "NGRAM"]),
        (dict(algorithm="x" * 5000), ["(5000 characters)", "NGRAM"]),
        (dict(algorithm="mlp_speculator"), ["mlp_speculator", "not read", "NGRAM"]),
        (dict(algorithm="ngram_gpu"), ["ngram_gpu", "unknown", "NGRAM"]),
        (dict(algorithm="STANDALONE"), ["draft_model_path=None", "STANDALONE", "smaller model of the same vocabulary"]),
        (dict(algorithm="draft_model"), ["draft_model_path=None", "draft_model", "smaller model of the same vocab"]),
        (dict(algorithm="standalone", draft_model_path=3), ["draft_model_path=3", "path"]),
        (dict(algorithm="standalone", draft_model_path="x", num_steps=16), ["num_steps=16", "1..15"]),
        (dict(algorithm="standalone", draft_model_path="x", eagle_layers=(1,)), ["eagle_layers", "is of EAGLE3"]),
        (dict(algorithm="EAGLE3"), ["draft_model_path=None", "EAGLE3", "folder"]),
        (dict(algorithm="NEXTN", draft_model_path="x"), ["draft_model_path='x'", "layers of the model itself"]),
        (dict(algorithm="EAGLE3", draft_model_path=3), ["draft_model_path=3", "path"]),
        (dict(algorithm="NEXTN", num_steps=16), ["num_steps=16", "1..15"]),
        (dict(algorithm="NEXTN", num_draft_tokens=17), ["num_draft_tokens=17", "2..16"]),
        (dict(algorithm="NEXTN", num_steps=3, num_draft_tokens=5), ["num_draft_tokens=5", "num_steps=3", "4"]),
        (dict(eagle_layers=(1, 2)), ["eagle_layers", "is of EAGLE3", "NGRAM"]),
        (dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=5), ["eagle_layers=5", "counted from 0"]),
        (dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=(True, 2)), ["eagle_layers=[True, 2]", "from 0"]),
        (dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers={0: 1}), ["eagle_layers=a dict of 1", "a list"]),
        (dict(eagle_layers=np.array([0, 2])), ["eagle_layers=", "a list"]),
        (dict(scope=np.array([1, 2])), ["scope=", "text"]),
        (dict(scope=["request"]), ["scope=", "request, namespace"]),
        (dict(store_bytes=np.array([1])), ["store_bytes=", "an integer in 1048576"]),
        (dict(num_draft_tokens=4.0), ["num_draft_tokens=4.0 (float)", "an integer in 2..32"]),
        (dict(adaptive={}.keys()), ["adaptive=a dict_keys of 0", "True or False"]),
        (dict(eagle_layers={1: 2}.keys()), ["eagle_layers=a dict_keys of 1", "a list"]),
        (
            dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers={1: 2}.keys()),
            ["eagle_layers=a dict_keys of 1", "a list of layers of the model, counted from 0"],
        ),
        (
            dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=(layer for layer in (1, 2))),
            ["eagle_layers=a generator", "a list of layers of the model, counted from 0"],
        ),
        (
            dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=["1" * 5000]),
            ["(5000 characters)", "counted from 0"],
        ),
        (dict(algorithm="EAGLE3", draft_model_path=["x"]), ["draft_model_path=a list of 1", "the path of a folder"]),
        (dict(draft_model_path=Path("x")), ["draft_model_path='x'", "NGRAM has no draft model"]),
        (dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=()), ["eagle_layers", "counted from 0"]),
        (dict(algorithm="EAGLE3", draft_model_path="x", eagle_layers=(-1,)), ["eagle_layers", "counted from 0"]),
        (dict(scope="all"), ["scope='all'", "request, namespace"]),
        (dict(scope=None), ["scope=None", "request, namespace"]),
        (dict(remember=True), ["remember=True", "scope='namespace'"]),
        (dict(remember=1, scope="namespace"), ["remember=1", "True or False"]),
        (dict(store_bytes=1000), ["store_bytes=1000", "1048576"]),
        (dict(store_bytes=1e9), ["store_bytes=1000000000.0", "1048576"]),
        (dict(suffix_max_tree_depth=12), ["suffix_max_tree_depth=12", "is of SUFFIX", "NGRAM"]),
        (dict(algorithm="suffix", suffix_max_tree_depth=65), ["suffix_max_tree_depth=65", "1..64"]),
        (dict(algorithm="suffix", suffix_max_spec_factor=0), ["suffix_max_spec_factor=0", "above 0"]),
        (dict(algorithm="suffix", suffix_max_spec_factor=float("nan")), ["suffix_max_spec_factor=nan", "above 0"]),
        (dict(algorithm="suffix", suffix_min_token_prob=1.5), ["suffix_min_token_prob=1.5", "0..1"]),
        (dict(algorithm="suffix", suffix_min_token_prob=True), ["suffix_min_token_prob=True", "0..1"]),
        (dict(algorithm="suffix", suffix_max_cached_requests=-1), ["suffix_max_cached_requests=-1", "at least 0"]),
        (dict(algorithm="suffix", draft_model_path="x"), ["draft_model_path='x'", "suffix has no draft model"]),
        *((dict(algorithm=name), [name, "not read", "NGRAM"]) for name in ("MEDUSA", "P-EAGLE", "DFlash", "DSpark")),
        (dict(eagle_topk=2), ["eagle_topk=2", "chains", "1"]),
        (dict(eagle_topk=True), ["eagle_topk=True", "chains"]),
        (dict(eagle_topk=1.0), ["eagle_topk=1.0", "chains"]),
        (dict(ngram_min_bfs_breadth=2), ["ngram_min_bfs_breadth=2", "chains"]),
        (dict(ngram_max_bfs_breadth=8), ["ngram_max_bfs_breadth=8", "chains"]),
        (dict(ngram_match_type="PROB"), ["ngram_match_type='PROB'", "latest", "BFS"]),
        (dict(ngram_match_type=None), ["ngram_match_type=None", "BFS"]),
        (dict(ngram_max_trie_depth=6), ["ngram_max_trie_depth=6", "at least 7", "chains of up to 7"]),
        (dict(ngram_branch_length=2, num_steps=3), ["ngram_branch_length=2", "at least 3"]),
        (dict(ngram_branch_length="18"), ["ngram_branch_length='18'", "at least 7"]),
        (dict(ngram_capacity=0), ["ngram_capacity=0", "at least 1"]),
        (dict(accept_threshold_single=0.9), ["accept_threshold_single=0.9", "1.0"]),
        (dict(accept_threshold_acc=0.5), ["accept_threshold_acc=0.5", "1.0"]),
        (dict(accept_threshold_acc=float("nan")), ["accept_threshold_acc=nan", "1.0"]),
        (dict(accept_threshold_single=True), ["accept_threshold_single=True", "1.0"]),
        (dict(accept_threshold_single="1"), ["accept_threshold_single='1'", "1.0"]),
        (dict(num_draft_tokens=1), ["num_draft_tokens=1", "2..32"]),
        (dict(num_draft_tokens=33), ["num_draft_tokens=33", "2..32"]),
        (dict(num_draft_tokens=True), ["num_draft_tokens=True", "2..32"]),
        (dict(num_draft_tokens="8"), ["num_draft_tokens='8'", "2..32"]),
        (dict(num_steps=0), ["num_steps=0", "1..31"]),
        (dict(num_steps=3, num_draft_tokens=5), ["num_draft_tokens=5", "num_steps=3", "4"]),
        (dict(draft_model_path="x"), ["draft_model_path='x'", "NGRAM has no draft model"]),
        (dict(ngram_min_match_window_size=0), ["min_match_window_size=0", "1..64"]),
        (dict(ngram_max_match_window_size=65), ["max_match_window_size=65", "1..64"]),
        (dict(ngram_min_match_window_size=5, ngram_max_match_window_size=4), ["=5 is above", "=4"]),
        (dict(adaptive=1), ["adaptive=1", "True or False"]),
        *(
            ({"algorithm": name} | fields, [*words, "is of NGRAM and SUFFIX", f"this is {name}", "choose NGRAM or SUF"])
            for name in ("NEXTN", "mtp", "EAGLE")
            for fields, words in (
                (dict(scope="namespace"), ["scope='namespace'"]),
                (dict(scope="namespace", remember=True), ["scope='namespace'"]),
                (dict(remember=True), ["remember=True"]),
                (dict(store_bytes=1 << 20), ["store_bytes=1048576"]),
            )
        ),
        *(
            ({"algorithm": name} | fields, [*words, "is of NGRAM", f"this is {name}", "leave it out, or choose NGRAM"])
            for name in ("NEXTN", "SUFFIX")
            for fields, words in (
                (dict(ngram_max_match_window_size=3), ["ngram_max_match_window_size=3"]),
                (dict(ngram_min_match_window_size=2), ["ngram_min_match_window_size=2"]),
                (dict(ngram_max_trie_depth=19), ["ngram_max_trie_depth=19"]),
                (dict(ngram_branch_length=19), ["ngram_branch_length=19"]),
                (dict(ngram_capacity=5), ["ngram_capacity=5"]),
                (dict(ngram_match_type="PROB"), ["ngram_match_type='PROB'"]),
            )
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(fields, words):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(**fields)
    for word in ("speculative_", *words):
        assert word in str(caught.value), (word, str(caught.value))


@pytest.mark.parametrize("algorithm", ["NGRAM", "SUFFIX", "NEXTN", "EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("field", dataclasses.fields(SpeculativeConfig), ids=lambda field: field.name)
def test_a_value_of_any_type_is_refused_by_the_name_of_its_field(field, algorithm):
    """Iterators, arrays and dicts: none is copied, compared with a default, or shown whole."""
    path = {"draft_model_path": "x"} if algorithm in ("EAGLE3", "STANDALONE") else {}
    for value in ({1: 2}.keys(), iter([1]), np.array([1, 2]), np.array([1]), np.ones(()), {"a": [0] * 5000}, object()):
        with pytest.raises(ConfigError, match=f"^speculative_{field.name}=") as caught:
            SpeculativeConfig(**({"algorithm": algorithm} | path | {field.name: value}))
        assert "; " in str(caught.value) or " must be " in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_the_folder_of_a_draft_model_may_be_a_path(algorithm):
    path = Path("folder") / "head"
    assert SpeculativeConfig(algorithm=algorithm, draft_model_path=path).draft_model_path == path


def test_lengths_by_either_name():
    assert SpeculativeConfig().num_drafts == 7
    assert SpeculativeConfig(num_steps=3).num_drafts == 3
    assert SpeculativeConfig(num_draft_tokens=4).num_drafts == 3
    assert SpeculativeConfig(num_draft_tokens=4, num_steps=3).num_drafts == 3
    assert SpeculativeConfig(algorithm="ngram").num_drafts == 7
    assert SpeculativeConfig(algorithm="NEXTN").num_drafts == 3
    assert SpeculativeConfig(algorithm="eagle", num_steps=5).num_drafts == 5
    assert SpeculativeConfig(algorithm="eagle3", draft_model_path="x", num_draft_tokens=2).num_drafts == 1
    assert SpeculativeConfig(algorithm="standalone", draft_model_path="x").num_drafts == 3


@pytest.mark.parametrize("name", ["NEXTN", "mtp", "deepseek_mtp", "GLM4_MOE_MTP", "EAGLE"])
def test_names_of_prediction_layers(name):
    config = SpeculativeConfig(algorithm=name)
    assert config.has_draft_model and config.draft_model_path is None


def test_vllms_config_is_read_as_a_dict_and_as_json():
    words = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 6}
    for config in (words, json.dumps(words), words | {"rejection_sample_method": "standard"}):
        read = SpeculativeConfig.from_vllm(config)
        assert (read.num_drafts, read.min_window, read.max_window) == (5, 2, 6)
    assert SpeculativeConfig.from_vllm({"method": "ngram"}).num_drafts == 7
    for key in ("prompt_lookup_min", "prompt_lookup_max"):  # one bound is both, as in vLLM
        one_bound = SpeculativeConfig.from_vllm({"method": "ngram", key: 2})
        assert (one_bound.min_window, one_bound.max_window) == (2, 2)


def test_what_sglang_has_for_trees_is_accepted_where_it_means_a_chain():
    tree = dict(ngram_min_bfs_breadth=1, ngram_max_bfs_breadth=1, ngram_match_type="bfs", eagle_topk=1)
    sizes = dict(ngram_branch_length=18, ngram_max_trie_depth=7, ngram_capacity=10_000_000)
    config = SpeculativeConfig(**tree, **sizes, accept_threshold_single=1.0, accept_threshold_acc=1)
    assert (config.num_drafts, config.min_window, config.max_window) == (7, 1, 12)


@pytest.mark.parametrize("algorithm", ["NGRAM", "SUFFIX", "NEXTN", "EAGLE"])
def test_defaults_of_text_are_accepted_with_any_algorithm(algorithm):
    """Command lines of SGLang give them all."""
    tree = dict(ngram_min_bfs_breadth=1, ngram_max_bfs_breadth=1, ngram_match_type="bfs", eagle_topk=1)
    sizes = dict(ngram_min_match_window_size=1, ngram_max_match_window_size=12)
    trie = dict(ngram_branch_length=18, ngram_max_trie_depth=18, ngram_capacity=10_000_000)
    store = dict(scope="request", remember=False, store_bytes=256 << 20)
    suffix = dict(suffix_max_tree_depth=24, suffix_max_spec_factor=1, suffix_min_token_prob=0.1)
    assert SpeculativeConfig(algorithm=algorithm, **tree, **sizes, **trie, **store, **suffix).algorithm == algorithm
    if algorithm == "SUFFIX":
        assert SpeculativeConfig(algorithm=algorithm, num_draft_tokens=32, **trie).num_drafts == 31


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"method": "mtp", "prompt_lookup_max": 3},
            ["prompt_lookup_max=3 of speculative_config is refused", "is of NGRAM, and this is MTP"],
        ),
        (
            {"method": "suffix", "prompt_lookup_min": 2},
            ["prompt_lookup_min=2 of speculative_config is refused", "is of NGRAM"],
        ),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 2},
            ["suffix_decoding_min_token_prob=2 of speculative_config is refused", "in 0..1"],
        ),
        ({"method": "eagle3", "model": "folder", "num_speculative_tokens": 16}, ["num_speculative_tokens=16", "1..15"]),
        ({"method": "mtp", "num_speculative_tokens": 16}, ["num_speculative_tokens=16", "1..15"]),
        ({"method": "ngram", "num_speculative_token": 3}, ["num_speculative_token'", "num_speculative_tokens"]),
        ({"num_speculative_tokens": 3}, ["no method", "ngram"]),
        ({"method": "medusa"}, ["MEDUSA", "NGRAM"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1..31"]),
        ({"method": "ngram", "num_speculative_tokens": "3"}, ["num_speculative_tokens='3'", "1..31"]),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size=2", "tp_size=1"]),
        ({"method": "ngram", "rejection_sample_method": "typical"}, ["typical", "standard"]),
        ({"method": "ngram", "prompt_lookup_min": 0}, ["prompt_lookup_min=0", "1..64"]),
        ({"method": "ngram", "prompt_lookup_max": "3"}, ["prompt_lookup_max='3'", "1..64"]),
        ({"method": "ngram", "prompt_lookup_min": True}, ["prompt_lookup_min=True", "1..64"]),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            ["prompt_lookup_min=5 is above prompt_lookup_max=4"],
        ),
        ({"method": ["ngram"]}, ["a list of 1", "NGRAM"]),
        *(
            ({"method": method, name: np.array([1, 2])}, [f"{field}=a ndarray of 2"])
            for method, name, field in (
                ("ngram", "num_speculative_tokens", "num_speculative_tokens"),
                ("ngram", "draft_tensor_parallel_size", "draft_tensor_parallel_size"),
                ("ngram", "rejection_sample_method", "rejection_sample_method"),
                ("ngram", "model", "draft_model_path"),
                ("suffix", "suffix_decoding_max_cached_requests", "suffix_max_cached_requests"),
            )
        ),
        ({}, ["no method", "ngram"]),
        ({"method": "eagle3"}, ["speculative_config has no model", "folder"]),
        ({"method": "draft_model"}, ["speculative_config has no model", "smaller model of the same vocabulary"]),
        ({"method": "ngram", "model": "folder"}, ["model='folder'", "NGRAM has no draft model"]),
        ({"model": "folder"}, ["no method", "ngram"]),
        ("{method: ngram}", ["no JSON"]),
        ("[" * 100_000, ["no JSON", "(100000 characters)"]),
        ("[1]", ["must be a dict"]),
    ],
)
def test_vllms_config_is_refused_by_key_and_value(config, words):
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_vllm(config)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_one_way_to_say_it():
    config, vllm = SpeculativeConfig(), {"method": "ngram"}
    assert SpeculativeConfig.create(None, {"algorithm": None}) is None
    assert SpeculativeConfig.create(config, {"algorithm": None}) is config
    assert SpeculativeConfig.create(None, {"algorithm": "ngram", "num_draft_tokens": 4}).num_drafts == 3
    assert SpeculativeConfig.create(None, {}, vllm) == SpeculativeConfig.from_vllm(vllm)
    flat = {"algorithm": "NGRAM"}
    for ways in ((config, flat, None), (config, {}, vllm), (None, flat, vllm), (None, flat, {}), (config, {}, {})):
        with pytest.raises(ConfigError, match="in two ways; give one of them"):
            SpeculativeConfig.create(*ways)
    for other in ("NGRAM", True, {"method": "ngram"}):
        with pytest.raises(ConfigError, match="must be a SpeculativeConfig; give"):
            SpeculativeConfig.create(other, {})
    with pytest.raises(ConfigError, match="speculative_num_steps without speculative_algorithm"):
        SpeculativeConfig.create(None, {"num_steps": 3})


def test_vllms_suffix_decoding_is_read_and_remembers_where_it_asks_for_that():
    words = {
        "method": "suffix",
        "num_speculative_tokens": 5,
        "suffix_decoding_max_tree_depth": 20,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.2,
    }
    read = SpeculativeConfig.from_vllm(words)
    assert (read.num_drafts, read.min_window, read.max_window) == (5, 1, 20)
    assert (read.suffix_max_spec_factor, read.suffix_min_token_prob) == (2.0, 0.2)
    assert (read.counts_continuations, read.shares_answers, read.remember) == (True, False, False)
    for most, remembers in ((0, False), (100, True)):
        read = SpeculativeConfig.from_vllm(words | {"suffix_decoding_max_cached_requests": most})
        assert (read.suffix_max_cached_requests, read.shares_answers, read.remember) == (most, remembers, remembers)
    with pytest.raises(ConfigError, match="suffix_max_tree_depth=20 is of SUFFIX"):
        SpeculativeConfig.from_vllm({"method": "ngram", "suffix_decoding_max_tree_depth": 20})


def test_vllms_draft_models_are_read():
    read = SpeculativeConfig.from_vllm({"method": "eagle3", "model": "folder", "num_speculative_tokens": 4})
    assert (read.algorithm, read.draft_model_path, read.num_drafts) == ("EAGLE3", "folder", 4)
    read = SpeculativeConfig.from_vllm({"method": "deepseek_mtp", "num_speculative_tokens": 1})
    assert (read.has_draft_model, read.draft_model_path, read.num_drafts) == (True, None, 1)
    read = SpeculativeConfig.from_vllm({"method": "draft_model", "model": "folder"})
    assert (read.is_standalone, read.has_draft_model, read.draft_model_path, read.num_drafts) == (
        True,
        True,
        "folder",
        3,
    )
    assert not SpeculativeConfig(algorithm="EAGLE").is_standalone
