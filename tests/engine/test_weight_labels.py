"""Weight versions of an engine: labels that repeat and come back, and a count that tells every update from every
other. With rows and without."""

import asyncio
import concurrent.futures
import dataclasses
import itertools

import pytest
from flax import nnx

from oracles.testbeds import build_model
from routed_experts import ConfigError, Engine, InvalidRequestError, SamplingParams
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.loop.core import PauseMode
from routed_experts.formats.meta_info import record_from_meta_info
from support.engines import SMALL, PausedRequests, open_engine
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

PROMPT = list(range(5, 45))  # two chunks
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [write_tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed) for seed in (0, 61)]


@pytest.fixture(scope="module")
def engines(folders):
    """One that records rows, and one that does not."""
    with open_engine(folders[0], enable_return_routed_experts=True) as capture, open_engine(folders[0]) as plain:
        yield {True: capture, False: plain}


@pytest.fixture(params=[True, False], ids=["capture", "plain"])
def engine(engines, request):
    yield engines[request.param]
    engines[request.param].resume()


def ask(engine, prompt=PROMPT, **options):
    max_tokens = options.pop("max_tokens", 4)
    rows = {"return_routed_experts": True} if engine.components.capture is not None else {}
    return engine.generate(input_ids=prompt, sampling_params=GREEDY | {"max_tokens": max_tokens}, **rows, **options)


def told(result):
    """What an answer says, as (label, count), and whether its parts agree."""
    meta = result["meta_info"]
    spans, labels = meta["version_spans"], meta["version_labels"]
    num_fed = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    assert spans[0][0] == 0 and spans[-1][1] == num_fed and set(labels) == {str(span[2]) for span in spans}
    by_token = [labels[str(count)] for low, high, count in spans for _ in range(low, high)]
    prompt, sampled = meta["prompt_tokens"], by_token[meta["prompt_tokens"] - 1 :]
    for name, expected in (("weight_versions", sampled), ("prefill_weight_versions", by_token[:prompt])):
        assert [span["version"] for span in meta[name] for _ in range(span["start"], span["end"])] == expected
        assert all(set(span) == {"version", "start", "end"} for span in meta[name]), "SGLang's form, and no more"
    if "routed_experts_info" in meta:
        info = meta["routed_experts_info"]
        assert info["version_spans"] == spans and info["version_labels"] == labels, "counted in two ways"
        record = record_from_meta_info(result)
        assert record.labels == {int(count): label for count, label in labels.items()}
    assert (meta["weight_version"], meta["update_count"]) == (by_token[-1], spans[-1][2])
    return meta["weight_version"], meta["update_count"]


def served(engine):
    version = engine.get_weight_version()
    stats, info = engine.stats(), engine.get_server_info()
    assert (stats.weight_version, stats.update_count) == (version.label, version.update_count)
    assert (info["weight_version"], info["update_count"]) == (version.label, version.update_count)
    return version.label, version.update_count


def state(seed):
    return nnx.split(build_model(tiny_config(), tiny_tensors(tiny_config(), seed=seed)))[1]


def test_an_engine_starts_with_the_label_that_it_is_given(folders):
    for given, label in (({}, "default"), ({"weight_version": None}, "default"), ({"weight_version": 0}, "0")):
        with open_engine(folders[0], **given) as engine:
            assert served(engine) == told(ask(engine)) == (label, 0)
    for wrong in ("x" * 257, 1.5, True, 10**5000):
        with pytest.raises(ConfigError, match=r"^weight_version=.* must be text|above 256; give a shorter label"):
            Engine(str(folders[0]), weight_version=wrong, **SMALL)


def test_two_updates_under_one_label_are_told_apart_by_count(engine, folders):
    (_, count), answers = served(engine), []
    for number, seed in enumerate((1, 0), start=1):
        version = engine.update_weights_from_disk(folders[seed], version="step-4")
        assert version == WeightVersion(label="step-4", update_count=count + number)
        answers.append(ask(engine))
        assert told(answers[-1]) == ("step-4", count + number)
    assert answers[0]["output_ids"] != answers[1]["output_ids"], "weights of one label, and not the same ones"
    spans = [answer["meta_info"]["version_spans"] for answer in answers]
    assert spans[0] != spans[1]


def test_the_same_label_again_is_an_update_and_no_old_page_is_matched(engine):
    label, count = served(engine)
    ask(engine)
    assert ask(engine)["meta_info"]["cached_tokens"] > 0
    assert engine.update_weight_version(label) == WeightVersion(label=label, update_count=count + 1)
    again = ask(engine)
    assert again["meta_info"]["cached_tokens"] == 0 and told(again) == (label, count + 1)


def test_an_older_label_may_come_back_and_a_run_may_resume_from_step_0(engine, folders):
    _, count = served(engine)
    for number, label in enumerate((7, "step-8", 7, "0", 0, 1), start=1):
        engine.update_weights(state(number % 2), version=label)
        assert served(engine) == told(ask(engine)) == (str(label), count + number)
    engine.update_weights(state(0))
    engine.update_weights_from_disk(folders[0])
    assert served(engine) == ("1", count + 8), "without a name the label stays, and the update counts"
    engine.prepare_weights(folders[1], version="step-2")
    assert engine.prepared_version == "step-2" and served(engine) == ("1", count + 8)
    assert engine.commit_weights("step-2") == WeightVersion(label="step-2", update_count=count + 9)
    engine.prepare_weights(folders[0])
    engine.drop_weights()
    engine.prepare_weights(folders[0], update_count=count + 20)  # that of a fleet, which has seen more
    assert engine.commit_weights() == WeightVersion(label="step-2", update_count=count + 20)
    assert engine.update_weight_version("a", update_count=count + 30).update_count == count + 30
    assert told(ask(engine)) == ("a", count + 30)


WRONG = {
    "257 characters": "x" * 257,
    "a fraction": 0.5,
    "a truth value": True,
    "a list": ["a"],
    "half a pair": "\udfff",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_label_that_is_none_is_refused_at_every_door_and_counts_nothing(engine, folders, kind):
    before, answer, wrong = served(engine), ask(engine), WRONG[kind]
    calls = [
        lambda: engine.update_weights(state(1), version=wrong),
        lambda: engine.update_weights_from_disk(folders[1], version=wrong),
        lambda: engine.prepare_weights(folders[1], version=wrong),
        lambda: engine.commit_weights(wrong),
        lambda: engine.update_weight_version(wrong),
        lambda: engine.resume_memory_occupation(state(1), version=wrong),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match=r"^version=") as caught:
            call()
        assert caught.value.param == "version" and engine.prepared_version is None
    with pytest.raises(InvalidRequestError, match="version=None must be text"):
        engine.update_weight_version(None)
    assert served(engine) == before and ask(engine)["output_ids"] == answer["output_ids"]


@pytest.mark.parametrize("cache", ["flush", "keep"])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_across_updates_tells_which_weights_sampled_which_token(engine, mode, cache):
    """Three updates: of weights, of the label alone, and the same label again. SGLang's spans join the last two."""
    label, count = served(engine)
    rows = {"return_routed_experts": True} if engine.components.capture is not None else {}
    calls = PausedRequests(engine, PROMPT, sampling_params=GREEDY | {"max_tokens": 200}, **rows)
    ends = []
    for update in (
        lambda: engine.update_weights(state(61), version="step-1", cache=cache),
        lambda: engine.update_weight_version("again"),
        lambda: engine.update_weights(state(0), version="again", cache=cache),
    ):
        engine.pause(mode=mode)
        ends.append(num_output(engine))
        update()
        advance(engine)
    (result,) = calls.results()
    assert told(result) == ("again", count + 3)
    first, second, _ = ends
    assert result["meta_info"]["weight_versions"] == [
        {"version": label, "start": 0, "end": first},
        {"version": "step-1", "start": first, "end": second},
        {"version": "again", "start": second, "end": 200},
    ]
    prompt = len(PROMPT)
    bounds = [0, *(prompt - 1 + end for end in ends), prompt + 199]
    assert result["meta_info"]["version_spans"] == [
        [low, high, count + number] for number, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    assert result["meta_info"]["prefill_weight_versions"] == [{"version": label, "start": 0, "end": prompt}]


def num_output(engine):
    """Tokens that the only request has generated; it is paused."""

    def count(core):
        (rid,) = core.request_table.live()
        return core.request_table.find(rid).num_output

    return engine.thread.run_drained(lambda: count(engine.components.core))


def advance(engine, outputs=3, *, go_on=True):
    """Let the only request generate a few tokens more, and unless `go_on`, hold it again."""
    core, before = engine.components.core, num_output(engine)

    def run():
        core.resume()
        (rid,) = core.request_table.live()
        while core.request_table.find(rid).num_output < before + outputs:
            engine.thread.deliver(core.step().outs)
        if not go_on:
            core.pause(PauseMode.IN_PLACE)

    engine.thread.run_between_steps(run)


@pytest.mark.parametrize("aborts", [True, False])
def test_a_prompt_that_is_fed_across_an_update_tells_both(engine, aborts):
    """Also where it is aborted before its first token."""
    label, count = served(engine)
    long, core = list(range(5, 305)), engine.components.core  # ten chunks
    after = WeightVersion(label=f"between {aborts}", update_count=count + 1)

    def update_after_96_tokens():
        core.resume()
        (req,) = (core.request_table.find(rid) for rid in core.request_table.live())
        while req.num_committed < 96:
            engine.thread.deliver(core.step().outs)
        engine.thread.deliver(core.drain().outs)
        core.update_weights(None, version=after, cache="keep")
        if aborts:
            core.abort(req.rid)
        return req.num_fed

    engine.flush_cache()
    engine.pause(mode="in_place")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, engine, long)
        while not engine.thread.run_between_steps(lambda: core.request_table.num_live):
            assert not call.done()
        fed = engine.thread.run_between_steps(update_after_96_tokens)
        meta = call.result(60)["meta_info"]
    assert 96 <= fed < 300
    most = 1 if aborts else 2
    assert meta["version_spans"] == [[0, fed, count], [fed, 303, count + 1]][:most]
    prefill = [{"version": label, "start": 0, "end": fed}, {"version": after.label, "start": fed, "end": 300}]
    assert meta["prefill_weight_versions"] == prefill[:most]
    assert (meta["weight_version"], meta["update_count"]) == (after.label, count + 1)
    assert meta["weight_versions"] == [{"version": after.label, "start": 0, "end": 0 if aborts else 4}]


def test_every_output_of_a_stream_tells_its_labels_and_the_last_one_counts_too(engine):
    _, count = served(engine)
    engine.update_weight_version("streamed")
    rows = {"return_routed_experts": True} if engine.components.capture is not None else {}
    *chunks, last = engine.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_tokens": 9}, stream=True, **rows)
    assert chunks and told(last) == ("streamed", count + 1)
    for chunk in (*chunks, last):
        meta = chunk["meta_info"]
        assert (meta["weight_version"], meta["update_count"]) == ("streamed", count + 1)
        assert meta["weight_versions"] == [{"version": "streamed", "start": 0, "end": len(chunk["output_ids"])}]
        assert ("version_spans" in meta) == ("prefill_weight_versions" in meta) == (chunk is last)


def test_outputs_in_vllms_words_tell_both(engine):
    label, count = served(engine)
    outputs = []

    async def read():
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60)
        outputs.extend([output async for output in engine.stream(PROMPT, params, output_kind="cumulative")])

    engine.pause(mode="in_place")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(asyncio.run, read())
        while not engine.thread.run_between_steps(lambda: engine.components.core.request_table.num_live):
            assert not call.done()
        advance(engine, 5, go_on=False)
        first = num_output(engine)
        engine.update_weight_version(label)
        engine.resume()
        call.result(60)
    (output,) = outputs[-1].outputs
    assert [dataclasses.astuple(span) for span in output.weight_versions] == [
        (label, 0, first, count),
        (label, first, 60, count + 1),
    ]
    assert [dataclasses.astuple(span) for span in output.prefill_weight_versions] == [(label, 0, len(PROMPT), count)]


def test_a_score_tells_both(engine):
    _, count = served(engine)
    engine.update_weight_version("scored")
    score = engine.score(PROMPT)
    assert (score.weight_version, score.update_count) == ("scored", count + 1)
    if score.routed_experts is not None:
        assert score.routed_experts.labels == {count + 1: "scored"}
