"""Writes a request's sampling parameters into its row of the sampler's table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.sampling.batch import SAMPLING_ROW

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.state.request import EngineRequest

SEED_MASK = 2**64 - 1


def new_table(num_rows: int) -> NDArray[Any]:
    """A table whose rows are all greedy."""
    table = np.zeros(num_rows, SAMPLING_ROW)
    table["top_p"] = 1.0
    table["repetition_penalty"] = 1.0
    return table


def has_penalty(entries: NDArray[Any]) -> NDArray[np.bool_]:
    """Of which rows of the table what is drawn depends on how often each token was."""
    found: NDArray[np.bool_] = (
        (entries["repetition_penalty"] != 1)
        | (entries["frequency_penalty"] != 0)
        | (entries["presence_penalty"] != 0)
    )
    return found


def fill_row(table: NDArray[Any], row: int, request: EngineRequest) -> None:
    """Write the row afresh; nothing of its former owner remains."""
    p = request.params
    table[row] = (
        request.seed & SEED_MASK,  # -1 and 2^64 - 1 are the same key
        p.temperature,
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.frequency_penalty,
        p.presence_penalty,
        max(p.top_k, 0),  # -1 means all, as 0 does
        len(request.prompt_token_ids),
    )
