"""Files that clients named are found by their owners alone, and the oldest are given up."""

from __future__ import annotations

import pytest

from octavo_engine.core.media.held import HeldMedia
from octavo_engine.errors import InvalidRequest


def test_a_file_is_found_by_its_owner_alone() -> None:
    held = HeldMedia()
    held.hold(b"one", "cat", b"CAT")
    assert held.find(b"one", "cat", "at") == b"CAT"
    held.hold(b"two", "cat", b"DOG")
    assert held.find(b"one", "cat", "at") == b"CAT"
    with pytest.raises(InvalidRequest, match=r"at: nothing is held under the uuid 'cat'.*again"):
        held.find(b"three", "cat", "at")


def test_a_name_holds_what_was_sent_last() -> None:
    held = HeldMedia(max_bytes=6)
    for data in (b"abc", b"defg", b"hi"):
        held.hold(b"", "it", data)
        assert held.find(b"", "it", "at") == data
    held.hold(b"", "other", b"four")  # both fit: what had the name before is not counted
    assert held.find(b"", "it", "at") == b"hi"


def test_the_least_recently_used_are_given_up() -> None:
    held = HeldMedia(max_bytes=9)
    for name in "abc":
        held.hold(b"", name, name.encode() * 3)
    held.find(b"", "a", "at")
    held.hold(b"", "d", b"ddd")
    for name in "acd":
        assert held.find(b"", name, "at")
    with pytest.raises(InvalidRequest, match="nothing is held") as refused:
        held.find(b"", "b", "at")
    assert refused.value.code == "media_not_held"
    held.hold(b"", "large", bytes(10))  # of what never fits nothing is kept, nor of others
    with pytest.raises(InvalidRequest):
        held.find(b"", "large", "at")
