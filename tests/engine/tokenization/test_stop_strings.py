"""Stop strings against their slow definition, however the text is cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.tokenization.stop_strings import StopStrings


def slow(text, stops, include):
    """The match that is complete first, of those the longest: (shown text, stop)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def stream(pieces, stops, include=False):
    search = StopStrings(stops, include=include)
    shown = []
    for piece in pieces:
        text, stop = search.push(piece)
        shown.append(text)
        if stop is not None:
            assert search.flush() == ""
            return shown, stop
    shown.append(search.flush())
    return shown, None


def test_text_without_a_stop_passes_through_at_once():
    search = StopStrings(["END"])
    assert search.push("hello") == ("hello", None)
    assert search.flush() == ""


def test_a_possible_beginning_is_held_until_it_is_decided():
    search = StopStrings(["STOP"])
    assert search.push("aS") == ("a", None)
    assert search.push("T") == ("", None)
    assert search.push("x") == ("STx", None)
    assert search.push("STO") == ("", None)
    assert search.flush() == "STO"


def test_a_stop_cut_at_every_character_is_found():
    for cut in range(4):
        pieces = ["one " + "STOP"[:cut], "STOP"[cut:] + " two"]
        assert stream(pieces, ["STOP"]) == (["one ", ""], "STOP")
    assert stream(["one STOP", " two"], ["STOP"]) == (["one "], "STOP")


def test_nothing_is_shown_after_a_match():
    search = StopStrings(["b"])
    assert search.push("abc") == ("a", "b")
    assert search.push("more") == ("", "b")
    assert search.matched == "b"


def test_include_shows_the_stop_itself_and_nothing_past_it():
    assert stream(["x<e", "nd>y"], ["<end>"], include=True) == (["x", "<end>"], "<end>")


def test_overlapping_and_look_alike_stops():
    assert stream(["aaab"], ["aa"]) == ([""], "aa")
    assert stream(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert stream(["xab"], ["b", "ab"]) == (["x"], "ab")
    assert stream(["aab"], ["ab"]) == (["a"], "ab")


def test_longer_than_the_text_and_outside_the_basic_plane():
    assert stream(["héllo", "🎉"], ["🎉🎉🎉"]) == (["héllo", "", "🎉"], None)
    assert stream(["a🎉", "🎉b"], ["🎉🎉"]) == (["a", ""], "🎉🎉")


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings([""])


LETTERS = st.sampled_from("abc")


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    pieces=st.lists(st.text(LETTERS, max_size=5), max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_equals_the_slow_definition_for_any_cuts(pieces, stops, include):
    whole = "".join(pieces)
    text, stop = slow(whole, stops, include)
    shown, found = stream(pieces, stops, include)
    assert ("".join(shown), found) == (text, stop)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    pieces=st.lists(st.text(LETTERS, max_size=4), max_size=8),
    future=st.text(LETTERS, max_size=6),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_never_shows_what_a_later_text_would_take_back(pieces, future, stops):
    search = StopStrings(stops)
    shown = "".join(search.push(piece).text for piece in pieces)
    final, _ = slow("".join(pieces) + future, stops, include=False)
    assert final.startswith(shown)


def test_time_grows_with_the_text_not_with_its_square():
    def seconds(length):
        search = StopStrings(["a" * 200 + "b"])
        start = time.thread_time()
        for _ in range(length // 50):
            search.push("a" * 50)
        return time.thread_time() - start

    seconds(1000)
    assert min(seconds(80_000) for _ in range(3)) < 8 * min(seconds(20_000) for _ in range(3))
