"""`routed-experts placement`: every kind of file, and numbers that are the library's."""

import dataclasses
import json

import numpy as np
import pytest

from placement.cases import skewed_record
from routed_experts import placement
from routed_experts.cli import main, make_parser
from routed_experts.cli.flags import expert_args, placement_args
from routed_experts.core.errors import ConfigError, RoutingFormatError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.formats import encode_meta_info
from routed_experts.formats.archive import encode_record

pytestmark = pytest.mark.usefixtures("fast_compilation")

LOGITS = np.random.default_rng(1).normal(0, 1.2, (3, 16))


def random_records(seed, num_tokens=200):
    """Records as generate gives them: the last token has no row."""
    rng = np.random.default_rng(seed)
    made = [skewed_record(rng, LOGITS, num_tokens, prompt_len=5) for _ in range(2)]
    return [dataclasses.replace(record, num_tokens=num_tokens + 1) for record in made]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two records in each kind of file, and statistics of two others."""
    folder, records = tmp_path_factory.mktemp("records"), random_records(2)
    answers = [
        {"text": "", "meta_info": encode_meta_info(record, payload_format="npy", layers="moe")} for record in records
    ]
    (folder / "out.jsonl").write_text("".join(json.dumps(answer) + "\n\n" for answer in answers))
    (folder / "list.json").write_text(json.dumps(answers))
    (folder / "one.json").write_text(
        json.dumps({"choices": [answer["meta_info"] | {"index": i} for i, answer in enumerate(answers)]})
    )
    (folder / "a.safetensors").write_bytes(encode_record(records[0]))
    (folder / "b.safetensors").write_bytes(encode_record(records[1]))
    RoutingStats.from_records(random_records(3)).save(folder / "stats.npz")
    return folder


def run(capsys, *argv):
    code = main(["placement", *(str(word) for word in argv)])
    return code, *capsys.readouterr()


def test_a_plan_that_is_evaluated_on_its_own_records_says_so(files, capsys):
    words = "made from the same records that it is evaluated on"
    _, out, _ = run(capsys, files / "out.jsonl", "--residents", 4)
    assert words in out and "--plan-from FILE" in out
    _, out, _ = run(capsys, files / "out.jsonl", "--residents", 4, "--plan-from", files / "stats.npz")
    assert words not in out


@pytest.mark.parametrize("names", [["out.jsonl"], ["list.json"], ["one.json"], ["a.safetensors", "b.safetensors"]])
def test_numbers_are_those_of_the_library_from_every_kind_of_file(files, capsys, names):
    flags = ["--plan-from", files / "stats.npz", "--instances", 20, "--devices", 4, "--residents", 4, "--json"]
    code, out, _ = run(capsys, *(files / name for name in names), *flags)
    report, records, learned = json.loads(out), random_records(2), RoutingStats.read(files / "stats.npz")
    assert code == 0
    assert [report[name] for name in ("tokens", "plan_tokens", "layers", "experts", "top_k")] == [
        400,
        400,
        [0, 1, 2],
        16,
        4,
    ]
    before = placement.simulate(records, ExpertPlacement.identity(3, 16, 4))
    after = placement.simulate(records, placement.eplb(learned, num_instances=20, num_devices=4))
    assert report["instances"]["balancedness before"] == before.balancedness.tolist()
    assert report["instances"]["balancedness planned"] == after.balancedness.tolist()
    static = placement.resident(learned, per_layer=4)
    adaptive = placement.simulate(records, placement.AdaptiveResidency.start(static, learned=learned), step_tokens=8)
    assert (
        report["residents"]["first"] == placement.simulate(records, ResidencyMap.first_n(3, 16, 4)).hit_ratio.tolist()
    )
    assert report["residents"]["static"] == placement.simulate(records, static).hit_ratio.tolist()
    assert report["residents"]["adaptive"] == adaptive.hit_ratio.tolist()
    assert report["residents"]["LRU"] == placement.lru_coverage(*records).hits[:, 4].tolist()


def test_a_table_has_a_row_a_layer_and_their_mean(files, capsys):
    code, out, _ = run(capsys, files / "out.jsonl", "--instances", 20, "--devices", 4)
    records = random_records(2)
    after = placement.simulate(
        records, placement.eplb(RoutingStats.from_records(records), num_instances=20, num_devices=4)
    )
    assert code == 0 and "400 tokens, 3 MoE layers x 16 experts, top-4" in out
    rows = [line.split() for line in out.splitlines()]
    for layer in range(3):
        assert next(row for row in rows if row[:1] == [str(layer)])[2] == f"{after.balancedness[layer]:.3f}"
    assert next(row for row in rows if row[:1] == ["mean"])[2] == f"{after.balancedness.mean():.3f}"
    code, out, _ = run(capsys, files / "out.jsonl", "--instances", 18, "--devices", 3, "--step-tokens", 64)
    assert code == 0 and "balancedness before" not in out  # 3 devices do not divide 16 experts


@pytest.mark.parametrize("dispatch", ["waterfill", "reroute"])
def test_steps_may_be_sent_by_the_serving_operators(files, capsys, dispatch):
    flags = ["--instances", 20, "--devices", 4, "--dispatch", dispatch, "--step-tokens", 100, "--json"]
    code, out, _ = run(capsys, files / "out.jsonl", *flags)
    report, records = json.loads(out)["instances"], random_records(2)
    plan = placement.eplb(RoutingStats.from_records(records), num_instances=20, num_devices=4)
    after = placement.simulate(records, plan, dispatch=dispatch, step_tokens=100)
    assert code == 0 and report["balancedness planned"] == after.balancedness.tolist()
    share = (after.rerouted_slots / (400 * 4)).tolist()
    assert report.get("rerouted share") == (share if dispatch == "reroute" else None) and max(share) < 0.5


def test_a_picture_is_written(files, capsys, tmp_path):
    flags = ["--instances", 20, "--devices", 4, "--residents", 4, "--plot", tmp_path / "plan.png"]
    assert run(capsys, files / "out.jsonl", *flags)[0] == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run(capsys, files / "out.jsonl", "--residents", 0, "--plot", tmp_path / "plan.svg")[0] == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_errors_name_what_is_wrong(files, capsys, tmp_path):
    out = files / "out.jsonl"
    (tmp_path / "bare.jsonl").write_text('{"text": "no rows"}\n')
    (tmp_path / "cut.jsonl").write_text((out.read_text())[:50])
    (tmp_path / "number.json").write_text("3")
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "choices.json").write_text('{"choices": [1]}')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bytes.safetensors").write_bytes(b"no tensors")
    other = skewed_record(np.random.default_rng(0), LOGITS[:, :8], 50)
    (tmp_path / "other.safetensors").write_bytes(encode_record(other))
    unknown = dataclasses.replace(other, valid=np.zeros(other.num_rows, bool))
    (tmp_path / "unknown.safetensors").write_bytes(encode_record(unknown))
    for argv, words in (
        ([tmp_path / "unknown.safetensors", "--residents", 1, "--json"], "no row is known, so there is nothing"),
        ([out], "there is nothing to plan; give --instances"),
        ([out, "--instances", 20], "--instances and --devices belong together"),
        ([out, "--instances", 20, "--devices", 3], "--devices 3 does not divide --instances 20"),
        ([out, "--instances", 1000, "--devices", 8], "--instances 1000 is above 256, which is 16 for each of 16"),
        ([out, "--instances", 15, "--devices", 3], "--instances 15 for 16 experts"),
        ([out, "--residents", 2, "--dispatch", "reroute"], "--dispatch 'reroute' is of instances, and has no effect"),
        ([out, "--residents", 2, "--groups", 5], "--groups 5 is of instances, and has no effect on --residents"),
        ([out, "--residents", 2, "--nodes", 1], "--nodes 1 is of instances, and has no effect on --residents"),
        ([out, "--residents", 17], "--residents 17 must be an integer in 0..16, all experts that there are; lower it"),
        ([tmp_path / "bare.jsonl", "--residents", 1], "bare.jsonl: line 1 holds no routed experts"),
        ([tmp_path / "cut.jsonl", "--residents", 1], "cut.jsonl: line 1 is no JSON"),
        ([tmp_path / "number.json", "--residents", 1], "number.json: the file holds no answer but a int"),
        ([tmp_path / "latin.json", "--residents", 1], "latin.json: "),
        ([tmp_path / "deep.json", "--residents", 1], "deep.json: "),
        ([tmp_path / "choices.json", "--residents", 1], "choices.json: received a int"),
        ([tmp_path / "empty.jsonl", "--residents", 1], "empty.jsonl holds no answer"),
        ([tmp_path / "bytes.safetensors", "--residents", 1], "bytes.safetensors: "),
        ([out, "--residents", 1, "--step-tokens", 0], "--step-tokens 0 must be"),
        ([out, "--residents", 1, "--plot", "x.foo"], "--plot x.foo is none of .png, .svg, .pdf"),
        ([files / "stats.npz", "--residents", 1], "name files that end in .jsonl, .json, .safetensors"),
        (
            [out, "--plan-from", tmp_path / "other.safetensors", "--residents", 1],
            "with 8 experts does not fit a model with (0, 1, 2) and 16",
        ),
        ([out, tmp_path / "other.safetensors", "--residents", 1], "expected records of one model"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2 and words in err and len(err.splitlines()) <= 3, (argv, err)


def test_residency_may_be_adaptive():
    options = make_parser().parse_args(["serve", "model", "--kt-num-gpu-experts", "4", "--residency", "adaptive"])
    assert expert_args(options) == ExpertOffloadConfig(kt_num_gpu_experts=4, residency="adaptive")
    with pytest.raises(ConfigError, match="residency='lru' is unknown"):
        expert_args(make_parser().parse_args(["serve", "model", "--residency", "lru"]))


def test_a_saved_plan_reaches_the_engine_config(files, capsys, tmp_path):
    assert run(capsys, files / "out.jsonl", "--residents", 5, "--save", tmp_path / "plan.npz")[0] == 0
    config = expert_args(make_parser().parse_args(["serve", "model", "--residency", str(tmp_path / "plan.npz")]))
    assert config.num_resident == 5
    expected = placement.resident(RoutingStats.from_records(random_records(2)), per_layer=5)
    assert (config.build_residency(3, 16).slot_of == expected.slot_of).all()
    assert run(capsys, files / "out.jsonl", "--instances", 20, "--devices", 4, "--save", tmp_path / "plan.npz")[0] == 0
    planned = placement.eplb(RoutingStats.from_records(random_records(2)), num_instances=20, num_devices=4)
    assert (
        ExpertPlacement.read(tmp_path / "plan.npz").logical_to_physical_map == planned.logical_to_physical_map
    ).all()
    code, _, err = run(capsys, files / "out.jsonl", "--residents", 5, "--save", tmp_path / "plan.txt")
    assert code == 2 and "writes one plan as .npz" in err
    both = ["--instances", 20, "--devices", 4, "--residents", 5, "--save", tmp_path / "plan.npz"]
    assert run(capsys, files / "out.jsonl", *both)[0] == 2
    with pytest.raises(RoutingFormatError, match="holds no residency map"):
        expert_args(make_parser().parse_args(["serve", "model", "--residency", str(tmp_path / "plan.npz")]))


@pytest.mark.parametrize("plan", [("--instances", 20, "--devices", 4), ("--residents", 5)])
def test_a_plan_that_cannot_be_simulated_or_drawn_leaves_the_old_one(files, capsys, tmp_path, plan):
    (tmp_path / "plan.npz").write_bytes(b"old")
    flags = [files / "out.jsonl", *plan, "--save", tmp_path / "plan.npz"]
    code, _, err = run(capsys, *flags, "--step-tokens", 0)
    assert code == 2 and "--step-tokens 0" in err and (tmp_path / "plan.npz").read_bytes() == b"old"
    code, _, err = run(capsys, *flags, "--plot", tmp_path / "no" / "plan.png")
    assert code == 1 and "plan.png" in err and (tmp_path / "plan.npz").read_bytes() == b"old"
    assert run(capsys, *flags)[0] == 0 and (tmp_path / "plan.npz").read_bytes() != b"old"


def test_a_saved_placement_reaches_the_engine_config(files, capsys, tmp_path):
    """By its file alone, and with how it is to be served."""
    assert run(capsys, files / "out.jsonl", "--instances", 20, "--devices", 4, "--save", tmp_path / "plan.npz")[0] == 0
    argv = ["serve", "model", "--placement", str(tmp_path / "plan.npz")]
    config = placement_args(make_parser().parse_args(argv))
    expected = ExpertPlacement.read(tmp_path / "plan.npz")
    np.testing.assert_array_equal(config.initial.physical_to_logical_map, expected.physical_to_logical_map)
    assert (config.mode, config.rebalance_every) == ("replicas", 0)
    more = [
        "--placement-mode",
        "reroute",
        "--capacity-factor",
        "5/4",
        "--rebalance-every",
        "64",
        "--layers-per-step",
        "2",
    ]
    config = placement_args(make_parser().parse_args([*argv, *more]))
    assert (config.mode, config.capacity_factor, config.on_exhausted) == ("reroute", "5/4", "overflow")
    assert (config.rebalance_every, config.layers_per_step) == (64, 2)
    assert placement_args(make_parser().parse_args(["generate", "model", "--prompt", "x"])) is None
    with pytest.raises(ConfigError, match=r"--placement-mode, --capacity-factor without --placement FILE.npz"):
        placement_args(make_parser().parse_args(["serve", "model", *more[:4]]))
    with pytest.raises(ConfigError, match=r"none.npz' is no file"):
        placement_args(make_parser().parse_args(["serve", "model", "--placement", str(tmp_path / "none.npz")]))
    assert run(capsys, files / "out.jsonl", "--residents", 5, "--save", tmp_path / "other.npz")[0] == 0
    with pytest.raises(RoutingFormatError, match="holds no placement"):
        placement_args(make_parser().parse_args(["serve", "model", "--placement", str(tmp_path / "other.npz")]))
