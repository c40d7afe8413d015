"""Incremental text equals one-shot text, however the tokens are cut, whatever bytes they hold; and takes linear
work."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from routed_experts.core.errors import InvalidRequestError
from routed_experts.engine.requests.detokenizer import IncrementalDetokenizer
from routed_experts.engine.requests.tokenizer import Tokenizer
from support.tiny_checkpoint import SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer, write_tiny_tokenizer

CHARACTERS = "ab ab ab  \n<|>\té€ñ中文字한🙂👩‍👩‍👧‍👦𝕏\u0301\u200d\ufffd\x00ﬁ"


def save_backend(folder, backend):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_directory(folder)


def sentencepiece_like(decoder):
    """A vocabulary as Mixtral's: raw bytes, words that begin with a space mark, a special token."""
    words = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"abé中", "▁a", "▁▁", "ab", "▁ab", "ba▁"]
    backend = Backend(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoder
    return backend


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    mixed = "".join(random.Random(0).choices(CHARACTERS, k=4000))
    merged = train_tokenizer(mixed, 700)
    merged.add_tokens(["a b é", "Ġ 中"])  # with characters that stand for no byte: these are text as they are
    mixtral = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return {
        "byte-level": Tokenizer.from_directory(write_tiny_tokenizer(folder / "tiny")),
        "byte-level, merges across characters": save_backend(folder / "mixed", merged),
        "byte fallback": save_backend(folder / "fallback", sentencepiece_like(mixtral)),
        "metaspace": save_backend(folder / "metaspace", sentencepiece_like(decoders.Metaspace())),
        "no decoder": save_backend(folder / "none", sentencepiece_like(None)),
    }


def random_ids(rng, tokenizer):
    """Half text, half any ids at all: broken characters, special tokens, ids that are in no vocabulary."""
    if rng.random() < 0.5:
        return tokenizer.encode("a b é".join("".join(rng.choices(CHARACTERS, k=rng.randrange(20))) for _ in range(2)))
    return rng.choices(range(tokenizer.vocab_size + 5), k=rng.randrange(40))


def random_stops(rng, text):
    """Pieces of the text itself, some overlapping, and strings that nearly are."""
    stops = []
    for _ in range(rng.randrange(5)):
        first = rng.randrange(len(text) + 1)
        piece = text[first : first + rng.randrange(1, 12)]
        stops.append(piece if rng.random() < 0.6 else piece + rng.choice(CHARACTERS))
    return tuple(stop for stop in stops if stop)


def first_stop(text, stops):
    """The oracle: the stop string with the smallest end, then the longest; by trying every end."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None, len(text)


def split(rng, ids):
    rest, parts = list(ids), []
    while rest:
        size = rng.choice((0, 1, 1, 1, 2, 3, 7, len(rest)))
        parts.append(rest[:size])
        rest = rest[size:]
    return parts


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "metaspace", "no decoder"])
def test_an_output_continues_the_text_of_its_prompt(tokenizers, kind):
    tokenizer, rng, num_checked = tokenizers[kind], random.Random(3), 0
    for _ in range(600):
        prompt, output = random_ids(rng, tokenizer)[:6], random_ids(rng, tokenizer)
        skip = rng.random() < 0.5
        shown = [
            token for token in prompt if tokenizer.token_string(token) and not (skip and tokenizer.is_special(token))
        ]
        if not shown or (tokenizer.is_byte(shown[-1]) and any(map(tokenizer.is_byte, output))):
            continue  # bytes of a character may join across the border
        before = tokenizer.decode(prompt, skip_special_tokens=skip)
        if kind == "byte-level" and before.endswith("\ufffd"):
            continue
        text = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
        deltas = [detokenizer.push(part) for part in split(rng, output)]
        assert before + "".join(deltas) + detokenizer.finish() == text, (prompt, output, skip)
        num_checked += 1
    assert num_checked > 50


def test_an_output_after_a_shown_token_near_the_end_of_the_prompt_begins_no_text(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    ids = {tokenizer.token_string(index): index for index in range(tokenizer.vocab_size)}
    byte, special, word = ids["<0xE4>"], ids["<s>"], ids["▁ab"]
    for prompt, text in (
        ([], "ab"),
        ([special], "ab"),  # it is not shown, and a text begins
        ([special, word], " ab"),
        ([word, special], " ab"),
        ([word, *[byte] * 12], " ab"),
        ([byte] * 12, " ab"),
        ([special, *[byte] * 3, special], " ab"),
        ([byte] * 300, " ab"),
        ([word, *[byte] * 300], " ab"),
        ([word, *[special] * 4], " ab"),
        ([word, *[special] * 5], "ab"),  # as far from the end as other servers look
        ([byte, *[special] * 4], " ab"),
        ([byte, *[special] * 5], "ab"),
        ([word, tokenizer.vocab_size + 7], " ab"),
    ):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
        assert detokenizer.push([word]) + detokenizer.finish() == text, prompt
    assert IncrementalDetokenizer(tokenizer, prompt_ids=[special], skip_special_tokens=False).push([word]) == " ab"
    after_bytes = IncrementalDetokenizer(tokenizer, prompt_ids=[byte] * 300)
    assert after_bytes.push([ids["<0xC3>"], ids["<0xA9>"], word]) + after_bytes.finish() == "é ab"
    in_prompt = IncrementalDetokenizer(tokenizer, prompt_ids=[word], stop=("b a",))
    assert (in_prompt.push([word]) + in_prompt.finish(), in_prompt.stopped) == (" ab", None)
    in_output = IncrementalDetokenizer(tokenizer, prompt_ids=[word], stop=(" ",))
    assert (in_output.push([word]), in_output.stopped) == ("", " ")


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("byte-level", 1000),
        ("byte-level, merges across characters", 1000),
        ("byte fallback", 500),
        ("metaspace", 200),
        ("no decoder", 200),
    ],
)
def test_joined_deltas_equal_the_one_shot_decode_cut_at_the_first_stop(tokenizers, kind, runs):
    tokenizer, rng, num_stopped = tokenizers[kind], random.Random(1), 0
    for _ in range(runs):
        ids, skip, include = random_ids(rng, tokenizer), rng.random() < 0.5, rng.random() < 0.5
        text = tokenizer.decode(ids, skip_special_tokens=skip)
        stops = random_stops(rng, text)
        stopped, end = first_stop(text, stops)
        expected = text[: end if include or stopped is None else end - len(stopped)]

        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, stop=stops, include_stop_str=include)
        deltas = [detokenizer.push(part) for part in split(rng, ids)]
        deltas.append(detokenizer.finish())

        assert "".join(deltas) == expected, (ids, stops, skip, include)
        assert detokenizer.stopped == stopped
        assert detokenizer.num_tokens <= len(ids)
        assert (detokenizer.push([5, 6]), detokenizer.finish()) == ("", "")
        num_stopped += stopped is not None
    assert num_stopped > runs // 5


def test_num_tokens_ends_with_the_token_that_completed_the_stop(tokenizers):
    rng, checked = random.Random(2), 0
    for tokenizer in (tokenizers["byte-level"], tokenizers["byte-level, merges across characters"]):
        for _ in range(300):
            ids = random_ids(rng, tokenizer)
            text = tokenizer.decode(ids)
            stops = tuple(stop for stop in random_stops(rng, text) if "\ufffd" not in stop)
            stopped, end = first_stop(text, stops)
            if stopped is None:
                continue
            # the fewest tokens whose own text already reaches the end of the stop string, unchanged by what follows
            expected = next(n for n in range(1, len(ids) + 1) if tokenizer.decode(ids[:n])[:end] == text[:end])
            detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
            for part in split(rng, ids):
                detokenizer.push(part)
            assert (detokenizer.stopped, detokenizer.num_tokens) == (stopped, expected), (ids, stops)
            checked += 1
    assert checked > 100


def byte_ids(tokenizer, data):
    """The raw bytes of a byte fallback."""
    ids = {tokenizer.token_string(index): index for index in range(tokenizer.vocab_size)}
    return [ids[f"<0x{byte:02X}>"] for byte in data]


def ends_within_a_character(tokenizer, ids):
    """Whether another byte could complete the last character."""
    run = b""
    for token in reversed(ids):
        if not tokenizer.is_byte(token):
            break
        run = tokenizer.token_bytes(token) + run
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def ids_with_raw_bytes(rng, tokenizer):
    """Words and runs of raw bytes: whole characters, halves of them, bytes of none."""
    words, ids = ("ab", "▁a", "▁", "中"), []
    known = {tokenizer.token_string(index): index for index in range(tokenizer.vocab_size)}
    for _ in range(rng.randrange(1, 12)):
        data = rng.choice("\n \té€🙂\ufffda").encode()
        kinds = ([known[rng.choice(words)]], byte_ids(tokenizer, data), byte_ids(tokenizer, data[:-1]))
        ids += rng.choices((*kinds, byte_ids(tokenizer, b"\x80")), (4, 12, 2, 1))[0]
    return ids


def test_a_sequence_ends_at_the_raw_byte_that_completes_a_stop_string(tokenizers):
    """The oracle decodes all tokens so far after each, but within a character."""
    tokenizer, rng, num_stopped, num_within = tokenizers["byte fallback"], random.Random(4), 0, 0
    for _ in range(2000):
        ids, include = ids_with_raw_bytes(rng, tokenizer), rng.random() < 0.5
        stops = tuple(rng.choices(("\n", "\n\n", "é", "a", "\n a", "€🙂", "\ufffd", "b\ufffd", "ab", " \n"), k=2))
        expected, count = tokenizer.decode(ids), len(ids)
        for n in range(1, len(ids) + 1):
            if n < len(ids) and ends_within_a_character(tokenizer, ids[:n]):
                continue
            text = tokenizer.decode(ids[:n])
            stopped, end = first_stop(text, stops)
            if stopped is not None:
                expected, count = text[: end if include else end - len(stopped)], n
                break
        else:
            stopped = None
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stops, include_stop_str=include)
        deltas = [detokenizer.push(part) for part in split(rng, ids)]
        deltas.append(detokenizer.finish())
        ended = ("".join(deltas), detokenizer.stopped, detokenizer.num_tokens)
        assert ended == (expected, stopped, count), (ids, stops)
        num_stopped += stopped is not None
        within = count < len(ids) and all(map(tokenizer.is_byte, ids[count - 1 : count + 1]))
        num_within += within and stopped is not None
    assert num_stopped > 700 and num_within > 300, (num_stopped, num_within)


def test_raw_bytes_of_an_unfinished_character_meet_no_stop_string_until_the_end(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    for character in "é€🙂":
        detokenizer = IncrementalDetokenizer(tokenizer, stop=("\ufffd", character))
        *first, last = byte_ids(tokenizer, character.encode())
        assert (detokenizer.push(first), detokenizer.stopped) == ("", None)
        aborted, ended, copied = detokenizer.fork(), detokenizer.fork(), detokenizer.fork()
        assert (detokenizer.push([last]), detokenizer.stopped) == ("", character)
        assert (ended.finish(), ended.stopped) == ("", "\ufffd")
        assert (aborted.finish(search=False), aborted.stopped) == ("\ufffd" * len(first), None)
        assert (copied.push([last]), copied.stopped) == ("", character), "a copy is independent"


def test_raw_bytes_are_text_once_one_is_invalid(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    (word,) = tokenizer.encode("中")
    ids = [*byte_ids(tokenizer, b"\n\xc3\xa9\xc3\n\xc3\xa9"), word]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "", "\ufffd" * 5, "\ufffd", "\ufffd", "中"]
    stopping = IncrementalDetokenizer(tokenizer, stop=("\ufffd\ufffd中",))
    assert (stopping.push(ids), stopping.stopped) == ("\ufffd" * 5, "\ufffd\ufffd中")


def test_raw_bytes_of_a_surrogate_are_invalid_from_the_second_on(tokenizers):
    """No third byte makes a character of them, so the text is final, and a stop string is met there."""
    tokenizer = tokenizers["byte fallback"]
    ids = byte_ids(tokenizer, b"\xed\xa0\x80")
    detokenizer, stopping = (IncrementalDetokenizer(tokenizer, stop=stop) for stop in ((), ("\ufffd",)))
    assert [detokenizer.push([token]) for token in ids] == ["", "\ufffd" * 2, "\ufffd"]
    assert (stopping.push(ids), stopping.stopped, stopping.num_tokens) == ("", "\ufffd", 2)
    whole = IncrementalDetokenizer(tokenizer)
    assert whole.push(byte_ids(tokenizer, "\ud7ff".encode())) + whole.finish() == "\ud7ff"


def test_what_an_abort_ends_has_the_text_that_was_held_and_no_stop_string(tokenizers):
    for text, stop in (("ab", "abz"), ("ab\n", "ab\nz"), ("\n", "\n\n")):
        tokenizer = tokenizers["byte fallback"]
        ids = [i for part in text for i in (tokenizer.encode(part) if part != "\n" else byte_ids(tokenizer, b"\n"))]
        detokenizer = IncrementalDetokenizer(tokenizer, stop=(stop,))
        expected = IncrementalDetokenizer(tokenizer)
        assert detokenizer.push(ids) + detokenizer.finish(search=False) == expected.push(ids) + expected.finish()
        assert detokenizer.stopped is None


def test_a_copy_within_a_run_of_raw_bytes_reads_ahead_by_itself(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    (newline,), (word,) = byte_ids(tokenizer, b"\n"), tokenizer.encode("中")
    first = IncrementalDetokenizer(tokenizer, stop=("\n\n\n",))
    assert first.push([newline, newline]) == ""
    other = first.fork()
    assert other.push([word, newline, newline]) == "\n\n中" and other.stopped is None
    assert (first.push([newline]), first.stopped) == ("", "\n\n\n")
    assert (other.push([newline]), other.stopped) == ("", "\n\n\n")


def test_raw_bytes_behind_a_word_are_read_ahead_in_its_context(tokenizers):
    """The decoder strips a space at the beginning of a text alone."""
    tokenizer = tokenizers["byte fallback"]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=(" \n",))
    ids = [*tokenizer.encode("中"), *byte_ids(tokenizer, b" \n")]
    assert (detokenizer.push(ids), detokenizer.stopped) == ("中", " \n")


def test_raw_bytes_before_min_tokens_meet_no_stop_string(tokenizers):
    tokenizer = tokenizers["byte fallback"]
    newline, (word,) = byte_ids(tokenizer, b"\n"), tokenizer.encode("中")
    for ids, text, count in (
        ([*newline * 2, word], "\n\n中", 3),  # of the first tokens
        ([*newline * 3, word], "\n\n", 3),
        ([newline[0], word, word, *newline], "\n中中", 4),
        ([*byte_ids(tokenizer, "é".encode()), *newline, word], "é", 3),
    ):
        detokenizer = IncrementalDetokenizer(tokenizer, stop=("\n",), min_tokens=3)
        assert (detokenizer.push(ids) + detokenizer.finish(), detokenizer.num_tokens) == (text, count), ids
    unfinished = IncrementalDetokenizer(tokenizer, stop=("\ufffd",), min_tokens=3)
    assert (unfinished.push(byte_ids(tokenizer, b"\xf0\x9f")) + unfinished.finish(), unfinished.stopped) == (
        "\ufffd\ufffd",
        None,
    )


def test_without_stop_strings_only_an_unfinished_character_waits(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("a🙂b")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.finish() == ""


def test_unfinished_character_is_flushed_as_one_replacement(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("a🙂")[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert (detokenizer.push(ids), detokenizer.finish()) == ("a", "\ufffd")


def test_text_that_may_begin_a_stop_is_held_and_released(tokenizers):
    tokenizer = tokenizers["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("###END", "#x"))
    assert detokenizer.push(tokenizer.encode("ok ##")) == "ok "
    assert detokenizer.push(tokenizer.encode("#EN")) == ""
    assert detokenizer.push(tokenizer.encode("T #")) == "###ENT "
    assert detokenizer.push(tokenizer.encode("x never seen")) == ""
    assert (detokenizer.stopped, detokenizer.finish()) == ("#x", "")


def test_stop_met_in_the_flushed_text(tokenizers):
    tokenizer = tokenizers["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("\ufffd",))
    assert (detokenizer.push(tokenizer.encode("a🙂")[:-1]), detokenizer.finish(), detokenizer.stopped) == (
        "a",
        "",
        "\ufffd",
    )


def test_special_tokens_can_be_stop_strings_when_they_are_shown(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("hi<|im_end|>more")
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, stop=("<|im_end|>",))
    hidden = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, stop=("<|im_end|>",))
    assert (shown.push(ids) + shown.finish(), shown.stopped) == ("hi", SPECIAL_TOKENS[2])
    assert (hidden.push(ids) + hidden.finish(), hidden.stopped) == ("himore", None)


def test_empty_stop_string_is_refused(tokenizers):
    with pytest.raises(InvalidRequestError, match="empty string"):
        IncrementalDetokenizer(tokenizers["byte-level"], stop=("a", ""))


@pytest.mark.parametrize(
    ("kind", "pattern", "stops"),
    [
        ("byte-level", "a", ("a" * 255 + "b", "a" * 100 + "c")),  # every character may begin a stop string
        ("byte-level", "ab", ("ab" * 128 + "x",)),
        ("byte-level", "broken", ()),  # continuation bytes for ever
        ("byte-level", "broken", ("\ufffd" * 200 + "x",)),
        ("byte fallback", "broken", ("b" * 16,)),  # one run of raw bytes
        ("byte fallback", "a", ("a" * 255 + "b",)),
        ("byte fallback", b"\n", ("\n" * 255 + "b",)),  # one run of whole characters
        ("byte fallback", "🙂".encode(), ("🙂" * 20 + "b", "\ufffd")),
    ],
)
def test_twice_the_text_is_twice_the_work(tokenizers, kind, pattern, stops):
    tokenizer = tokenizers[kind]
    broken = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80")
    if isinstance(pattern, bytes):
        unit = byte_ids(tokenizer, pattern)
    else:
        unit = [broken] if pattern == "broken" else tokenizer.encode(pattern)
    works = []
    for size in (1 << 14, 1 << 15):
        ids = (unit * size)[:size]
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
        built = detokenizer.work
        for first in range(0, size, 64):
            detokenizer.push(ids[first : first + 64])
        detokenizer.finish()
        assert detokenizer.num_tokens == size
        works.append(detokenizer.work - built)
    assert works[1] < 2.1 * works[0]
    assert works[1] < 8 * (1 << 15)


def test_every_id_of_the_tiny_vocabulary_alone(tokenizers):
    tokenizer = tokenizers["byte-level"]
    for token_id in range(VOCAB_SIZE):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert detokenizer.push([token_id]) + detokenizer.finish() == tokenizer.decode(
            [token_id], skip_special_tokens=False
        )


def test_no_stop_string_is_met_before_min_tokens(tokenizers):
    tokenizer = tokenizers["byte-level"] if "byte-level" in tokenizers else next(iter(tokenizers.values()))
    ids = tokenizer.encode("ab ab ab ab")
    for least in range(len(ids) + 1):
        text = IncrementalDetokenizer(tokenizer, stop=("b",), min_tokens=least)
        pushed = text.push(ids) + text.finish()
        late = tokenizer.decode(ids)[len(tokenizer.decode(ids[: max(least - 1, 0)])) :]
        assert (text.stopped == "b") == ("b" in late), least
        assert (
            pushed
            == tokenizer.decode(ids)[
                : len(tokenizer.decode(ids)) - len(late) + (late.index("b") if "b" in late else len(late))
            ]
        )
