"""TPU experts, interpreted, against a NumPy loop over tokens and slots; experts of other layers are NaN, or have scales
of NaN. Plans against counting."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.tpu.test_linear import values_of
from routed_experts.core.errors import ConfigError
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.quantized import CODE_DTYPES, QuantizedWeight
from routed_experts.layers.tpu.experts import FEW_ROWS, few_rows_experts, fused_experts, sorted_experts
from routed_experts.layers.tpu.group_metadata import BEGIN, END, EXPERT, TILE, TOKEN_TILE, PlanForm, grid_steps

pytestmark = pytest.mark.usefixtures("fast_compilation")

PATHS = {"few rows": few_rows_experts, "sorted": sorted_experts}
RUN = {name: jax.jit(functools.partial(path, interpret=True)) for name, path in PATHS.items()}
EXACT = 2e-5  # float32 against float64


def random_call(seed, shape, *, ids=None, valid=None, layers=2, layer=1, biased=False, activation="silu"):
    """A call of shape (N, K, E, D, F)."""
    num_rows, top_k, experts, dim, width = shape
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(num_rows)]) if ids is None else ids
    gate_up = np.full((layers * experts, dim, 2 * width), np.nan, np.float32)
    down = np.full((layers * experts, width, dim), np.nan, np.float32)
    own = slice(layer * experts, (layer + 1) * experts)
    gate_up[own] = rng.standard_normal((experts, dim, 2 * width)) / dim**0.5
    down[own] = rng.standard_normal((experts, width, dim)) / width**0.5
    biases = np.full((layers * experts, 2 * width + dim), np.nan, np.float32)
    biases[own] = 3 * rng.standard_normal((experts, 2 * width + dim))  # some gates are beyond the clamp
    return ExpertCall(
        x=jnp.asarray(rng.standard_normal((num_rows, dim)), jnp.float32),
        ids=jnp.asarray(ids, jnp.int32),
        weights=jnp.asarray(rng.random((num_rows, top_k)), jnp.float32),
        valid=jnp.asarray(rng.random(num_rows) < 0.7 if valid is None else valid),
        gate_up=jnp.asarray(gate_up),
        down=jnp.asarray(down),
        first_expert=jnp.asarray(layer * experts, jnp.int32),
        num_experts=experts,
        gate_up_bias=jnp.asarray(biases[:, : 2 * width]) if biased else None,
        down_bias=jnp.asarray(biases[:, 2 * width :]) if biased else None,
        activation=activation,
    )


def coded(weights, group, rng, form="e4m3"):
    """Codes and scales for matrices: scales of NaN where these are. Scales are large and small, negative ones too.
    Codes of 8 bits are near the numbers; those of 4 bits are any."""
    (stack, inputs, outputs), num_groups = weights.shape, -(-weights.shape[1] // group)
    scales = 2.0 ** rng.uniform(-3, 3, (stack, num_groups, outputs)) * rng.choice([-1, 1], (stack, num_groups, outputs))
    scales[np.isnan(weights).any(axis=(1, 2))] = np.nan
    if form == "e4m3":
        spread = np.repeat(scales, group, axis=1)[:, :inputs]
        codes = jnp.asarray(np.asarray(weights) / spread * rng.uniform(0.1, 4), jnp.float8_e4m3fn)
    else:
        codes = jnp.asarray(rng.integers(0, 256, (stack, inputs // 2, outputs), np.uint8).view(CODE_DTYPES[form]))
        scales /= 4 * inputs**0.5
    return QuantizedWeight(codes=codes, scales=jnp.asarray(scales, jnp.float32), group=group, format=form)


def with_codes(call, group, *, down_group=None, forms=("e4m3", "e4m3")):
    rng = np.random.default_rng(group)
    gate_up, down = coded(call.gate_up, group, rng, forms[0]), coded(call.down, down_group or group, rng, forms[1])
    return dataclasses.replace(call, gate_up=gate_up, down=down)


def numbers(weights):
    """float64; those of codes by the definition."""
    if not isinstance(weights, QuantizedWeight):
        return np.asarray(weights, np.float64)
    scales = np.repeat(np.asarray(weights.scales, np.float64), weights.group, axis=1)
    return values_of(weights.codes, weights.format) * scales[:, : weights.shape[1]]


def loop(call):
    """The oracle: one row and one slot at a time, in float64."""
    x, weights, gate_up, down = (numbers(array) for array in (call.x, call.weights, call.gate_up, call.down))
    gate_up_bias, down_bias = (
        np.zeros((len(gate_up), 1)) if bias is None else np.asarray(bias, np.float64)
        for bias in (call.gate_up_bias, call.down_bias)
    )
    y, width = np.zeros_like(x), down.shape[1]
    for n in np.flatnonzero(call.valid):
        for k, expert in enumerate(np.asarray(call.ids)[n] + int(call.first_expert)):
            mixed = x[n] @ gate_up[expert] + gate_up_bias[expert]
            gate, up = mixed[:width], mixed[width:]
            if call.activation == "tanh gelu":
                hidden = gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            elif call.activation == "clamped swiglu":
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            else:
                hidden = gate / (1 + np.exp(-gate)) * up
            y[n] += weights[n, k] * (hidden @ down[expert] + down_bias[expert])
    return y


def with_rows(call, **arrays):
    return dataclasses.replace(
        call, **{name: jnp.asarray(array, vars(call)[name].dtype) for name, array in arrays.items()}
    )


STANDARD = (24, 3, 10, 8, 4)  # N, K, E, D, F; one shape compiles once a path
SHAPES = {
    "one row": (1, 1, 3, 8, 4),
    "prime": (37, 3, 11, 13, 7),
    "seven of 257": (9, 7, 257, 6, 2),
    "tiles of one expert and experts of one tile": (150, 8, 9, 8, 128),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_experts_equal_the_loop(path, shape):
    call = random_call(0, shape)
    out = RUN[path](call)
    np.testing.assert_allclose(out, loop(call), atol=EXACT)
    assert not np.any(np.asarray(out)[~np.asarray(call.valid)])


@pytest.mark.parametrize("path", PATHS)
def test_an_expert_in_parts_equals_the_loop(path):
    call = random_call(1, (40, 4, 5, 8, 384))
    cut = functools.partial(PATHS[path], weight_bytes=3 * 8 * 4 * 128, interpret=True)
    np.testing.assert_allclose(jax.jit(cut)(call), loop(call), atol=EXACT)


# Width and bytes of an expert's part: whole; columns of gate and up in pairs; in turn, the last columns ragged
CUTS = {"whole": (24, 1 << 20), "in pairs": (384, 3 * 8 * 4 * 128), "in turn": (240, 8 * 4 * 300)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("width", "weight_bytes"), CUTS.values(), ids=CUTS)
def test_biased_experts_with_clamps_equal_the_loop_however_they_are_cut(path, width, weight_bytes):
    call = random_call(9, (40, 4, 10, 8, width), biased=True, activation="clamped swiglu")
    cut = functools.partial(PATHS[path], weight_bytes=weight_bytes, interpret=True)
    np.testing.assert_allclose(jax.jit(cut)(call), loop(call), atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("which", ["biased", "clamped swiglu", "tanh gelu"])
def test_biases_and_activations_are_apart_from_each_other_and_round_as_the_dtype(path, which):
    call = random_call(
        10,
        (21, 4, 8, 16, 24),
        biased=which == "biased",
        activation="silu" if which == "biased" else which,
    )
    names = [name for name in ("x", "gate_up", "down", "gate_up_bias", "down_bias") if getattr(call, name) is not None]
    low = dataclasses.replace(call, **{name: vars(call)[name].astype(jnp.bfloat16) for name in names})
    for made, atol in ((call, 1e-4), (low, 0.3)):
        out = jax.jit(functools.partial(PATHS[path], interpret=True))(made)
        assert out.dtype == made.x.dtype
        np.testing.assert_allclose(np.asarray(out, np.float64), loop(made), atol=atol)


def test_a_step_of_many_rows_is_sorted_and_one_of_few_is_not():
    for num_rows, path in ((FEW_ROWS, "few rows"), (FEW_ROWS + 1, "sorted")):
        call = random_call(2, (num_rows, 2, 6, 8, 4))
        out = jax.jit(functools.partial(fused_experts, interpret=True))(call)
        assert np.array_equal(out, RUN[path](call))
        np.testing.assert_allclose(out, loop(call), atol=EXACT)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("hot", [0, 9])
def test_one_hot_expert_and_nine_empty_ones(path, hot):
    call = random_call(3, STANDARD, ids=np.full((24, 3), hot))
    np.testing.assert_allclose(RUN[path](call), loop(call), atol=EXACT)


@pytest.mark.parametrize("path", PATHS)
def test_first_and_last_experts_are_empty(path):
    call = random_call(4, STANDARD, ids=np.random.default_rng(4).permuted(np.tile([3, 4, 6], (24, 1)), axis=1))
    np.testing.assert_allclose(RUN[path](call), loop(call), atol=EXACT)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_valid", [0, 1, 24])
def test_padding_rows_are_zero_and_need_no_expert(path, num_valid):
    call = random_call(5, STANDARD, valid=np.arange(24) < num_valid)
    np.testing.assert_allclose(RUN[path](call), loop(call), atol=EXACT)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_nan_in_padding_rows_reaches_no_valid_row(path, poison):
    call = random_call(6, STANDARD)
    valid = np.asarray(call.valid)
    x, weights = np.array(call.x), np.array(call.weights)
    x[~valid], weights[~valid] = poison, poison
    assert np.array_equal(RUN[path](with_rows(call, x=x, weights=weights)), RUN[path](call))


@pytest.mark.parametrize("path", PATHS)
def test_a_row_of_nan_stays_alone_and_an_expert_of_nan_reaches_only_its_own_rows(path):
    call = random_call(7, STANDARD, valid=np.ones(24, bool))
    x, gate_up = np.array(call.x), np.array(call.gate_up)
    x[11], gate_up[int(call.first_expert) + 6] = np.nan, np.nan
    out = np.asarray(RUN[path](with_rows(call, x=x, gate_up=gate_up)))
    hit = np.any(np.asarray(call.ids) == 6, axis=1) | (np.arange(24) == 11)
    assert np.all(np.isnan(out[hit])) and 0 < hit.sum() < 24
    np.testing.assert_allclose(out[~hit], loop(call)[~hit], atol=EXACT)


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_keeps_its_dtype(path):
    call = random_call(8, (21, 4, 8, 16, 8))
    low = dataclasses.replace(
        call, **{name: vars(call)[name].astype(jnp.bfloat16) for name in ("x", "gate_up", "down")}
    )
    out = RUN[path](low)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), loop(low), atol=0.05)


def expected_visits(keys, num_experts, tile):
    """The oracle of a plan: (expert, tile, first place, end) in order, by counting."""
    visits, at = [], 0
    for expert in range(num_experts):
        count = int(np.sum(keys == expert))
        if count and not tile:
            visits.append((expert, 0, at, at + count))
        if count and tile:
            visits += [(expert, index, at, at + count) for index in range(at // tile, (at + count - 1) // tile + 1)]
        at += count
    return visits


@pytest.mark.parametrize("tile", [0, 16])
@pytest.mark.parametrize("shape", [(1, 1, 3), (39, 3, 8), (TOKEN_TILE + 5, 2, 60)], ids=str)
def test_a_plan_lists_every_expert_with_rows_on_each_tile_that_holds_them(shape, tile):
    num_tokens, top_k, experts = shape
    rng = np.random.default_rng(num_tokens)
    most = experts + (-(-num_tokens * top_k // tile) if tile else 0)
    form = PlanForm(num_experts=experts, max_visits=most, tile=tile)
    run = jax.jit(functools.partial(grid_steps, form=form, interpret=True))
    for chosen, share in ((experts, 0.8), (1, 0.3), (experts, 0.0)):
        ids, valid = rng.integers(0, chosen, (top_k, num_tokens)).astype(np.int32), rng.random((1, num_tokens)) < share
        plan, total = run(jnp.asarray(ids), jnp.asarray(valid.astype(np.int32)))
        expected = expected_visits(np.where(valid, ids, -1), experts, tile)
        assert total == max(1, len(expected))
        assert [
            tuple(map(int, column)) for column in np.asarray(plan)[[EXPERT, TILE, BEGIN, END], : len(expected)].T
        ] == expected
        assert expected or not np.any(plan[jnp.asarray([BEGIN, END])])


def test_experts_that_fit_no_memory_and_cannot_be_cut_are_refused():
    abstract = {
        "x": (4, 4096),
        "ids": (4, 2),
        "weights": (4, 2),
        "valid": (4,),
        "gate_up": (8, 4096, 4008),
        "down": (8, 2004, 4096),
    }
    dtypes = {"ids": jnp.int32, "valid": jnp.bool_}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.bfloat16)) for name, shape in abstract.items()}
    call = ExpertCall(**arrays, first_expert=jax.ShapeDtypeStruct((), jnp.int32), num_experts=8)
    with pytest.raises(ConfigError, match=r"4096 by 2004.*no multiple of 16.*choose moe_backend='tiled'"):
        jax.eval_shape(fused_experts, call)


# Path; N, K, E, D, F; group; bytes of an expert's part: 1 for the smallest parts
CODED = {
    "whole, short groups": ("few rows", (21, 3, 7, 200, 24), 128, 1 << 20),
    "whole, groups of a chunk and a rest": ("sorted", (150, 2, 5, 300, 72), 16, 1 << 20),
    "whole, one row, many groups": ("few rows", (1, 2, 5, 8, 576), 64, 1 << 20),
    "in pairs": ("few rows", (40, 4, 5, 136, 384), 64, 1),
    "in pairs, sorted": ("sorted", (40, 4, 5, 136, 256), 32, 1),
    "in turn, evenly": ("sorted", (40, 4, 5, 40, 288), 32, 1),
    "in turn, rows short of a part": ("few rows", (40, 4, 5, 40, 240), 32, 1),
    "in turn, the last group short": ("sorted", (40, 4, 5, 40, 300), 128, 1),
    "in turn, two groups a part": ("few rows", (40, 4, 5, 40, 240), 16, 1),
}
OF_4_BITS_TOO = "in pairs, sorted", "in turn, evenly", "in turn, rows short of a part"  # cut alike, in every run


def cases_of(cases, in_scripts_thorough):
    return [
        pytest.param(*values, id=name, marks=pytest.mark.thorough if name in in_scripts_thorough else [])
        for name, values in cases.items()
    ]


@pytest.mark.parametrize(("path", "shape", "group", "weight_bytes"), cases_of(CODED, OF_4_BITS_TOO))
def test_experts_of_codes_equal_the_loop_however_they_are_cut(path, shape, group, weight_bytes):
    call = with_codes(random_call(11, shape, biased=shape[-1] % 128 != 0), group)
    run = functools.partial(PATHS[path], weight_bytes=weight_bytes, interpret=True)
    out, expected = jax.jit(run)(call), loop(call)
    np.testing.assert_allclose(out, expected, atol=EXACT * np.abs(expected).max())


def with_powers_of_two(call):
    """The same with the next lower power of two in place of each scale; NaN stays."""
    scales = {name: jnp.exp2(jnp.floor(jnp.log2(jnp.abs(vars(call)[name].scales)))) for name in ("gate_up", "down")}
    parts = {name: dataclasses.replace(vars(call)[name], scales=scales[name]) for name in scales}
    return dataclasses.replace(call, **parts)


# A tile of bytes is 64 inputs of codes of 4 bits. The format of gate and up, and of down, and the rest as in CODED
HALVES = {
    "whole, inputs that end in a tile": ("int4", "int4", "few rows", (21, 3, 7, 160, 24), 32, 1 << 20),
    "whole, groups that end in a tile": ("e2m1", "e2m1", "sorted", (150, 2, 5, 192, 72), 16, 1 << 20),
    "whole, one row, many groups": ("e2m1", "int4", "few rows", (1, 2, 5, 8, 1408), 64, 1 << 20),
    "in pairs": ("int4", "int4", "few rows", (40, 4, 5, 136, 384), 128, 1),
    "in pairs, sorted": ("e2m1", "e2m1", "sorted", (40, 4, 5, 136, 256), 32, 1),
    "in turn, evenly": ("e2m1", "e2m1", "sorted", (40, 4, 5, 40, 320), 32, 1),
    "in turn, rows short of a part": ("int4", "int4", "few rows", (40, 4, 5, 40, 240), 32, 1),
    "in turn, the last group short": ("int4", "e2m1", "sorted", (40, 4, 5, 40, 300), 128, 1),
    "in turn, four groups a part": ("e2m1", "e4m3", "few rows", (40, 4, 5, 40, 160), 16, 1),
    "in turn, of codes of 8 bits and 4": ("e4m3", "int4", "few rows", (40, 4, 5, 40, 160), 16, 1),
}
# Others are whole, or in pairs, too, or cut as codes of 8 bits are.
LONG = "whole, groups that end in a tile", "whole, one row, many groups", "in pairs", "in turn, the last group short"


@pytest.mark.parametrize(("gate_up", "down", "path", "shape", "group", "weight_bytes"), cases_of(HALVES, LONG))
def test_experts_of_codes_of_4_bits_equal_the_loop_however_they_are_cut(
    gate_up, down, path, shape, group, weight_bytes
):
    biased = shape[-1] % 128 != 0
    activation = "clamped swiglu" if biased else "silu"
    call = with_codes(random_call(15, shape, biased=biased, activation=activation), group, forms=(gate_up, down))
    run = jax.jit(functools.partial(PATHS[path], weight_bytes=weight_bytes, interpret=True))
    calls = [call, with_powers_of_two(call)] if "e2m1" in (gate_up, down) else [call]
    for made in calls:
        out, expected = run(made), loop(made)
        assert np.abs(expected).max() > 1e-2
        np.testing.assert_allclose(out, expected, atol=EXACT * np.abs(expected).max())


BESIDE = {
    "both": ("clamped swiglu", ("gate_up", "down")),
    "down": ("tanh gelu", ("down",)),
    "gate and up": ("silu", ("gate_up",)),
}


@pytest.mark.parametrize(
    ("form", "activation", "coded_parts"),
    [
        pytest.param(form, *BESIDE[parts], id=f"{form}-{parts}", marks=[] if row == column else pytest.mark.thorough)
        for row, form in enumerate(["e4m3", "int4", "e2m1"])
        for column, parts in enumerate(BESIDE)
    ],
)
def test_experts_of_codes_take_activations_two_groups_and_matrices_of_numbers_beside_them(
    activation, coded_parts, form
):
    call = random_call(12, (21, 4, 8, 96, 48), biased=True, activation=activation)
    both = with_codes(call, 32, down_group=16, forms=(form, form))
    made = dataclasses.replace(call, **{part: vars(both)[part] for part in coded_parts})
    expected = loop(made)
    np.testing.assert_allclose(RUN["few rows"](made), expected, atol=EXACT * np.abs(expected).max())


@pytest.mark.parametrize(
    ("forms", "path"),
    [
        pytest.param(forms, path, id="-".join((*forms, path)), marks=[] if row != column else pytest.mark.thorough)
        for row, forms in enumerate([("e4m3", "e4m3"), ("int4", "e2m1")])
        for column, path in enumerate(PATHS)
    ],
)
def test_experts_of_codes_keep_bfloat16_and_what_is_nan_stays_alone(path, forms):
    call = with_codes(random_call(13, (24, 3, 10, 200, 40), valid=np.ones(24, bool)), 64, forms=forms)
    low, bad = dataclasses.replace(call, x=call.x.astype(jnp.bfloat16)), int(call.first_expert) + 6
    expected = loop(low)
    out = RUN[path](low)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02 * np.abs(expected).max())
    scales = dataclasses.replace(low.gate_up, scales=low.gate_up.scales.at[bad, 0, 0].set(np.nan))
    broken = np.asarray(RUN[path](dataclasses.replace(low, gate_up=scales)))
    hit = np.any(np.asarray(call.ids) == 6, axis=1)
    assert np.all(np.isnan(broken[hit])) and 0 < hit.sum() < 24
    assert np.array_equal(broken[~hit], np.asarray(out)[~hit])


@pytest.mark.parametrize(
    "fields",
    [{"group": 48}, {"span": 128}, {"outputs_first": True}, {"format": "e2m1"}],
    ids=["group", "span", "order", "format"],
)
def test_codes_that_no_kernel_reads_are_refused(fields):
    call = with_codes(random_call(14, STANDARD), 16)
    forms = r"reads e4m3 \(float8_e4m3fn\), int4 \(int8\), e2m1 \(uint8\)"
    groups = r", inputs first, in groups of 128, 64, 32, 16 and with a scale for each output; dequantise"
    with pytest.raises(ConfigError, match=forms + groups):
        fused_experts(dataclasses.replace(call, gate_up=dataclasses.replace(call.gate_up, **fields)), interpret=True)
