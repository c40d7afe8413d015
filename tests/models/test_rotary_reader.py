"""Rotary frequencies from config.json against those that transformers computes from the same config, and what is
refused."""

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary

HEAD_DIM, LENGTH = 16, 256
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
SHORT = [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0]
LONG = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=64, short_factor=SHORT, long_factor=[8.0] * 8
)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, original_max_position_embeddings=64)
SECTIONS = {
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=2.5),
    "dynamic": dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    "yarn": YARN,
    "yarn, not rounded": YARN | dict(truncate=False),
    "yarn, null for rounded": YARN | dict(truncate=None),
    "yarn, other ramp": YARN | dict(beta_fast=20.0, beta_slow=2.0),
    "yarn, magnitude given": YARN | dict(attention_factor=1.3),
    "yarn, two magnitudes": YARN | dict(mscale=0.7, mscale_all_dim=1.1),
    "yarn, one magnitude": YARN | dict(mscale=0.7),
    "yarn, half a head": YARN | dict(partial_rotary_factor=0.5),
    "llama3": LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=4.0),
    "llama3, no ramp, as Llama 4 Scout": LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=1.0),
    "longrope": LONG,
    "longrope, magnitude given": LONG | dict(attention_factor=1.2),
    "longrope, factor given": LONG | dict(factor=2.0),
}


def read(part=1.0, stretched=False, uses_short_mscale=False, **values):
    reader = ConfigReader({"max_position_embeddings": LENGTH, **values}, "config.json")
    return read_rotary(reader, HEAD_DIM, part=part, stretched=stretched, uses_short_mscale=uses_short_mscale)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("spelling", ["new", "old"])
def test_frequencies_and_magnitude_are_those_of_transformers(name, spelling):
    section = SECTIONS[name]
    config = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=dict(section))
    expected, magnitude = ROPE_INIT_FUNCTIONS[section["rope_type"]](config, "cpu")
    if spelling == "new":
        rotary = read(rope_parameters=section)
    else:
        old = {key: value for key, value in section.items() if key not in ("rope_type", "rope_theta")}
        rotary = read(rope_scaling=old | {"type": section["rope_type"]}, rope_theta=section["rope_theta"])
    np.testing.assert_allclose(rotary.spec.inverse, expected.numpy(), rtol=1e-6)
    assert rotary.spec.magnitude == pytest.approx(magnitude, rel=1e-6)
    assert rotary.context_length == {"longrope": 64, "dynamic": LENGTH}.get(section["rope_type"])
    assert (rotary.kind, rotary.theta) == (section["rope_type"], section["rope_theta"])


def test_plain_positions_are_read_from_either_place_and_by_default():
    plain = read(rope_theta=5e5, rope_scaling=None)
    assert (plain.kind, plain.theta) == ("default", 5e5)
    assert read(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}) == plain
    assert read(rope_parameters={"rope_theta": 5e5}, rope_theta=5e5) == plain
    assert read().theta == 1e4
    assert (
        len(read(part=0.5).spec.inverse)
        == len(read(rope_parameters={"partial_rotary_factor": 0.5}).spec.inverse)
        == HEAD_DIM // 4
    )


REFUSED = {
    "unknown kind": (dict(rope_parameters={"rope_type": "ntk"}), ["rope_type='ntk'", "yarn"]),
    "unknown kind, old spelling": (dict(rope_scaling={"type": "su"}), ["type='su'", "yarn"]),
    "two kinds": (
        dict(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}),
        ["type='linear'", "rope_type"],
    ),
    "two sections": (
        dict(rope_scaling={"factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 4.0}),
        ["factor=4.0", "2.0"],
    ),
    "two bases": (
        dict(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
        ["rope_theta=1000000.0", "at the top level"],
    ),
    "a base for some layers": (
        dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        ["full_attention", "all layers"],
    ),
    "base": (dict(rope_theta=0), ["rope_theta=0", "positive"]),
    "linear without a factor": (dict(rope_parameters={"rope_type": "linear"}), ["factor is missing"]),
    "a factor that shrinks": (
        dict(rope_parameters={"rope_type": "dynamic", "factor": 0.5}),
        ["factor=0.5", "at least 1"],
    ),
    "yarn that shrinks": (dict(rope_parameters=YARN | {"factor": 0.5}), ["factor=0.5", "at least 1"]),
    "llama3 without a ramp": (
        dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}),
        ["low_freq_factor is missing"],
    ),
    "a falling ramp": (
        dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0, high_freq_factor=1.0)),
        ["high_freq_factor=1.0"],
    ),
    "a part where heads turn whole": (dict(part=None, partial_rotary_factor=0.5), ["partial_rotary_factor=0.5", "1.0"]),
    "yarn of the base 1": (dict(rope_parameters=YARN | {"rope_theta": 1}), ["rope_theta=1", "above 1"]),
    "yarn of a base below 1": (dict(rope_parameters=YARN | {"rope_theta": 0.5}), ["rope_theta=0.5", "above 1"]),
    "a base of which frequencies are infinite": (dict(rope_theta=1e-300), ["rope_theta=1e-300", "float32"]),
    "a base of which proportional frequencies are infinite": (
        dict(rope_parameters={"rope_type": "proportional", "rope_theta": 1e-300}),
        ["rope_theta=1e-300", "float32"],
    ),
    "fast rotations of 0": (dict(rope_parameters=YARN | {"beta_fast": 0}), ["beta_fast=0", "positive"]),
    "fast rotations below 0": (dict(rope_parameters=YARN | {"beta_fast": -1.0}), ["beta_fast=-1.0", "positive"]),
    "slow rotations of 0": (dict(rope_parameters=YARN | {"beta_slow": 0.0}), ["beta_slow=0.0", "positive"]),
    "slow rotations whose inverse is infinite": (
        dict(rope_parameters=YARN | {"beta_slow": 5e-324}),
        ["beta_slow=5e-324"],
    ),
    "rotations beyond float32": (dict(rope_parameters=YARN | {"beta_fast": 1e308}), ["beta_fast=1e+308"]),
    "yarn beyond float32": (dict(rope_parameters=YARN | {"factor": 1e300}), ["factor=1e+300", "float32"]),
    "linear positions beyond float32": (
        dict(rope_parameters=SECTIONS["linear"] | {"factor": 1e300}),
        ["factor=1e+300", "float32"],
    ),
    "magnitudes beyond float32": (dict(rope_parameters=YARN | {"mscale_all_dim": 1e300}), ["mscale_all_dim=1e+300"]),
    "a magnitude of yarn beyond float32": (
        dict(rope_parameters=YARN | {"attention_factor": 1e300}),
        ["attention_factor=1e+300", "float32"],
    ),
    "a magnitude of yarn below 0": (
        dict(rope_parameters=YARN | {"attention_factor": -1.0}),
        ["attention_factor=-1.0", "at least 0"],
    ),
    "a ratio of magnitudes beyond float32": (
        dict(rope_parameters=YARN | {"factor": 3e38, "mscale": 3e38, "mscale_all_dim": 1e-3}),
        ["mscale=3e+38", "the factor 3e+38"],
    ),
    "a scale of scores beyond float32": (
        dict(rope_parameters=YARN | {"factor": 3e38, "mscale_all_dim": 3e38}),
        ["mscale_all_dim=3e+38", "the factor 3e+38"],
    ),
    "a magnitude of longrope beyond float32": (
        dict(rope_parameters=LONG | {"attention_factor": 1e300}),
        ["attention_factor=1e+300", "float32"],
    ),
    "a magnitude of longrope below 0": (
        dict(rope_parameters=LONG | {"attention_factor": -1.0}),
        ["attention_factor=-1.0", "at least 0"],
    ),
    "a short magnitude beyond float32": (
        dict(uses_short_mscale=True, rope_parameters=LONG | {"short_mscale": 1e300}),
        ["short_mscale=1e+300", "float32"],
    ),
    "a short magnitude below 0": (
        dict(uses_short_mscale=True, rope_parameters=LONG | {"short_mscale": -1.0}),
        ["short_mscale=-1.0", "at least 0"],
    ),
    "a magnitude below 0": (
        dict(rope_parameters=YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}),
        ["mscale=-1.0", "at least 0"],
    ),
    "a ramp beyond float32": (
        dict(rope_parameters=LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=1e300)),
        ["high_freq_factor=1e+300", "float32"],
    ),
    "longrope of one token": (
        dict(rope_parameters=LONG | {"original_max_position_embeddings": 1}),
        ["original_max_position_embeddings=1", "at least 2"],
    ),
    "longrope by 0": (dict(rope_parameters=LONG | {"short_factor": [0.0] * 8}), ["short_factor", "positive"]),
    "longrope beyond float32": (
        dict(rope_parameters=LONG | {"short_factor": [1e300] * 8}),
        ["short_factor", "float32"],
    ),
    "a stretch beyond float32": (
        dict(stretched=True, rope_parameters=SECTIONS["dynamic"] | {"alpha": 1e300}),
        ["alpha=1e+300", "float32"],
    ),
    "a base that a stretch makes infinite": (
        dict(stretched=True, rope_parameters=SECTIONS["dynamic"] | {"rope_theta": 1e300, "alpha": 1e30}),
        ["alpha=1e+30", "rope_theta is finite"],
    ),
    "a base that a stretch makes 0": (
        dict(stretched=True, rope_parameters=SECTIONS["dynamic"] | {"alpha": 1e-300}),
        ["alpha=1e-300", "not 0"],
    ),
    "two trained lengths": (
        dict(rope_scaling=YARN, original_max_position_embeddings=32),
        ["embeddings=64", "32, as at the top level"],
    ),
    "longrope of another head": (dict(rope_parameters=LONG | {"short_factor": [1.0]}), ["short_factor", "8 numbers"]),
    "an odd part": (dict(partial_rotary_factor=0.2), ["partial_rotary_factor=0.2", "head_dim=16"]),
    "more than a head": (dict(partial_rotary_factor=1.5), ["partial_rotary_factor=1.5", "head_dim=16"]),
    "no object": (dict(rope_scaling="yarn"), ["rope_scaling='yarn'", "object"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_positions_that_cannot_be_are_refused_by_name(name):
    values, words = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        read(**values)
    assert all(word in str(caught.value) for word in words), caught.value
