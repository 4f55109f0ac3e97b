"""Files that come again are found as they were prepared, and the oldest are given up."""

from __future__ import annotations

from octavo_engine.core.media.prepare import PreparedPicture
from octavo_engine.core.media.prepared import PreparedMedia
from octavo_engine.state.media import MediaItem


def prepared(name: bytes, num_bytes: int) -> PreparedPicture:
    return PreparedPicture((MediaItem(name, 1, num_bytes // 3, bytes(num_bytes)),))


def test_a_file_is_found_for_prompts_with_as_many() -> None:
    held, one = PreparedMedia(), prepared(b"a", 30)
    held.hold((b"a", 1), one)
    assert held.find((b"a", 1)) is one
    assert held.find((b"a", 2)) is None  # it may be cut in another way there
    assert held.find((b"b", 1)) is None


def test_the_least_recently_used_are_given_up() -> None:
    held = PreparedMedia(max_bytes=100)
    for name in (b"a", b"b"):
        held.hold((name, 1), prepared(name, 45))
    assert held.find((b"a", 1))
    held.hold((b"c", 1), prepared(b"c", 45))
    assert held.find((b"b", 1)) is None
    assert held.find((b"a", 1)) and held.find((b"c", 1))


def test_what_is_larger_than_all_room_is_not_held_and_counts_no_more() -> None:
    held = PreparedMedia(max_bytes=100)
    held.hold((b"large", 1), prepared(b"large", 300))
    assert held.find((b"large", 1)) is None
    for _ in range(3):  # the same again takes no more room
        held.hold((b"a", 1), prepared(b"a", 90))
    assert held.find((b"a", 1))
