"""Words are placed where the path of least cost through tokens and time puts their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.speech.alignment import (
    SpelledWord,
    _path_starts,
    place_words,
    split_words,
    token_rows,
)


def least_cost(cost: np.ndarray) -> float:
    """By its definition, place by place."""
    total = np.full((cost.shape[0] + 1, cost.shape[1] + 1), np.inf)
    total[0, 0] = 0.0
    for row, column in np.ndindex(*cost.shape):
        before = total[row, column], total[row, column + 1], total[row + 1, column]
        total[row + 1, column + 1] = cost[row, column] + min(before)
    return float(total[-1, -1])


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 30), (30, 5), (12, 12)])
def test_the_path_costs_least(shape: tuple[int, int]) -> None:
    for seed in range(20):
        cost = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        starts = _path_starts(cost)
        assert starts[0] == 0 and (np.diff(starts) >= 0).all()
        # Of all paths that come to their rows there, the best one: it goes along each row to where
        # the next one begins, or to the column before that.
        best = np.inf
        for choice in range(2 ** min(shape[0] - 1, 10)):
            total = 0.0
            for row, start in enumerate(starts):
                end = shape[1] - 1
                if row + 1 < shape[0]:
                    end = starts[row + 1] - (choice >> row & 1)
                if end < start:
                    total = np.inf
                    break
                total += float(cost[row, start : end + 1].sum())
            best = min(best, total)
        if shape[0] <= 11:
            assert best == pytest.approx(least_cost(cost), abs=1e-4)


def test_tokens_begin_where_heads_look() -> None:
    """Each of five tokens is heard in ten rows of its own, behind two that belong to the prompt."""
    attention = np.random.default_rng(1).random((7, 3, 50)).astype(np.float32) * 0.1
    for token in range(5):
        attention[2 + token, :, 10 * token : 10 * token + 10] += 1.0
    attention /= attention.sum(axis=-1, keepdims=True)
    starts = token_rows(attention, first=2)
    assert np.abs(starts - np.arange(0, 50, 10)).max() <= 1


def spelled(pieces: dict[int, bytes]):
    return lambda tokens: b"".join(pieces[t] for t in tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("pieces", "language", "words"),
    [
        ([b" Hello", b" wor", b"ld", b"."], "en", [(" Hello", 1, 1), (" world.", 2, 3)]),
        ([b" It", b"'s", b' "', b"so", b'"', b"!"], "en", [(" It's", 2, 2), (' "so"!', 2, 4)]),
        ([b" 10", b",", b"000", b" ", b"x"], "en", [(" 10,000", 3, 3), (" x", 2, 2)]),
        ([s.encode() for s in ("\u4f60", "\u597d", "\u3002")], "zh",
         [("\u4f60", 1, 1), ("\u597d\u3002", 1, 2)]),
        ([b" caf", b"\xc3", b"\xa9"], "fr", [(" caf\u00e9", 3, 3)]),
        ([b"\xff"], "en", [("\ufffd", 1, 1)]),
        ([], "en", []),
    ],
)  # fmt: skip
def test_tokens_become_words(pieces: list[bytes], language: str, words: list) -> None:
    found = split_words(list(range(len(pieces))), spelled(dict(enumerate(pieces))), language)
    assert found == words
    assert sum(word.num_tokens for word in found) == len(pieces)


def test_words_end_where_the_next_token_begins_and_marks_take_no_time() -> None:
    words = [SpelledWord(" a,", 1, 2), SpelledWord(" bc", 2, 2)]
    placed = place_words(words, np.array([0, 10, 12, 15, 40]), 30.0)
    assert all(type(word.start) is float for word in placed)
    assert [(w.text, round(w.start, 2), round(w.end, 2)) for w in placed] == [
        (" a,", 30.0, 30.2), (" bc", 30.24, 30.8),
    ]  # fmt: skip
