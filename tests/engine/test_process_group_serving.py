"""Several processes give what one gives on the same mesh: tokens, rows, and in deterministic mode every bit.

Each mesh is started once as a group of two processes and once as one process; both obey the same commands."""

import contextlib

import numpy as np
import pytest

from support.process_groups import CommandError, group, one_process
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

PROMPTS = [
    np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist() for seed, length in enumerate((5, 45, 1, 17))
]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 12}
SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 11, "ignore_eos": True, "max_new_tokens": 12}
FULL = GREEDY | {"frequency_penalty": 0.7, "presence_penalty": 0.2, "logit_bias": {"9": 2.0}, "max_new_tokens": 8}
ROWS = {"return_routed_experts": True}
TAPPED, PLACED = "2x1 by width, tapped", "2x1 placed experts, drafts"
BITWISE = "2x2 data ranks of whole experts, codes, deterministic"
MESHES = {
    # devices a process, engine: by width; each bit, of whole experts and codes in data ranks; placed experts that move,
    # with drafts. In every run BITWISE has all tests, and TAPPED and PLACED those that are of them alone.
    # scripts/thorough has all tests of each, and whole experts of plain numbers, and codes of ranks by width, too.
    TAPPED: (
        1,
        {"enable_return_routed_experts": True, "moe_backend": "reference", "precompile_bs_paddings": [4]},
        {"lazy": True, "fast": True},
    ),
    BITWISE: (
        2,
        {
            "enable_return_routed_experts": True,
            "enable_return_routed_experts_weights": True,
            "ep_size": 4,
            "dp_size": 2,
            "deterministic": True,
            "quantization": "fp8_block",
        },
        {"lazy": True},
    ),
    "2x2 whole experts, deterministic": (
        2,
        {
            "enable_return_routed_experts": True,
            "enable_return_routed_experts_weights": True,
            "ep_size": 4,
            "deterministic": True,
        },
        {"lazy": True},
    ),
    "2x2 data ranks, codes, deterministic": (
        2,
        {
            "enable_return_routed_experts": True,
            "dp_size": 2,
            "deterministic": True,
            "quantization": "fp8_block",
            "precompile_bs_paddings": [4],
        },
        {"lazy": True, "fast": True},  # BITWISE has the bits of programs as they are shipped
    ),
    PLACED: (
        1,
        {
            "enable_return_routed_experts": True,
            "ep_size": 2,
            "placement": 5,
            "precompile_bs_paddings": [4],
            "speculative": {"algorithm": "NGRAM", "num_draft_tokens": 3},
        },
        {"lazy": True, "fast": True},
    ),
}


class Pair:
    """The leader of a group and the same engine in one process. `taps`: files of the ids that entered the experts, by
    rank of the group."""

    def __init__(self, name, leader, single, taps):
        self.leader, self.single, self.is_deterministic = leader, single, "deterministic" in name
        self.taps = taps

    def both(self, command, **arguments):
        """The results of a command in the group and in one process."""
        for process in (self.leader, self.single):
            process.begin(command, **arguments)
        return self.leader.result(), self.single.result()

    def assert_alike(self, command, **arguments):
        """The results are equal; logprobs by the bit in deterministic mode. Returns that of the group."""
        ours, theirs = self.both(command, **arguments)
        assert self._comparable(ours) == self._comparable(theirs), command
        return ours

    def _comparable(self, result):
        if self.is_deterministic:
            return result
        answers = [{**answer, "bits": None, "top": None} if isinstance(answer, dict) else answer for answer in result]
        return [answer[1:] if isinstance(answer, list) else answer for answer in answers]  # of a score: its rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture(
    scope="module",
    params=[name if name == BITWISE else pytest.param(name, marks=pytest.mark.thorough) for name in MESHES],
)
def pair(request, folder, tmp_path_factory):
    devices, engine, options = MESHES[request.param]
    taps = tmp_path_factory.mktemp("taps")
    if request.param == TAPPED:
        options = options | {"tap": str(taps / "RANK")}
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(group(folder, engine, devices=devices, ready=False, **options))
        single = stack.enter_context(one_process(folder, engine, devices=2 * devices, **options))
        for process in (members[0], single):
            process.wait_ready()
        yield Pair(request.param, members[0], single, [taps / "0", taps / "1"])
        assert [members[0].call("integrity"), single.call("integrity")] == [[], []]
        assert (members[0].end(), members[1].exit_code(), single.end()) == (0, 0, 0)


def test_answers_of_prompts_chunks_and_cached_prefixes_are_alike(pair):
    for process in (pair.leader, pair.single):
        process.call("overwrite_pool")
    first = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, logprob_start_len=0, **ROWS)
    assert len({tuple(answer["tokens"]) for answer in first}) == 4, "a constant answer proves nothing"
    assert [answer["rows"][0] for answer in first] == [len(prompt) + 11 for prompt in PROMPTS]
    again = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
    assert again[1]["cached"] > 0
    assert [answer["rows"] for answer in again] == [answer["rows"] for answer in first]


def test_sampled_answers_are_alike(pair):
    pair.assert_alike("generate", prompts=PROMPTS, params=SAMPLED, **ROWS)


def test_four_choices_penalties_bias_and_top_logprobs_are_alike(pair):
    pair.assert_alike("generate", prompts=PROMPTS[:1], params=SAMPLED | {"n": 4}, **ROWS)
    pair.assert_alike("generate", prompts=PROMPTS, params=FULL, top_logprobs_num=3, logprob_start_len=0, **ROWS)


def test_answers_under_retraction_every_third_step_are_alike(pair):
    calm = pair.leader.call("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
    hurried = pair.assert_alike("retract_often", prompts=PROMPTS, params=GREEDY)
    assert [answer["tokens"] for answer in hurried] == [answer["tokens"] for answer in calm]
    assert [answer["rows"] for answer in hurried] == [answer["rows"] for answer in calm]
    assert pair.leader.call("stats")["preemptions"] >= 3


def test_an_aborted_request_keeps_the_rows_of_what_was_fed(pair):
    for result in pair.both("abort_one", prompt=PROMPTS[3]):
        assert result["is_abort"] and 0 < result["count"] <= 60
        assert result["rows"][0] == len(PROMPTS[3]) + result["count"] - 1


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_answer(pair, mode):
    pair.assert_alike("pause_and_resume", mode=mode, prompt=PROMPTS[3])


def test_scores_on_live_and_on_given_rows_are_alike_beside_requests(pair):
    pair.assert_alike("score", sequences=PROMPTS[1:])
    replayed = pair.assert_alike("score", sequences=PROMPTS[1:], replay=True)
    assert replayed != pair.leader.call("score", sequences=PROMPTS[1:])


def test_memory_that_is_released_comes_back_in_every_process(pair):
    assert pair.both("release_and_resume") == ([], [])
    pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)


@pytest.mark.parametrize("pair", [PLACED], indirect=True)
def test_experts_move_in_every_process_while_the_answers_stay(pair):
    before, _ = pair.both("generate", prompts=PROMPTS, params=GREEDY, **ROWS)  # both have cached the prompts
    moved = pair.both("move_experts", seed=8)
    assert moved[0] == moved[1] > 0
    after = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
    assert [answer["tokens"] for answer in after] == [answer["tokens"] for answer in before]
    assert [answer["rows"] for answer in after] == [answer["rows"] for answer in before]


def test_new_weights_are_served_by_all_processes_or_by_none(pair, folder, tmp_path_factory):
    other = write_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=3, tokenizer=False)
    broken = write_tiny_checkpoint(tmp_path_factory.mktemp("broken"), tokenizer=False, num_experts=32)
    old = pair.leader.call("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
    with pytest.raises(
        CommandError, match=r"is refused by process 0: .*another model.*; process 1: .*old weights serve"
    ):
        pair.leader.call("update_weights", path=str(broken), version=1)
    assert pair.leader.call("generate", prompts=PROMPTS, params=GREEDY, **ROWS)[0]["tokens"] == old[0]["tokens"]
    assert [list(told) for told in pair.both("update_weights", path=str(other), version="step-1")] == [
        ["step-1", 1]
    ] * 2
    new = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
    assert new[1]["tokens"] != old[1]["tokens"]
    for count, label in enumerate(("step-1", "5", "step-1"), start=2):  # the same one again, another, and back
        assert [list(told) for told in pair.both("set_version", version=label)] == [[label, count]] * 2
    answer = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)[0]
    assert answer["version"] == "step-1"
    assert pair.both("release_weights") == (["weights"], ["weights"])
    for process, source in (
        (pair.leader, "call update_weights_from_disk"),
        (pair.single, "give state=, or call update_weights"),
    ):
        with pytest.raises(CommandError, match=f"the weights were released; {source} first$"):
            process.call("resume_memory")
    pair.both("update_weights", path=str(other), version="step-1")
    assert pair.both("resume_memory") == ([], [])
    assert pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)[1]["tokens"] == new[1]["tokens"]


def test_what_takes_arrays_of_one_process_is_refused_by_name(pair):
    for command in ("update_in_memory", "resume_with_state"):
        with pytest.raises(CommandError, match="takes arrays of one process, and this engine has nnodes=2") as caught:
            pair.leader.call(command)
        assert caught.value.kind == "ConfigError"


def test_every_program_is_dispatched_in_order_by_one_thread(pair):
    pair.leader.call("count_unordered")
    pair.leader.call("generate", prompts=PROMPTS, params=FULL, **ROWS)
    pair.leader.call("score", sequences=PROMPTS[1:])
    counts = pair.leader.call("dispatch_counts")
    assert counts["ordered"] > 20 and counts["unordered"] == 0, counts
    assert counts["threads"] == ["engine"]


def test_the_programs_of_a_group_are_those_of_one_process(pair):
    ours, theirs = pair.both("program_digests")
    assert ours == theirs and len(ours) >= 7


def test_the_server_info_names_the_followers(pair):
    actual = pair.leader.call("info")
    assert actual["nnodes"] == 2
    ((follower,),) = [actual["followers"]]
    assert follower["rank"] == 1 and follower["address"].startswith("127.0.0.1:")
    assert pair.single.call("info") == {"nnodes": None, "followers": None}


def test_one_process_has_no_thread_and_no_socket_of_a_group(pair):
    assert {"orders", "send orders", "rendezvous"} <= set(pair.leader.call("threads"))
    assert not {"orders", "send orders", "rendezvous", "exit"} & set(pair.single.call("threads"))
    assert pair.single.call("descriptors") == 0


def tapped_calls(path):
    """The ids that entered the experts, [N, K] of each MoE layer of each step."""
    words, at = np.fromfile(path, np.int32), 0
    while at < words.size:
        tokens, top_k = words[at : at + 2]
        yield words[at + 2 : at + 2 + tokens * top_k].reshape(tokens, top_k)
        at += 2 + tokens * top_k


@pytest.mark.parametrize("pair", [TAPPED], indirect=True)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_every_row_is_what_entered_the_experts_of_every_process(pair, prompt):
    pair.leader.call("flush")
    before = [len(list(tapped_calls(path))) for path in pair.taps]
    assert before[0] == before[1]
    (answer,) = pair.leader.call("generate", prompts=[prompt], params=GREEDY, **ROWS)
    pair.leader.call("flush")
    count, ids = answer["rows"][0], np.frombuffer(bytes.fromhex(answer["rows"][1]), np.int32)
    rows = ids.reshape(count, 4, 4)[:, 1:]  # of the MoE layers: the first layer is dense
    assert len(np.unique(rows, axis=0)) > 3, "one row for all tokens proves nothing"
    fed = [min(32, len(prompt) - start) for start in range(0, len(prompt), 32)] + [1] * 12  # tokens of each step
    for path in pair.taps:
        calls = list(tapped_calls(path))[before[0] :]
        steps = [np.stack(calls[at : at + 3], axis=1) for at in range(0, len(calls), 3)]
        entered = np.concatenate([step[:tokens] for step, tokens in zip(steps, fed, strict=False)])
        np.testing.assert_array_equal(entered[:count], rows)


@pytest.mark.parametrize("pair", [BITWISE], indirect=True)
@pytest.mark.parametrize("retracts", [False, True], ids=["never retracted", "retracted every third step"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["no prefix", "cached prefixes"])
@pytest.mark.parametrize("together", [1, 4], ids=["one by one", "together"])
def test_each_bit_is_that_of_each_sequence_alone(pair, alone, together, is_warm, retracts):
    """Eight cells of the grid of deterministic mode, in the group; test_exactness_grid.py has all of them in one
    process."""
    if not is_warm:
        pair.leader.call("flush")
    answers = []
    for start in range(0, len(PROMPTS), together):
        command, more = ("retract_often", {}) if retracts else ("generate", ROWS)
        prompts = PROMPTS[start : start + together]
        answers += pair.leader.call(command, prompts=prompts, params=GREEDY, **more)
    for ours, theirs in zip(answers, alone, strict=True):
        assert (ours["tokens"], ours["bits"], ours["rows"]) == (theirs["tokens"], theirs["bits"], theirs["rows"])
    assert not is_warm or retracts or any(answer["cached"] for answer in answers)


@pytest.fixture(scope="module")
def alone(pair):
    """Every sequence alone, without a cached prefix, in one process."""
    answers = []
    for prompt in PROMPTS:
        pair.single.call("flush")
        answers += pair.single.call("generate", prompts=[prompt], params=GREEDY, **ROWS)
    return answers


@pytest.mark.thorough
def test_codes_of_two_processes_answer_as_those_of_one_to_the_bit(folder, tmp_path_factory):
    """Each process quantises its part of a plain checkpoint as it loads it, at the start and at an update."""
    other = write_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=3, tokenizer=False)
    engine = {"enable_return_routed_experts": True, "deterministic": True, "quantization": "fp8_block"}
    engine, how = engine | {"precompile_bs_paddings": [4]}, {"lazy": True, "fast": True}
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(group(folder, engine, devices=1, ready=False, **how))
        single = stack.enter_context(one_process(folder, engine, devices=2, **how))
        for process in (members[0], single):
            process.wait_ready()
        pair = Pair(BITWISE, members[0], single, [])
        first = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
        pair.both("update_weights", path=str(other), version=1)
        second = pair.assert_alike("generate", prompts=PROMPTS, params=GREEDY, **ROWS)
        assert [answer["tokens"] for answer in second] != [answer["tokens"] for answer in first]
        for process in (*members, single):
            assert process.log().count("163 tensors are quantised to e4m3 as they are loaded") == 2
        assert (members[0].end(), members[1].exit_code(), single.end()) == (0, 0, 0)
