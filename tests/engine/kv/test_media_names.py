"""Pictures behind equal placeholders: what their blocks are called, and who finds them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from octavo_engine.core.kv_events.recorder import KVEventRecorder
from octavo_engine.kv.manager import KVManager
from octavo_engine.kv.media_names import MediaPart, num_agreeing, parts_of
from octavo_engine.protocol.kv_events import BlockStored
from octavo_engine.scheduling.invariants import check_cache
from octavo_engine.state.media import MediaSpan
from octavo_router.signals.kv_residency import _is_opaque
from tests.fakes.requests import make_sequence

if TYPE_CHECKING:
    from octavo_engine.state.sequence import Sequence

PICTURE = 90  # the placeholder
RED, BLUE = b"r" * 16, b"b" * 16
# Another picture whose words are RED's: only the rest of the digest differs.
ROT = b"r" * 4 + b"x" * 12


def prompt(before: int = 20, length: int = 24, after: int = 10) -> list[int]:
    return [*range(before), *[PICTURE] * length, *range(40, 40 + after)]


def seen(digest: bytes, first: int = 20, length: int = 24) -> tuple[MediaSpan, ...]:
    return (MediaSpan(digest, first, length),)


def compute(kv: KVManager, sequence: Sequence, *, release: bool = True) -> int:
    """Admit and compute all of it; how many tokens were found."""
    kv.name_blocks(sequence)
    match = kv.match(sequence)
    kv.admit(sequence, match)
    found = sequence.num_computed_tokens
    sequence.num_computed_tokens = len(sequence.token_ids)
    kv.publish(sequence)
    kv.end_step()
    check_cache(kv)
    if release:
        kv.release(sequence)
        check_cache(kv)
    return found


@pytest.mark.parametrize("other", [BLUE, ROT, None], ids=["other", "same-words", "no-picture"])
def test_another_picture_is_found_up_to_its_first_token_only(other):
    kv = KVManager(32)
    assert compute(kv, make_sequence(prompt(), media=seen(RED))) == 0
    media = () if other is None else seen(other)
    assert compute(kv, make_sequence(prompt(), media=media)) == 20


def test_the_same_picture_is_found_whole():
    kv = KVManager(32)
    compute(kv, make_sequence(prompt(), media=seen(RED)))
    assert compute(kv, make_sequence(prompt(), media=seen(RED))) == 53


def test_a_text_of_placeholders_is_no_picture():
    kv = KVManager(32)
    compute(kv, make_sequence(prompt()))
    assert compute(kv, make_sequence(prompt(), media=seen(RED))) == 20


def test_equal_pictures_at_other_places_are_told_apart():
    kv = KVManager(64)
    both = (MediaSpan(RED, 20, 24), MediaSpan(BLUE, 44, 24))
    tokens = [*range(20), *[PICTURE] * 48, 7]
    compute(kv, make_sequence(tokens, media=both))
    assert compute(kv, make_sequence(tokens, media=(both[0], MediaSpan(RED, 44, 24)))) == 44
    assert compute(kv, make_sequence(tokens, media=(MediaSpan(RED, 20, 48),))) == 44
    shifted = (MediaSpan(RED, 20, 23), MediaSpan(BLUE, 43, 25))
    assert compute(kv, make_sequence(tokens, media=shifted)) == 43


def test_answers_extend_the_names_of_blocks_with_pictures():
    kv = KVManager(32)
    sequence = make_sequence(prompt(after=2), media=seen(RED))  # 46 tokens: the third is filled
    compute(kv, sequence, release=False)
    sequence.token_ids += [1, 2, 3]
    kv.grow(sequence)
    sequence.num_computed_tokens = 49
    kv.publish(sequence)
    check_cache(kv)
    kv.release(sequence)
    tokens = [*prompt(after=2), 1, 2, 3, 4]
    assert compute(kv, make_sequence(tokens, media=seen(RED))) == 49
    assert compute(kv, make_sequence(tokens, media=seen(BLUE))) == 20


def test_found_tokens_are_never_of_another_picture():
    """Against the plain rule: the longest common prefix of (token, picture, place in it)."""
    rng = random.Random(5)
    for _ in range(300):
        kv = KVManager(64)
        seen_before: list[list[tuple[int, bytes, int]]] = []
        for _ in range(4):
            tokens: list[int] = []
            media: list[MediaSpan] = []
            facts: list[tuple[int, bytes, int]] = []
            for _ in range(rng.randint(1, 4)):
                if rng.random() < 0.5:
                    digest, length = rng.choice((RED, BLUE, ROT)), rng.choice((3, 16, 20))
                    media.append(MediaSpan(digest, len(tokens), length))
                    facts += [(PICTURE, digest, i) for i in range(length)]
                    tokens += [PICTURE] * length
                else:
                    text = [PICTURE if rng.random() < 0.3 else 1] * rng.choice((1, 5, 16))
                    facts += [(token, b"", 0) for token in text]
                    tokens += text
            found = compute(kv, make_sequence([*tokens, 3], media=tuple(media)))
            facts.append((3, b"", 0))
            longest = max((_common(facts, other) for other in seen_before), default=0)
            assert found <= longest
            # Whole blocks are found for sure; in the last one the nearest sibling by words counts.
            assert found >= min(longest, len(tokens)) // 16 * 16
            seen_before.append(facts)


def _common(left: list[tuple[int, bytes, int]], right: list[tuple[int, bytes, int]]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_a_part_names_the_tokens_of_a_picture_in_a_block():
    spans = seen(RED)
    assert parts_of(spans, 0) == ()
    assert parts_of(spans, 1) == (MediaPart(RED, 4, 12, 0),)
    assert parts_of(spans, 2) == (MediaPart(RED, 0, 12, 12),)
    assert num_agreeing(parts_of(spans, 1), (), 16) == 4
    assert num_agreeing(parts_of(spans, 1), parts_of(spans, 2), 3) == 0


def test_events_name_the_pictures_of_blocks_and_routers_see_that_they_do():
    kv, recorder = KVManager(32), KVEventRecorder()
    kv.listen(recorder)
    compute(kv, make_sequence(prompt(), media=seen(RED)))
    batch = recorder.take()
    assert batch is not None
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    picture = ("image", RED.hex())
    assert event.extra_keys == [None, (picture,), (picture,)]
    assert [_is_opaque(event, number) for number in range(3)] == [False, True, True]  # type: ignore[arg-type]
    compute(kv, make_sequence(prompt(), media=seen(BLUE)))
    batch = recorder.take()
    assert batch is not None
    (other,) = batch.events
    assert isinstance(other, BlockStored)
    assert set(other.block_hashes).isdisjoint(event.block_hashes)
