"""When each word was said: pure functions over how much decoder heads attend to each part of a
window, after Whisper's own method.

A token's place in time is where the heads that follow the sound look while it is predicted. The
path of least cost through tokens and time, which never goes back, gives each token its begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

ROW_SECONDS = 0.02  # of sound behind a row of the encoder
_MEDIAN_ROWS = 7  # of which one is the median of its neighbours
_UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")  # languages that put no spaces between words
_HALF = "\ufffd"  # what part of a character decodes to


class Word(NamedTuple):
    """Times in seconds from the file's beginning."""

    text: str  # with the space before it
    start: float
    end: float


class SpelledWord(NamedTuple):
    """A word and the marks that stand with it."""

    text: str  # with the space before it
    num_spoken: int  # tokens, without those of marks behind it
    num_tokens: int


def token_rows(attention: NDArray[np.float32], *, first: int) -> NDArray[np.int64]:
    """At which row of the window each token begins that is predicted from prompt position `first`
    on, of softmax weights [positions, heads, rows]. Positions before it only tell what is usual."""
    by_head = attention.transpose(1, 0, 2).astype(np.float32)
    mean, deviation = by_head.mean(axis=1, keepdims=True), by_head.std(axis=1, keepdims=True)
    normal = (by_head - mean) / np.maximum(deviation, np.float32(1e-10))
    return _path_starts(-_median(normal[:, first:]).mean(axis=0))


def split_words(
    tokens: Sequence[int], decode: Callable[[list[int]], str], language: str
) -> list[SpelledWord]:
    """The words that tokens spell; together they have all of them."""
    words: list[SpelledWord] = []
    for text, count in _whole_characters(tokens, decode):
        is_mark = not any(map(str.isalnum, text))
        begins = text.startswith(" ") or (language in _UNSPACED and not is_mark)
        if begins or not words:
            words.append(SpelledWord(text, count, count))
            continue
        word = words[-1]
        num_tokens = word.num_tokens + count
        num_spoken = word.num_spoken if is_mark else num_tokens
        words[-1] = SpelledWord(word.text + text, num_spoken, num_tokens)
    return words


def place_words(
    words: Sequence[SpelledWord], starts: NDArray[np.int64], begin_s: float
) -> list[Word]:
    """`starts`: of their tokens, and of what follows the last one, in rows behind `begin_s`."""
    placed, token = [], 0
    for text, num_spoken, num_tokens in words:
        start, end = int(starts[token]), int(starts[token + num_spoken])
        placed.append(Word(text, begin_s + ROW_SECONDS * start, begin_s + ROW_SECONDS * end))
        token += num_tokens
    return placed


def _whole_characters(
    tokens: Sequence[int], decode: Callable[[list[int]], str]
) -> list[tuple[str, int]]:
    pieces: list[tuple[str, int]] = []
    first = 0
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[first:end]))
        if _HALF not in text or end == len(tokens):
            pieces.append((text, end - first))
            first = end
    return pieces


def _median(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Along the last axis."""
    reach = _MEDIAN_ROWS // 2
    if values.shape[-1] <= reach:
        return values
    padded = np.pad(values, ((0, 0), (0, 0), (reach, reach)), mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN_ROWS, axis=-1)
    found: NDArray[np.float32] = np.median(around, axis=-1).astype(np.float32)
    return found


def _path_starts(cost: NDArray[np.float32]) -> NDArray[np.int64]:
    """The column at which the path of least cost comes to each row. A step goes to the next row,
    the next column, or both."""
    steps = _steps(cost)
    row, column = cost.shape[0] - 1, cost.shape[1] - 1
    starts = np.zeros(cost.shape[0], np.int64)
    while row >= 0:
        starts[row] = max(column, 0)
        step = steps[row, column] if row and column else (1 if row else 2)
        if step == 2 and column == 0:
            break
        row -= step != 2
        column -= step != 1
    return starts


def _steps(cost: NDArray[np.float32]) -> NDArray[np.int8]:
    """How the path comes to each place: 0 by both, 1 from the row before, 2 from the column before.
    Places of one diagonal do not depend on each other."""
    num_rows, num_columns = cost.shape
    steps = np.zeros(cost.shape, np.int8)
    far = np.float64(np.inf)
    # Of the last two diagonals, by row, with one more before the first row.
    before, last = np.full(num_rows + 1, far), np.full(num_rows + 1, far)
    before[0] = 0.0
    for diagonal in range(num_rows + num_columns - 1):
        first, end = max(0, diagonal - num_columns + 1), min(num_rows, diagonal + 1)
        rows = np.arange(first, end)
        columns = diagonal - rows
        both, from_row, from_column = before[rows], last[rows], last[rows + 1]
        is_both = (both < from_row) & (both < from_column)
        is_row = ~is_both & (from_row < both) & (from_row < from_column)
        steps[rows, columns] = np.where(is_both, 0, np.where(is_row, 1, 2))
        least = np.minimum(np.minimum(both, from_row), from_column)
        now = np.full(num_rows + 1, far)
        now[rows + 1] = least + cost[rows, columns]
        before, last = last, now
    return steps
