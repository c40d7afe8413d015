"""The key of a request: what is refused, and how the two names of it are combined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.extra_key import MAX_EXTRA_KEY_CHARS, check_extra_key, combine_keys


def test_one_name_alone_is_the_key():
    assert combine_keys(None, None) is None
    assert combine_keys("a", None) == combine_keys(None, "a") == combine_keys("a", "") == combine_keys("", "a") == "a"
    assert combine_keys(None, "") == ""


KEYS = st.text(st.sampled_from("a1:"), min_size=1, max_size=12)


@given(first=st.tuples(KEYS, KEYS), second=st.tuples(KEYS, KEYS))
def test_two_pairs_have_two_keys(first, second):
    assert (combine_keys(*first) == combine_keys(*second)) == (first == second)


def test_the_salt_stands_before_the_key():
    assert combine_keys("bc", "a") == "1:abc" != combine_keys("c", "ab") == "2:abc"


@pytest.mark.parametrize(
    ("extra_key", "cache_salt", "param", "words"),
    [
        ("x" * 4097, None, "extra_key", "extra_key has 4097 characters, above the limit of 4096; give a shorter one"),
        (None, "x" * 4097, "cache_salt", "cache_salt has 4097 characters, above the limit of 4096; give a shorter one"),
        ("x", "x" * 4097, "cache_salt", "cache_salt has 4097 characters"),
        (
            "x" * 3000,
            "x" * 2000,
            "extra_key",
            "extra_key of 3000 characters and cache_salt of 2000 make a key of 5005, above the limit of 4096; shorten",
        ),
    ],
)
def test_a_long_key_is_refused_by_name(extra_key, cache_salt, param, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        combine_keys(extra_key, cache_salt)
    assert caught.value.param == param


def test_the_longest_key_is_taken():
    longest = "x" * MAX_EXTRA_KEY_CHARS
    assert check_extra_key(longest) == longest
    assert len(combine_keys("x" * 2000, "x" * 2091)) == MAX_EXTRA_KEY_CHARS
