"""Which tokens may come next in a transcript: a logits processor made from a request's rules.

Times come in pairs around text and never go back; a transcript begins with a time; and a time comes
next where all times together are likelier than any text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.state.audio import TranscriptRules


class TranscriptProcessor:
    """A LogitsProcessor for one request whose prompt has so many tokens."""

    def __init__(self, rules: TranscriptRules, num_prompt_tokens: int) -> None:
        self._rules = rules
        self._begin = num_prompt_tokens
        self._suppressed = np.array(rules.suppressed, np.int64)
        self._at_begin = np.array(rules.suppressed_at_begin, np.int64)

    def __call__(self, token_ids: NDArray[np.int32], logits: NDArray[np.float32], /) -> None:
        said = token_ids[self._begin :]
        logits[self._suppressed[self._suppressed < len(logits)]] = -np.inf
        if len(said) == 0:
            logits[self._at_begin[self._at_begin < len(logits)]] = -np.inf
        if self._rules.first_timestamp:
            self._limit_times(said, logits)

    def _limit_times(self, said: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        rules = self._rules
        first = rules.first_timestamp
        logits[rules.no_timestamps] = -np.inf
        if len(said) == 0:
            logits[:first] = -np.inf
            logits[first + rules.max_initial_timestamp + 1 :] = -np.inf
            return
        was_time = bool(said[-1] >= first)
        if was_time and (len(said) < 2 or said[-2] >= first):
            logits[first:] = -np.inf  # a pair is whole: text
        elif was_time:
            logits[: rules.end_of_text] = -np.inf  # a text has ended: its pair, or the end
        times = said[said >= first]
        if len(times):
            is_second = was_time and len(said) >= 2 and said[-2] < first
            logits[first : times[-1] + (0 if is_second else 1)] = -np.inf
        if _log_sum(logits[first:]) > logits[:first].max():
            logits[:first] = -np.inf


def _log_sum(values: NDArray[np.float32]) -> float:
    highest = float(values.max())
    if highest == -np.inf:
        return highest
    return highest + float(np.log(np.exp(values - highest).sum()))
