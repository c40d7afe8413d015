"""RoutingStats against a loop over records, and against counting step by step as the host store does."""

import dataclasses
import re

import numpy as np
import pytest

from replay.records import SPEC, random_record
from routed_experts.capture import expert_counts
from routed_experts.capture.expert_counts import ExpertCounts
from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import CaptureDisabledError, PlacementError, RoutingFormatError
from routed_experts.core.model_worker_batch import TokenOrigins
from routed_experts.core.routing_stats import RoutingStats


def some_records():
    rng = np.random.default_rng(0)
    valid = rng.random(40) < 0.7
    return [
        random_record(rng, 30, prompt_len=12),
        random_record(rng, 41, prompt_len=9, valid=valid),
        random_record(rng, 20, start=5, prompt_len=3),
    ]


def counted(records):
    counts = np.zeros((2, 3, 16), np.int64)
    for record in records:
        for row, layers in enumerate(record.ids.tolist()):
            if record.valid is None or record.valid[row]:
                for layer, experts in enumerate(layers):
                    for expert in experts:
                        counts[int(record.start + row >= record.num_prompt_tokens), layer, expert] += 1
    return counts


def test_counts_are_those_of_a_loop_over_the_known_rows():
    records = some_records()
    stats = RoutingStats.from_records(records, window_tokens=16)
    assert (stats.counts == counted(records)).all()
    assert (stats.num_tokens * 4 == counted(records)[:, 0].sum(axis=1)).all()
    assert (stats.load == counted(records).sum(axis=0)).all()
    assert (stats.windows.sum(axis=0) == stats.counts).all()
    assert (stats.windows[:-1, :, 0].sum(axis=(1, 2)) == 16 * 4).all() and 0 < stats.windows[-1, :, 0].sum() <= 16 * 4


def test_an_average_halves_with_its_half_life():
    stats = RoutingStats.from_records(some_records(), window_tokens=16)
    for half_life in (1, 3.5):
        above, below = np.zeros((2, 3, 16)), 0.0
        for age, window in enumerate(stats.windows[::-1]):
            above += 2 ** (-age / half_life) * window
            below += 2 ** (-age / half_life) * window[:, 0].sum() / 4
        assert np.allclose(stats.average(half_life), above / below)
    assert np.allclose(stats.average(1e9), stats.counts / stats.num_tokens.sum())
    assert np.allclose(stats.recent_load, np.maximum(stats.average(4), stats.average(32)).sum(axis=0))


def test_what_is_counted_step_by_step_is_what_the_records_hold(monkeypatch):
    """The other way to the same counts: by the store that files rows, over several files and windows."""
    monkeypatch.setattr(expert_counts, "WINDOW_TOKENS", 16)
    records = some_records()
    capturer = RoutedExpertsCapturer.create(SPEC, num_slots=64, page_size=4, enable=True)
    for record in records:
        for low in range(0, record.num_rows, 7):
            rows = record.ids[low : low + 7].reshape(-1, 12)
            of_row = np.zeros(len(rows), np.int32)
            origins = TokenOrigins(
                record.start + low + np.arange(len(rows)), np.array([record.num_prompt_tokens]), of_row
            )
            live = None if record.valid is None else record.valid[low : low + 7]
            padded = np.concatenate([rows, np.full((2, 12), 15, np.uint8)])  # padding of a step
            capturer.on_forward_end(np.arange(low, low + len(rows)), padded, 0, live, origins)
        capturer.host_cache.flush()
    stats, expected = capturer.routing_stats(reset=True), RoutingStats.from_records(records)
    assert (stats.counts == expected.counts).all() and (stats.num_tokens == expected.num_tokens).all()
    assert (stats.windows.sum(axis=0) == stats.counts).all() and len(stats.windows) > 2
    assert (stats.windows[:-1, :, 0].sum(axis=(1, 2)) == 16 * 4).all()
    assert (stats.layer_ids, stats.top_k, stats.num_experts) == ((1, 2, 3), 4, 16)
    assert not capturer.routing_stats().counts.any() and capturer.routing_stats().windows.shape == (0, 2, 3, 16)
    assert not capturer.routing_stats().recent_load.any()


def test_old_windows_are_let_go_and_their_counts_stay(monkeypatch):
    monkeypatch.setattr(expert_counts, "WINDOW_TOKENS", 1)
    counts = ExpertCounts(SPEC)
    for _ in range(100):
        counts.add(np.tile(np.arange(4, dtype=np.uint8), (1, 3)), np.array([True]))
    assert len(counts.stats().windows) == 32
    assert counts.stats().num_tokens.tolist() == [0, 100]


def test_an_engine_that_records_nothing_has_no_counts():
    off = RoutedExpertsCapturer.create(SPEC, num_slots=8, page_size=4, enable=False)
    with pytest.raises(CaptureDisabledError):
        off.routing_stats()


def test_statistics_round_trip_through_a_file(tmp_path):
    stats = RoutingStats.from_records(some_records(), window_tokens=16)
    stats.save(tmp_path / "stats.npz")
    read = RoutingStats.read(tmp_path / "stats.npz")
    for name in ("counts", "num_tokens", "windows"):
        assert (getattr(read, name) == getattr(stats, name)).all() and getattr(read, name).dtype == getattr(
            stats, name
        ).dtype
    assert (read.layer_ids, read.top_k) == (stats.layer_ids, stats.top_k)


def written(folder, **overrides):
    stats = RoutingStats.from_records(some_records())
    arrays = {name: getattr(stats, name) for name in ("counts", "num_tokens", "windows", "top_k")}
    np.savez(folder / "stats.npz", **arrays | {"layer_ids": np.arange(3), "top_k": np.int64(4)} | overrides)
    return folder / "stats.npz"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"\x93NUMPY", b"not an archive at all"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "stats.npz").write_bytes(content)
    with pytest.raises(RoutingFormatError, match="holds no routing statistics") as refused:
        RoutingStats.read(tmp_path / "stats.npz")
    assert "trust" not in str(refused.value) and "pickle" not in str(refused.value)


def test_a_file_with_objects_or_other_arrays_is_refused(tmp_path):
    with pytest.raises(RoutingFormatError, match=r"holds no routing statistics \(no .npz of plain arrays\); give what"):
        RoutingStats.read(written(tmp_path, counts=np.array([{}], object)))
    with pytest.raises(RoutingFormatError, match="counts is float64 of 3 dims; expected int64 of 3"):
        RoutingStats.read(written(tmp_path, counts=np.zeros((2, 3, 16))))
    with pytest.raises(PlacementError, match=re.escape("counts add up to")):
        RoutingStats.read(written(tmp_path, num_tokens=np.array([1, 1])))
    with pytest.raises(PlacementError, match=re.escape("expected [2, 2, E]")):
        RoutingStats.read(written(tmp_path, layer_ids=np.arange(2)))
    windows = RoutingStats.from_records(some_records()).windows
    for wrong in (-windows, windows * 1000):
        with pytest.raises(PlacementError, match=r"windows hold -?\d+ slots.*expected parts of the \d+ of counts"):
            RoutingStats.read(written(tmp_path, windows=wrong))
    for layer_ids in ([0, 1, 1], [-1, 0, 1], [2, 1, 0]):
        with pytest.raises(PlacementError, match="expected hidden layers from 0 on, in order"):
            RoutingStats.read(written(tmp_path, layer_ids=np.array(layer_ids)))


@pytest.mark.parametrize("half_life", [0, -1, float("nan"), float("inf")])
def test_an_average_needs_a_half_life(half_life):
    with pytest.raises(PlacementError, match="expected a finite number above 0"):
        RoutingStats.from_records(some_records()).average(half_life)


def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path):
    """Of the archive's own fields: flags, methods, sizes and places. Contents have checksums."""
    path = written(tmp_path)
    content, refused = path.read_bytes(), 0
    places = [at + offset for at in range(len(content)) if content[at : at + 2] == b"PK" for offset in range(46)]
    for place in places:
        for flipped in (1, 8, 64, 255):
            if place < len(content):
                path.write_bytes(content[:place] + bytes([content[place] ^ flipped]) + content[place + 1 :])
                try:
                    RoutingStats.read(path)
                except (RoutingFormatError, PlacementError):
                    refused += 1
    assert refused > 100


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(RoutingFormatError, match=r"missing\.npz holds no routing statistics .*give what its save"):
        RoutingStats.read(tmp_path / "missing.npz")
    with pytest.raises(RoutingFormatError, match=r"holds no routing statistics \(.*No such file"):
        RoutingStats.read(tmp_path / "pickle" / "missing.npz")


def test_records_of_two_models_are_refused():
    other = random_record(np.random.default_rng(0), 9, spec=dataclasses.replace(SPEC, num_experts=8))
    with pytest.raises(
        PlacementError, match=re.escape("a record of MoE layers (1, 2, 3), 8 experts, top-4 differs from one of")
    ):
        RoutingStats.from_records([some_records()[0], other])
    with pytest.raises(PlacementError, match="0 records"):
        RoutingStats.from_records([])
    stats = RoutingStats.from_records([other])
    stats.check_model((1, 2, 3), 8)
    with pytest.raises(
        PlacementError,
        match=re.escape("MoE layers (1, 2, 3) with 8 experts does not fit a model with (1, 2, 3) and 16"),
    ):
        stats.check_model((1, 2, 3), 16)


def test_what_is_no_record_or_no_expert_or_no_count_is_refused():
    record = some_records()[0]
    for records, text in (
        (record, "records is a RoutedExperts; expected a list of records"),
        (None, "records is None; expected a list"),
        ([record, record.ids], r"records\[1\] is a ndarray of \d+; expected RoutedExperts"),
        ([None], r"records\[0\] is None; expected RoutedExperts"),
    ):
        with pytest.raises(PlacementError, match=text):
            RoutingStats.from_records(records)
    for window_tokens in (2.5, "4", None, True):
        with pytest.raises(PlacementError, match=r"window_tokens=.*; expected an integer of at least 1, such as 1024"):
            RoutingStats.from_records([record], window_tokens=window_tokens)
    narrow = RoutingStats.from_records([record], window_tokens=np.uint8(3)).windows
    assert np.array_equal(narrow, RoutingStats.from_records([record], window_tokens=3).windows)


def test_an_id_that_is_no_expert_is_not_counted_for_another_layer():
    record = random_record(np.random.default_rng(4), 9)
    ids = record.ids.copy()
    ids[2, 1, 0] = 16
    with pytest.raises(RoutingFormatError, match="token 2, hidden layer 2, slot 0: id 16; expected 0 to 15"):
        RoutingStats.from_records([dataclasses.replace(record, ids=ids)])
    known = np.arange(record.num_rows) != 2
    stats = RoutingStats.from_records([dataclasses.replace(record, ids=ids, valid=known)])
    assert (stats.counts == RoutingStats.from_records([dataclasses.replace(record, valid=known)]).counts).all()


def test_wide_ids_are_counted_too():
    spec = CaptureSpec(num_hidden_layers=2, layer_ids=(0, 1), num_experts=400, top_k=2)
    counts = ExpertCounts(spec)
    counts.add(np.array([[399, 0, 399, 1], [399, 300, 0, 399]], np.uint16), np.array([False, True]))
    stats = counts.stats()
    assert (
        stats.counts[:, 0, 399].tolist() == [1, 1]
        and stats.counts[:, 1, 399].tolist() == [1, 1]
        and stats.counts[1, 0, 300] == 1
    )


def test_a_worker_counts_what_is_enqueued_and_detects_an_id_too_large(monkeypatch):
    monkeypatch.setattr(expert_counts, "_CHUNK_IDS", 40)
    rng, counts = np.random.default_rng(0), ExpertCounts(SPEC)
    expected = np.zeros((2, 3, 16), np.int64)
    for _ in range(50):
        rows, generated = rng.integers(0, 16, (5, 12)).astype(np.uint8), rng.random(5) < 0.5
        counts.enqueue(rows, generated)
        for row, phase in zip(rows.reshape(5, 3, 4), generated.astype(int), strict=True):
            for layer in range(3):
                np.add.at(expected[phase, layer], row[layer], 1)
    assert counts._submitted and (counts.stats().counts == expected).all() and not counts._submitted
    counts.enqueue(np.full((4, 12), 16, np.uint8), np.zeros(4, np.bool_))
    with pytest.raises(AssertionError, match="expert 16 of 16"):
        counts.stats()
