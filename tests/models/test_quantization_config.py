"""Which modules a config.json quantises, and how: what checkpoints say in other words than those of the tests that load
some."""

import pytest

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.quantization_config import QuantizationConfig

FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
TENSOR, CHANNEL = (FLOATS | {"strategy": strategy} for strategy in ("tensor", "channel"))
DOWN = "model.layers.0.mlp.down_proj"


def read(**section):
    return QuantizationConfig.read(".", {"quantization_config": section})


def compressed(**groups):
    named = {name: {"targets": targets, "weights": weights} for name, (targets, weights) in groups.items()}
    return read(quant_method="compressed-tensors", format="float-quantized", config_groups=named)


@pytest.mark.parametrize("targets", [[DOWN], ["re:.*_proj$"]])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_name_or_an_expression_counts_before_the_class(targets, is_first):
    groups = [("of_class", (["Linear"], TENSOR)), ("narrow", (targets, CHANNEL))]
    config = compressed(**dict(groups[::-1] if is_first else groups))
    assert (config.storage(DOWN).rows, config.storage("model.layers.0.mlp.gate").rows) == (1, 0)


def test_a_name_counts_before_an_expression():
    config = compressed(expressions=(["re:.*proj"], TENSOR), names=([DOWN], CHANNEL))
    assert config.storage(DOWN).rows == 1


def test_groups_of_activations_alone_say_nothing_of_weights():
    config = compressed(activations=(["re:.*self_attn$"], None), weights=(["Linear"], CHANNEL))
    assert [group.name for group in config.groups] == ["weights"]
    with pytest.raises(CheckpointError, match="at least one group"):
        compressed(activations=(["Linear"], None))


def test_keys_and_values_of_fp8_checkpoints():
    """The scheme changes no weight. Static scales are read; dynamic ones are not in the file."""
    for scheme in ("static", "dynamic", None):
        config = read(quant_method="fp8", activation_scheme="static", kv_cache_scheme=scheme)
        assert config.storage(DOWN).rows == 0
        if scheme == "dynamic":
            with pytest.raises(CheckpointError, match="dynamic"):
                config.check_kv_codes()
        else:
            config.check_kv_codes()
    with pytest.raises(CheckpointError, match="kv_cache_scheme"):
        read(quant_method="fp8", kv_cache_scheme="other")
