"""What must happen to a row's logits beyond the table: allowed ids, bias, bans.

Bad words and stops that come too early are a bias of -inf. Only rows whose request asks for any of
these have an `Adjustments`; the others cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.sampling.batch import Ragged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from octavo_engine.state.request import EngineRequest

BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class Adjustments:
    """One request's parameters, laid out so that a step only has to pick."""

    allowed: NDArray[np.int32]  # empty: all
    bias_ids: list[int]
    bias_values: list[float]
    min_tokens: int
    stop_ids: list[int]  # banned before min_tokens
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, request: EngineRequest) -> Adjustments | None:
        """None if the request wants no adjustment."""
        p = request.params
        stop_ids = {*p.stop_token_ids, *(() if p.ignore_eos else request.eos_token_ids)}
        min_tokens = p.min_tokens if stop_ids else 0
        bad_words = tuple(word for word in p.bad_words_token_ids if word)
        if not (p.allowed_token_ids or p.logit_bias or min_tokens or bad_words):
            return None
        bias = p.logit_bias or {}
        return cls(
            allowed=np.array(p.allowed_token_ids or (), np.int32),
            bias_ids=list(bias),
            bias_values=list(bias.values()),
            min_tokens=min_tokens,
            stop_ids=sorted(stop_ids),
            bad_words=bad_words,
        )

    def bias_at(self, output_ids: NDArray[np.int32]) -> tuple[list[int], list[float]]:
        """Ids and values to add to the logits of the token that follows `output_ids`."""
        banned = [word[-1] for word in self.bad_words if _ends_with(output_ids, word[:-1])]
        if len(output_ids) < self.min_tokens:
            banned += self.stop_ids
        return self.bias_ids + banned, self.bias_values + [BANNED] * len(banned)


class AdjustedRow(NamedTuple):
    """A row of a step's logits, what is wished of it, and what was generated so far."""

    logits_row: int
    adjustments: Adjustments
    output_ids: NDArray[np.int32]


class Lists(NamedTuple):
    bias: Ragged | None
    allowed: Ragged | None


def build_lists(rows: Iterable[AdjustedRow], num_rows: int) -> Lists:
    """The ragged lists of one step with `num_rows` rows of logits."""
    bias_lengths = np.zeros(num_rows, np.int32)
    allowed_lengths = np.zeros(num_rows, np.int32)
    ids: list[int] = []
    values: list[float] = []
    allowed: list[NDArray[np.int32]] = []
    for row in rows:
        row_ids, row_values = row.adjustments.bias_at(row.output_ids)
        bias_lengths[row.logits_row] = len(row_ids)
        allowed_lengths[row.logits_row] = len(row.adjustments.allowed)
        ids += row_ids
        values += row_values
        allowed.append(row.adjustments.allowed)
    return Lists(
        Ragged(_starts(bias_lengths), np.array(ids, np.int32), np.array(values, np.float32))
        if ids
        else None,
        Ragged(_starts(allowed_lengths), np.concatenate(allowed))
        if allowed_lengths.any()
        else None,
    )


def ragged(lists: Mapping[int, NDArray[np.int32]], num_rows: int) -> Ragged | None:
    """Of the lists by row; the other rows have none. None if no row has any."""
    if not lists:
        return None
    lengths = np.zeros(num_rows, np.int32)
    for row, ids in lists.items():
        lengths[row] = len(ids)
    return Ragged(_starts(lengths), np.concatenate([lists[row] for row in sorted(lists)]))


def _ends_with(ids: NDArray[np.int32], tail: Sequence[int]) -> bool:
    return not tail or (len(ids) >= len(tail) and ids[-len(tail) :].tolist() == list(tail))


def _starts(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
