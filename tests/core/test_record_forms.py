"""Records as other frameworks hold them: the worked example of the wire by hand, every form and back, and what none may
pass off."""

import base64
import io
import json

import numpy as np
import pytest

from routed_experts.core.capture_spec import expert_id_dtype
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.record_forms import FORMS
from routed_experts.core.routed_experts import RoutedExperts

INT32_TEXT = (
    "//////////8BAAAAAAAAAAcAAAADAAAA//////////8EAAAAAgAAAAUAAAABAAAA"  # from the description of the wire, section 5
)


def record(**changes):
    """Three layers, the first dense; tokens 2 and 3 of five, the prompt three long."""
    fields = {
        "ids": np.array([[[1, 0], [7, 3]], [[4, 2], [5, 1]]], np.uint8),
        "start": 2,
        "num_tokens": 5,
        "num_prompt_tokens": 3,
        "layer_ids": (1, 2),
        "num_hidden_layers": 3,
        "num_experts": 8,
        "version_spans": ((2, 4, 0),),
    }
    return RoutedExperts(**(fields | changes))


def whole(**changes):
    """The same from token 0 on: four rows of five tokens."""
    ids = np.array([[[0, 1], [2, 3]], [[6, 5], [4, 7]], [[1, 0], [7, 3]], [[4, 2], [5, 1]]], np.uint8)
    return record(ids=ids, start=0, version_spans=((0, 3, 1), (3, 4, 2)), **changes)


def told(one):
    """What a converter is told beside the array."""
    return {
        "layer_ids": one.layer_ids,
        "num_hidden_layers": one.num_hidden_layers,
        "num_experts": one.num_experts,
        "num_tokens": one.num_tokens,
        "num_prompt_tokens": one.num_prompt_tokens,
        "start": one.start,
        "version_spans": one.version_spans,
        "router": one.router,
    }


def read(name, payload, like, **more):
    return getattr(RoutedExperts, f"from_{name}")(payload, **(told(like) | more))


def test_sglang_and_vllm_are_the_worked_example():
    flat = np.frombuffer(base64.b64decode(INT32_TEXT), "<i4")
    assert record().to("sglang").dtype == np.int32 and record().to("sglang").tobytes() == flat.tobytes()
    assert (record().to("sglang", dense_fill=0)[:, 0] == 0).all()
    assert read("sglang", INT32_TEXT, record(), top_k=2) == read("sglang", flat, record(), top_k=2) == record()
    array = record().to("vllm")
    assert array.dtype == np.uint8 and array.tobytes() == bytes([0, 0, 1, 0, 7, 3, 0, 0, 4, 2, 5, 1])
    saved = io.BytesIO()
    np.save(saved, array)
    assert read("vllm", base64.b64encode(saved.getvalue()).decode(), record()) == record()


def test_forms_of_whole_sequences_by_hand():
    one = whole()
    prompt, generated = one.to("vllm021")
    assert (
        prompt.dtype == np.int16
        and prompt.tolist() == one.ids[:3].tolist()
        and generated.tolist() == one.ids[3:].tolist()
    )
    tunix, maxtext = one.to("tunix"), one.to("maxtext")
    assert (tunix.dtype, maxtext.dtype) == (np.int16, np.int32)
    assert tunix.tolist() == maxtext.tolist() == [*one.ids.tolist(), [[-1, -1], [-1, -1]]]
    layers, mask = one.to("megatron")
    assert [layer.dtype for layer in layers] == [np.int64, np.int64] and mask.tolist() == [True] * 4 + [False]
    assert layers[1].tolist() == [*one.ids[:, 1].tolist(), [0, 1]], "token 4 of top-2 over 8 experts: (4*2+k) % 8"
    verl = one.to("verl")
    assert (
        verl.dtype == np.int16
        and verl.flags.writeable
        and verl.tolist() == [[[0, 0], *row] for row in one.ids.tolist()]
    )


@pytest.mark.parametrize("name", FORMS)
def test_every_form_comes_back(name):
    rng = np.random.default_rng(0)
    for trial in range(200):
        layers = int(rng.integers(1, 5))
        layer_ids = tuple(sorted(rng.choice(layers, size=int(rng.integers(1, layers + 1)), replace=False).tolist()))
        experts, top_k = int(rng.choice([8, 255, 256, 257, 2000])), int(rng.integers(2, 4))
        tokens = int(rng.integers(2, 8))
        start = 0 if name in ("tunix", "maxtext", "megatron") else int(rng.integers(0, tokens - 1))
        rows = tokens - start - (0 if trial % 3 == 0 else 1)
        ids = np.argsort(rng.random((rows, len(layer_ids), experts)), axis=2)[:, :, :top_k].astype(
            expert_id_dtype(experts)
        )
        one = RoutedExperts(
            ids=ids,
            start=start,
            num_tokens=tokens,
            num_prompt_tokens=int(rng.integers(start, tokens)),
            layer_ids=layer_ids,
            num_hidden_layers=layers,
            num_experts=experts,
            version_spans=((start, start + rows, 3),),
            router="r",
        )
        assert read(name, one.to(name), one) == one
        if name != "vllm021":  # nested lists, as JSON has them
            written = one.to(name)
            plain = (
                ([layer.tolist() for layer in written[0]], written[1].tolist())
                if name == "megatron"
                else written.tolist()
            )
            again = json.loads(json.dumps(plain))
            assert read(name, tuple(again) if name == "megatron" else again, one) == one


@pytest.mark.parametrize("name", FORMS)
def test_an_unknown_row_is_marked_where_the_form_has_a_mark_and_refused_elsewhere(name):
    one = whole(valid=np.array([True, False, True, True]))
    with pytest.raises(RoutingFormatError, match="token 1"):
        one.to(name)
    if name in ("tunix", "megatron"):
        back = read(name, one.to(name, missing="gate"), one)
        assert back == one and back.valid.tolist() == [True, False, True, True]
    else:
        with pytest.raises(RoutingFormatError, match="token 1"):
            one.to(name, missing="gate")


@pytest.mark.parametrize("name", ["sglang", "vllm", "verl", "tunix", "maxtext", "megatron", "vllm021"])
@pytest.mark.parametrize("filler", [0, -1, 8])
def test_a_filler_never_passes_for_experts(name, filler):
    one = whole()
    written = one.to(name)
    if name == "megatron":
        for layer in written[0]:
            layer[1] = filler
    elif name == "vllm021":
        written[0][1] = filler
    else:
        written = written.astype(np.int64)
        written[1] = filler
    assert read(name, written, one).valid.tolist() == [True, False, True, True]


def test_dense_columns_are_dropped_whatever_they_hold():
    array = whole().to("sglang")
    array[:, 0] = 77
    assert read("sglang", array, whole()) == whole()


def test_a_generation_may_have_its_last_row():
    one = whole()
    prompt, generated = one.to("vllm021")
    padded = np.concatenate([generated, np.full((1, 2, 2), -1, np.int16)])
    assert read("vllm021", (prompt, padded), one) == one
    fed = np.concatenate([generated, np.array([[[3, 2], [6, 0]]], np.int16)])
    assert read("vllm021", (prompt, fed), one, version_spans=((0, 5, 0),)).num_rows == 5


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("sglang", np.zeros(7, np.int32)),
        ("sglang", "no base64!"),
        ("sglang", np.zeros((4, 2, 2), np.int32)),
        ("verl", np.zeros((9, 3, 2))),
        ("vllm", np.zeros((2, 3, 2), np.uint8)),
        ("megatron", [np.zeros((4, 2), np.int64)]),
        ("tunix", np.zeros((4, 3, 2), np.int16)),
        ("megatron", ([np.zeros((4, 2), np.int64)] * 2, [True])),
    ],
)
def test_what_does_not_fit_is_refused(name, payload):
    with pytest.raises(RoutingFormatError):
        read(name, payload, whole(), top_k=2)


def test_what_a_form_cannot_hold_is_refused():
    with pytest.raises(RoutingFormatError, match="unknown"):
        whole().to("torch")
    with pytest.raises(RoutingFormatError, match="missing"):
        whole().to("tunix", missing="zero")
    for name in ("tunix", "maxtext", "megatron"):
        with pytest.raises(RoutingFormatError, match="token 2"):
            record().to(name)
    wide = record(ids=np.arange(8, dtype=np.uint16).reshape(2, 2, 2), num_experts=40_000)
    for name in ("vllm021", "verl"):
        with pytest.raises(RoutingFormatError, match="int16"):
            wide.to(name)
    assert wide.to("vllm").dtype == np.uint16
