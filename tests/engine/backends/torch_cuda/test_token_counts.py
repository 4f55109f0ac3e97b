"""Counts on the device equal those of whole histories, whatever happens to rows meanwhile."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch import token_counts
from octavo_engine.backends.torch.device_sampler import _penalise
from octavo_engine.backends.torch.token_counts import TokenCounts
from octavo_engine.backends.torch.transfers import send
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table
from tests.engine.backends.torch_cuda.recorders import NothingWaits
from tests.engine.backends.torch_cuda.steps import draw_params

NUM_ROWS, VOCAB, MODEL_LEN = 6, 40, 400
OUTSIDE = [VOCAB, 2**30]  # of the vocabulary


class Life:
    """Sequences in rows: they begin, generate, guess, leave, and come back in other rows."""

    def __init__(self, *, is_ahead: bool, guesses: bool) -> None:
        self.rng = np.random.default_rng(7)
        self.is_ahead, self.guesses = is_ahead, guesses
        self.history = np.zeros((NUM_ROWS, MODEL_LEN), np.int32)
        self.fills = np.zeros(NUM_ROWS, np.int64)
        self.table = new_table(NUM_ROWS)
        self.tokens: list[list[int]] = [[] for _ in range(NUM_ROWS)]  # nobody's
        self.waiting: list[tuple[int, list[int]]] = []  # prompt's length, and all tokens
        self.num_filled = self.num_generated = 0

    def turn(self) -> tuple[SamplingBatch, list[list[int]], np.ndarray]:
        """The step's batch, the true tokens before each row of logits, and the last of them."""
        for row in range(NUM_ROWS):
            tokens, chance = self.tokens[row], self.rng.random()
            if tokens and (chance < 0.06 or len(tokens) > MODEL_LEN - 10):
                if chance < 0.03:  # preempted
                    self.waiting.append((int(self.table["num_prompt_tokens"][row]), tokens))
                tokens = self.tokens[row] = []
            if not tokens and chance > 0.5:
                self._fill(row)
        rows = [row for row in range(NUM_ROWS) if self.tokens[row] and self.rng.random() < 0.8]
        self.rng.shuffle(rows)
        owners, positions, before = [], [], []
        for row in rows:
            tokens = self.tokens[row]
            num_guesses = int(self.rng.integers(0, 4)) if self.guesses else 0
            drafts = self.rng.integers(0, VOCAB, num_guesses).tolist()
            self.history[row, len(tokens) : len(tokens) + num_guesses] = drafts
            for count in range(num_guesses + 1):
                owners.append(row)
                positions.append(len(tokens) + count)
                before.append([*tokens, *drafts[:count]])
        latest = np.array([tokens[-1] for tokens in before], np.int32)
        awaited = np.zeros(len(owners), bool)
        history = self.history.copy()
        if self.is_ahead:
            for index, row in enumerate(owners):
                if len(self.tokens[row]) > self.table["num_prompt_tokens"][row]:
                    awaited[index] = self.rng.random() < 0.7
                    if awaited[index]:
                        history[row, positions[index] - 1] = 2**30  # the host does not know it
        batch = SamplingBatch(
            table=self.table, rows=np.array(owners, np.int32),
            positions=np.array(positions, np.int32), targets=np.full(len(owners), -1, np.int32),
            history=history, awaited=awaited if self.is_ahead else None, fills=self.fills,
        )  # fmt: skip
        for row in rows:
            if self.rng.random() < 0.9:  # else its grammar had no mask in time
                tokens = self.tokens[row]
                accepted = self.rng.integers(0, VOCAB, int(self.rng.integers(1, 3)))
                for token in accepted[: 1 if self.is_ahead else 2].tolist():
                    self.history[row, len(tokens)] = token
                    tokens.append(token)
                    self.num_generated += 1
        return batch, before, latest

    def _fill(self, row: int) -> None:
        if self.waiting and self.rng.random() < 0.7:
            num_prompt_tokens, tokens = self.waiting.pop(0)
        else:
            num_prompt_tokens = int(self.rng.integers(1, 60))
            tokens = self.rng.integers(0, VOCAB, num_prompt_tokens).tolist()
            tokens[0] = int(self.rng.choice([*OUTSIDE, 3]))
        self.tokens[row] = list(tokens)
        self.history[row, : len(tokens)] = tokens
        self.fills[row] += 1
        self.num_filled += len(tokens)
        self.table["num_prompt_tokens"][row] = num_prompt_tokens
        self.table["repetition_penalty"][row] = 1.3
        self.table["frequency_penalty"][row] = self.rng.choice([0, 0.5])
        self.table["presence_penalty"][row] = self.rng.choice([0, 0.25])


def truth(tokens: list[int], num_prompt_tokens: int) -> np.ndarray:
    words = np.zeros(VOCAB, np.int32)
    known = {token for token in tokens[:num_prompt_tokens] if token < VOCAB}
    words[list(known)] = 1
    for token, count in Counter(tokens[num_prompt_tokens:]).items():
        words[token] += 2 * count
    return words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_ahead", "guesses", "is_counted"),
    [(False, False, True), (True, False, True), (False, True, True), (True, False, False)],
)
def test_counts_equal_whole_histories_at_every_step(
    is_ahead, guesses, is_counted, device, monkeypatch
):
    life = Life(is_ahead=is_ahead, guesses=guesses)
    counts = TokenCounts(NUM_ROWS, VOCAB, device)
    sizes: list[int] = []

    def sent(values, to):
        sizes.append(len(values))
        return send(values, to)

    monkeypatch.setattr(token_counts, "send", sent)
    num_seen = num_sent = 0
    rng = np.random.default_rng(2)
    for number in range(250):
        batch, before, latest = life.turn()
        if not before:
            continue
        if not is_counted:
            batch = dataclasses.replace(batch, fills=None)
        params = draw_params(batch, device)
        if batch.awaited is not None:
            kept = np.where(batch.awaited, latest, 99).astype(np.int32)
            params.kept[batch.rows] = torch.from_numpy(kept).to(device)
        if number == 100:
            counts.forget()  # the server slept
        expected = np.array([
            truth(tokens, int(batch.table["num_prompt_tokens"][row]))
            for tokens, row in zip(before, batch.rows, strict=True)
        ])  # fmt: skip
        logits = rng.standard_normal((len(before), VOCAB)).astype(np.float32)
        fresh = torch.from_numpy(logits.copy()).to(device)
        whole = dataclasses.replace(batch, fills=None)
        again = [torch.from_numpy(logits.copy()).to(device), fresh]
        sizes.clear()
        with NothingWaits():
            _penalise(again[0], batch, params, counts)
        num_sent += sum(sizes)
        found = counts.row_counts(np.arange(len(before)), batch, params)
        np.testing.assert_array_equal(found.cpu().numpy(), expected)
        _penalise(fresh, whole, params, TokenCounts(NUM_ROWS, VOCAB, device))
        assert torch.equal(again[0], fresh)
        num_seen += sum(map(len, before))
    # What is sent grows with what is new, not with how long histories are.
    assert num_seen > 20_000
    assert is_counted == (num_sent < num_seen / 2)


def test_an_update_that_failed_is_made_up_for(device, monkeypatch):
    """Half of a row's tokens may be there; they are counted anew."""
    life = Life(is_ahead=False, guesses=False)
    counts = TokenCounts(NUM_ROWS, VOCAB, device)
    batch, before, _ = life.turn()
    while len(before) < 2:
        batch, before, _ = life.turn()
    params = draw_params(batch, device)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "full_like", lambda *_, **__: 1 / 0)
        with pytest.raises((ZeroDivisionError, TypeError)):
            batch.positions += 1  # a generated token is new
            counts.row_counts(np.arange(len(before)), batch, params)
    batch.positions -= 1
    found = counts.row_counts(np.arange(len(before)), batch, params)
    for words, tokens, row in zip(found.cpu().numpy(), before, batch.rows, strict=True):
        np.testing.assert_array_equal(words, truth(tokens, int(life.table[row][8])))
