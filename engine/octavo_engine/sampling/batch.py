"""The sampler's input and output as arrays: what each row of logits should become.

The kernel is `_native.sample`: one call a step, rows in parallel, each row on its own, so that a
request's tokens never depend on other requests in the batch. The order of work is vLLM's:
log-probabilities of the raw logits; allowed ids; a grammar's mask; bias (bad words and too-early
stops are a bias of -inf); repetition, frequency and presence penalties; greedy, or temperature,
min-p, top-k, top-p and one draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.sampling.processors import ProcessedRow

# One record a row of the runner's tables; csrc/cpu/sampling.h mirrors it.
SAMPLING_ROW = np.dtype(
    [
        ("seed", np.uint64),  # Philox key; the counter is the token's position
        ("temperature", np.float32),  # below 1e-5: greedy
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("top_k", np.int32),  # 0: all
        ("num_prompt_tokens", np.int32),  # frequency and presence count what comes after
    ]
)

SAMPLED_OK, SAMPLED_NOT_FINITE, SAMPLED_NOTHING_ALLOWED = 0, 1, 2


class Ragged(NamedTuple):
    """A list per logits row: row s has ids[starts[s]:starts[s + 1]]."""

    starts: NDArray[np.int32]  # [S + 1]
    ids: NDArray[np.int32]
    values: NDArray[np.float32] | None = None


class MaskRows(NamedTuple):
    """What grammars allow, one bit a token, lowest first; tokens beyond the last word are not."""

    rows: NDArray[np.int32]  # [S]  which mask each row of logits has; -1: none
    bits: NDArray[np.uint32]  # [masks, words]


class PendingMasks(Protocol):
    """Masks that are made while the forward pass runs."""

    def take(self) -> MaskRows:
        """Called once the logits are there; it may wait a little for the last of them."""


@dataclass(slots=True)
class SamplingBatch:
    """S rows of logits and what to do with each."""

    table: NDArray[np.void]  # [R] of SAMPLING_ROW
    rows: NDArray[np.int32]  # [S]  row of the sequence that the logits belong to
    positions: NDArray[np.int32]  # [S]  position that the token will take = tokens before it
    targets: NDArray[np.int32]  # [S]  -1: sample; otherwise the prompt token to score
    history: NDArray[np.int32]  # [R, max_model_len]  all tokens of each row
    bias: Ragged | None = None
    allowed: Ragged | None = None  # an empty list allows everything
    num_logprobs: int = -1  # -1: none wanted; otherwise the most alternatives that any row wants
    # Tokens to report in place of the likeliest; an empty list: none.
    logprob_ids: Ragged | None = None
    processed: Sequence[ProcessedRow] = ()  # rows for custom processors, before all else
    masks: PendingMasks | None = None  # of rows that must keep to a grammar
    # [S]  whether the last token before it is one that `Step.awaited` names; None: no row's is
    awaited: NDArray[np.bool_] | None = None
    # [R]  how often each row got a new sequence. None: nobody counted.
    fills: NDArray[np.int64] | None = None


@dataclass(slots=True)
class Sampled:
    """What the sampler found, row by row."""

    tokens: NDArray[np.int32]  # [S]  sampled token, or the target
    status: NDArray[np.uint8]  # [S]  SAMPLED_*
    logprobs: NDArray[np.float32] | None = None  # [S]
    ranks: NDArray[np.int32] | None = None  # [S]  1 = the most likely
    top_ids: NDArray[np.int32] | None = None  # [S, K]  the likeliest, or those requested; -1: none
    top_logprobs: NDArray[np.float32] | None = None  # [S, K]
