"""The rules for times in a transcript against those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from octavo_engine.sampling.transcript import TranscriptProcessor
from octavo_engine.state.audio import TranscriptRules

END, NO_TIMES, FIRST, VOCABULARY = 50, 59, 60, 120
PROMPT = [51, 52]
RULES = TranscriptRules(END, FIRST, NO_TIMES, max_initial_timestamp=20)


def library() -> WhisperTimeStampLogitsProcessor:
    config: Any = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=51,
        forced_decoder_ids=None, max_initial_timestamp_index=20,
    )  # fmt: skip
    return WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))


def random_said(rng: np.random.Generator) -> list[int]:
    """Pairs of rising times around words, cut anywhere."""
    tokens, time = [], FIRST + int(rng.integers(0, 4))
    for _ in range(rng.integers(0, 4)):
        tokens += [time, *rng.integers(0, END, rng.integers(1, 3)).tolist()]
        time += int(rng.integers(0, 6))
        tokens.append(time)
    return tokens[: rng.integers(0, len(tokens) + 1)]


@pytest.mark.parametrize("seed", range(200))
def test_equal_the_library_on_what_they_allow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    said = random_said(rng)
    logits = rng.normal(0, 2, VOCABULARY).astype(np.float32)
    logits[FIRST:] += rng.choice([-4, 0, 3])
    theirs = library()(
        torch.tensor([PROMPT + said]), torch.from_numpy(logits.copy())[None]
    )[0].numpy()  # fmt: skip
    TranscriptProcessor(RULES, len(PROMPT))(np.array(PROMPT + said, np.int32), logits)
    assert np.array_equal(np.isneginf(logits), np.isneginf(theirs)), said
    assert np.array_equal(logits[~np.isneginf(logits)], theirs[~np.isneginf(theirs)])


def test_suppressed_tokens() -> None:
    rules = TranscriptRules(
        END, 0, NO_TIMES, 0, suppressed=(3, 4, 999), suppressed_at_begin=(7, END)
    )
    processor = TranscriptProcessor(rules, 2)
    for said, expected in ([], {3, 4, 7, END}), ([9], {3, 4}):
        logits = np.zeros(VOCABULARY, np.float32)
        processor(np.array(PROMPT + said, np.int32), logits)
        assert set(np.flatnonzero(np.isneginf(logits)).tolist()) == expected
