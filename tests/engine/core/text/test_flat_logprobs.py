"""Flat log-probabilities read as the list that they stand for."""

from __future__ import annotations

from octavo_engine.core.text.flat_logprobs import FlatLogprobs
from octavo_engine.core.text.logprobs import DecodedLogprobs, TokenChoice


def entry(token: int, *top: int, offset: int = 0) -> DecodedLogprobs:
    def choice(token: int) -> TokenChoice:
        return TokenChoice(token, chr(token), bytes([token]), -token / 7, None)

    return DecodedLogprobs(
        token, chr(token), bytes([token]), -1.5, 3, [choice(one) for one in top], offset
    )


LISTED = [entry(65, 66, 67), entry(66, offset=1), entry(67, 1, 2, 3, offset=2)]


def test_each_entry_is_as_it_was_put_in():
    flat: FlatLogprobs[DecodedLogprobs] = FlatLogprobs()
    flat.extend(LISTED)
    assert len(flat) == 3 and list(flat) == LISTED
    assert flat[0] == LISTED[0] and flat[-1] == LISTED[2]
    assert list(flat[1:]) == LISTED[1:] and list(flat[::-2]) == LISTED[::-2]
    assert flat[1] in flat and flat.index(LISTED[2]) == 2


def test_the_lists_hold_all_positions_one_behind_the_other():
    flat: FlatLogprobs[DecodedLogprobs] = FlatLogprobs()
    flat.extend(LISTED)
    assert flat.start_indices == [0, 3, 4] and flat.end_indices == [3, 4, 8]
    assert flat.token_ids == [65, 66, 67, 66, 67, 1, 2, 3]
    assert flat.ranks == [3, None, None, 3, 3, None, None, None]
    assert flat.decoded_tokens[:3] == ["A", "B", "C"] and flat.decoded_bytes[0] == b"A"


def test_a_prompt_s_first_token_has_nothing_known_of_it():
    flat: FlatLogprobs[DecodedLogprobs | None] = FlatLogprobs()
    flat.append(None)
    flat.append(LISTED[1])
    assert list(flat) == [None, LISTED[1]]
