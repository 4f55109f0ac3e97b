"""Draft tokens that a draft model or heads propose: how they reach a step, when they pay."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

from octavo_engine.state.guesser import SURENESS_LEVELS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult

LEVEL_MEMORY = 64  # proposals of a level of sureness that say how often those are right
LEVEL_PRIOR = 8  # proposals that FIRST_RATE counts as
FIRST_RATE = 0.5  # how often a proposal is right, before any was seen
WEIGHT = 1 / 16  # of a new proposal in a sequence's rate
SHARED_WEIGHT = 1 / 128  # and in the rate that new sequences begin with
FORGET = 0.9  # weight of the past in what a pass takes
PROBE = 64  # steps between looks at whether proposals that did not pay do so now, at first
LONGEST_PROBE = 1024  # and at last
MOST_PLANNED = 8  # passes that are thought through: those behind change nothing


class ProposedGuesser:
    """Holds what was proposed for one sequence until its next step."""

    __slots__ = ("_guess", "_length", "_levels", "_trust", "rate")

    def __init__(self, rate: float = FIRST_RATE, trust: Trust | None = None) -> None:
        self.rate = rate  # of guesses that are right, given that those before them were
        self._trust = trust
        self._guess: list[int] = []
        self._levels: list[int] = []
        self._length = 0  # tokens that it follows

    def propose(self, length: int, guess: list[int], levels: Iterable[int] = ()) -> None:
        """What may follow the first `length` tokens, and how sure its tokens are, where known."""
        self._length, self._guess, self._levels = length, guess, list(levels)

    def rates(self, count: int) -> list[float]:
        if self._trust is None or not self._levels:
            return [self.rate] * count
        return [self._trust.rates[level] for level in self._levels[:count]]

    def guess(self, tokens: list[int]) -> list[int]:
        return self._guess if len(tokens) == self._length else []

    def compare(self, tokens: list[int]) -> tuple[int, int]:
        """With what came: how many were looked at and how many of them were right. What was
        proposed is forgotten."""
        num_seen = num_right = 0
        for place, guessed in enumerate(self._guess, self._length):
            if place == len(tokens):
                break
            is_right = guessed == tokens[place]
            self.rate += (is_right - self.rate) * WEIGHT
            if self._trust is not None and self._levels:
                self._trust.observe(self._levels[num_seen], is_right)
            num_seen += 1
            num_right += is_right
            if not is_right:
                break
        self._guess = []
        return num_seen, num_right


class Trust:
    """How often proposals are right, and how many there are, by how sure the head was of them.

    A head that is right one time in three is nearly always right where it is sure, and that is
    where its tokens are worth a row.
    """

    __slots__ = ("_counts", "rates", "shares")

    def __init__(self) -> None:
        self._counts = [0] * SURENESS_LEVELS
        self.rates = [FIRST_RATE] * SURENESS_LEVELS
        self.shares = [1 / SURENESS_LEVELS] * SURENESS_LEVELS

    @property
    def is_known(self) -> bool:
        """Whether a proposal came with its sureness yet."""
        return any(self._counts)

    def observe(self, level: int, is_right: bool) -> None:
        weight = _weight(sum(self._counts))
        for other in range(SURENESS_LEVELS):
            self.shares[other] += ((other == level) - self.shares[other]) * weight
        self.rates[level] += (is_right - self.rates[level]) * _weight(self._counts[level])
        self._counts[level] = min(self._counts[level] + 1, LEVEL_MEMORY)

    def saved_s(self, count: int, *, token_s: float, row_s: float, pass_s: float) -> float:
        """What up to `count` passes save of a sequence's time, where a token takes so long without:
        a row is computed where it pays, and the next pass where what is left does."""
        saved = 0.0
        for _ in range(count):
            worth = (max(0.0, rate * (token_s + saved) - row_s) for rate in self.rates)
            saved = max(0.0, sum(map(mul, self.shares, worth)) - pass_s)
        return saved


def _weight(count: int) -> float:
    """Of a proposal behind so many."""
    return 1 / min(count + LEVEL_PRIOR + 1, LEVEL_MEMORY)


class DraftGain:
    """Decides how many tokens to draft in a step: those with which tokens come fastest.

    A pass of the draft model, or one head, drafts one token for each sequence. What a pass takes is
    measured, by the number of sequences to the next power of two; how often a token is right is
    known from those that were proposed. Where none pays, one is drafted in two steps now and then,
    to notice when that changes: the first lets the draft model catch up, the second shows what a
    pass takes.

    Where proposals come with their sureness, it also says when a pass is not worth the next.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._trust = Trust()
        self.least_chance = 0.0  # that a draft has to be right, or none is made behind it
        self._pass_s: dict[int, float] = {}
        self._num_steps = 0  # since one last paid, or the last look
        self._probe = PROBE
        self.rate = FIRST_RATE

    def guesser(self) -> ProposedGuesser:
        return ProposedGuesser(self.rate, self._trust)

    @property
    def trust(self) -> tuple[float, ...]:
        """How often proposals of each level of sureness are right; empty: nothing is known."""
        return tuple(self._trust.rates) if self._trust.is_known else ()

    def count(self, *, num_sequences: int, rate: float, step_s: float, row_s: float) -> int:
        """How many tokens to draft for each. While no times are known: all."""
        if not num_sequences:
            return 0
        pass_s = self._pass_s.get(num_sequences.bit_length())
        if pass_s is None or step_s == 0.0:
            return self._num_tokens
        if self._trust.is_known:
            return self._best_by_sureness(step_s / num_sequences, row_s, pass_s / num_sequences)
        token_s = pass_s + num_sequences * row_s
        best, best_rate = 0, 1.0 / step_s
        tokens, chance = 1.0, rate
        for count in range(1, self._num_tokens + 1):
            tokens += chance
            chance *= rate
            speed = tokens / (step_s + count * token_s)
            if speed > best_rate:
                best, best_rate = count, speed
        return self._count_or_probe(best)

    def _best_by_sureness(self, token_s: float, row_s: float, pass_s: float) -> int:
        """All, as far as they are sure enough; of one sequence in a batch of equals."""
        depth = min(self._num_tokens, MOST_PLANNED)
        saved = self._trust.saved_s(depth, token_s=token_s, row_s=row_s, pass_s=pass_s)
        self.least_chance = pass_s / (saved + pass_s) if saved > 0.0 else 1.0
        return self._count_or_probe(self._num_tokens if saved > 0.0 else 0)

    def _count_or_probe(self, best: int) -> int:
        if best:
            self._num_steps, self._probe = 0, PROBE
            return best
        self._num_steps += 1
        if self._num_steps > self._probe:
            self._num_steps, self._probe = 0, min(2 * self._probe, LONGEST_PROBE)
            return 1
        return int(self._num_steps == self._probe)

    def observe(self, batch: ScheduledBatch, result: StepResult) -> None:
        """What drafting took; a step with prompts, or tokens to catch up with, does not count, nor
        does one whose passes were prepared as they were launched."""
        num_sequences = len(batch.sequences)
        if not result.draft_is_usual:
            return
        if not result.proposed or result.draft_tokens > batch.num_tokens + num_sequences:
            return
        if batch.num_decodes != batch.num_tokens:
            return
        pass_s = result.draft_s / result.draft_passes
        size = num_sequences.bit_length()
        known = self._pass_s.get(size)
        self._pass_s[size] = (
            pass_s if known is None else known + (min(pass_s, 3 * known) - known) * (1 - FORGET)
        )

    def take(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Compare what was proposed with what came, and hand on what is proposed now."""
        for index, sequence in enumerate(batch.sequences):
            guesser = sequence.guesser
            if guesser is None and batch.samples[index]:
                guesser = sequence.guesser = self.guesser()
            if not isinstance(guesser, ProposedGuesser):
                continue
            num_seen, num_right = guesser.compare(sequence.token_ids)
            for place in range(num_seen):
                self.rate += ((place < num_right) - self.rate) * SHARED_WEIGHT
            if (guess := result.proposed.get(index)) is not None:
                guesser.propose(len(sequence.token_ids), guess, result.sureness.get(index, ()))
