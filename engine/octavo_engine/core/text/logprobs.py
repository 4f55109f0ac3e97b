"""The log-probabilities of one position, with the tokens' texts."""

from __future__ import annotations

import builtins  # noqa: TC003  (a field is named bytes)
from dataclasses import dataclass
from typing import NamedTuple


class TokenChoice(NamedTuple):
    """One token that could stand at a position, with its text."""

    token_id: int
    text: str  # as decoded alone; the replacement character where its bytes are no whole character
    bytes: bytes
    logprob: float
    rank: int | None  # 1 = the most likely; None of tokens that were requested by their ids


@dataclass(frozen=True, slots=True)
class DecodedLogprobs:
    """The token at a position and the most likely ones there, best first, or those requested."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    rank: int
    top: list[TokenChoice]
    offset: int = 0  # of the answer's characters so many are complete before it; of prompts unknown
    attention: builtins.bytes = b""  # as TokenLogprobs has it
