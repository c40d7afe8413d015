"""Dense decoders: Llama, Mistral, Qwen2, Qwen3. They run without capture; an engine with capture on refuses
them."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense
from routed_experts.models.families.common_config import read_sizes, read_window, read_windows, refuse


def read_llama(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Llama; a sliding window belongs to another architecture."""
    config = _read_llama(reader, slides=False)
    reader.require(
        not reader.has("sliding_window"), "sliding_window", "none: layers of LlamaForCausalLM see all tokens"
    )
    return config


def read_mistral(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Mistral, whose window is 4096 tokens where the file has no such field, and
    none where it is null."""
    return _read_llama(reader.with_default("sliding_window", 4096), slides=True)


def _read_llama(reader: ConfigReader, *, slides: bool) -> FamilyConfig:
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    sizes = sizes.within(rotary)
    refuse(reader, "mlp_bias")
    bias, window = reader.bool("attention_bias", default=False), read_window(reader) if slides else 0
    attention = dataclasses.replace(sizes.attention(rotary.spec), bias_in=bias, bias_out=bias, window=window)
    layer = LayerSpec(mixer=attention, feed=Dense(width=reader.int("intermediate_size", minimum=1)))
    return sizes.decoder([layer] * sizes.num_layers)


def read_qwen2(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen2: biases on queries, keys and values."""
    return _read_qwen(reader, qk_norm="", bias=True)


def read_qwen3(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3: a norm on each head's queries and keys."""
    return _read_qwen(reader, qk_norm="head", bias=False)


def _read_qwen(reader: ConfigReader, *, qk_norm: str, bias: bool) -> FamilyConfig:
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    sizes = sizes.within(rotary)
    refuse(reader, "attention_bias")
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm=qk_norm, bias_in=bias)
    feed = Dense(width=reader.int("intermediate_size", minimum=1))
    return sizes.decoder(
        [
            LayerSpec(mixer=dataclasses.replace(attention, window=window), feed=feed)
            for window in read_windows(reader, sizes)
        ]
    )
