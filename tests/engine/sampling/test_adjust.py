"""Which ids a step bans, pushes and allows, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo_engine.sampling.adjust import AdjustedRow, Adjustments, build_lists
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

BANNED = float("-inf")


def adjustments(*, eos: tuple[int, ...] = (), **params: Any) -> Adjustments | None:
    params.setdefault("max_tokens", None)
    return Adjustments.of(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1],
            params=SamplingParams(**params),
            eos_token_ids=eos,
        )
    )


def bias_after(wishes: Adjustments | None, *outputs: int) -> dict[int, float]:
    assert wishes is not None
    ids, values = wishes.bias_at(np.array(outputs, np.int32))
    return dict(zip(ids, values, strict=True))


def test_a_plain_request_wants_nothing() -> None:
    assert adjustments(eos=(2,), temperature=0.3, top_k=4, stop_token_ids=(5,)) is None
    assert adjustments(min_tokens=3) is None  # there is nothing to ban


def test_stops_are_banned_until_there_are_enough_tokens() -> None:
    wishes = adjustments(min_tokens=2, eos=(9,), stop_token_ids=(4,))
    assert bias_after(wishes) == {4: BANNED, 9: BANNED}
    assert bias_after(wishes, 1) == {4: BANNED, 9: BANNED}
    assert bias_after(wishes, 1, 1) == {}


def test_an_ignored_end_of_text_is_not_banned() -> None:
    wishes = adjustments(min_tokens=2, eos=(9,), stop_token_ids=(4,), ignore_eos=True)
    assert bias_after(wishes) == {4: BANNED}
    assert adjustments(min_tokens=2, eos=(9,), ignore_eos=True) is None


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    wishes = adjustments(bad_words_token_ids=((7,), (1, 2, 3), (2, 5)))
    assert bias_after(wishes) == {7: BANNED}
    assert bias_after(wishes, 2) == {7: BANNED, 5: BANNED}
    assert bias_after(wishes, 1, 2) == {7: BANNED, 3: BANNED, 5: BANNED}
    assert bias_after(wishes, 1, 2, 9) == {7: BANNED}


def test_bias_and_bans_come_together() -> None:
    wishes = adjustments(logit_bias={3: 1.5, 8: -2.0}, bad_words_token_ids=((8,),))
    assert wishes is not None
    assert wishes.bias_at(np.empty(0, np.int32)) == ([3, 8, 8], [1.5, -2.0, BANNED])


def test_rows_without_wishes_have_empty_lists() -> None:
    biased, limited = adjustments(logit_bias={3: 1.5}), adjustments(allowed_token_ids=(6, 7))
    assert biased is not None and limited is not None
    none = np.empty(0, np.int32)
    lists = build_lists([AdjustedRow(1, biased, none), AdjustedRow(3, limited, none)], 5)
    assert lists.bias is not None and lists.allowed is not None
    assert lists.bias.values is not None
    assert lists.bias.starts.tolist() == [0, 0, 1, 1, 1, 1]
    assert (lists.bias.ids.tolist(), lists.bias.values.tolist()) == ([3], [1.5])
    assert lists.allowed.starts.tolist() == [0, 0, 0, 0, 2, 2]
    assert lists.allowed.ids.tolist() == [6, 7] and lists.allowed.values is None
    assert build_lists([], 5) == (None, None)
