"""Which sequences have tokens guessed ahead in a step, and how many: as many as are worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.config import BLOCK_SIZE, HEADS_WITHOUT_LAYERS
from octavo_engine.scheduling.ngrams import NgramGuesser
from octavo_engine.scheduling.proposals import DraftGain
from octavo_engine.scheduling.suffixes import AnswerMemories, SuffixGuesser

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.config import SpeculationConfig
    from octavo_engine.kv.manager import KVManager
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.guesser import Guesser
    from octavo_engine.state.outputs import EngineStats, StepResult
    from octavo_engine.state.sequence import Sequence


LEAST_PRICE = 0.1  # of a row, in times that a token takes: a guess must be right that often
REST = 4  # steps between looks at a sequence whose guesses would not pay
TRY = 4  # while a row's price is unknown, a step is made longer by a quarter at most to learn it


class SpeculationGain:
    """A step as it is planned so far: the seconds it takes, the tokens it is expected to yield.

    One more guess adds a row's seconds, and its chance of being right to the tokens. It is worth
    that if tokens come faster with it than without.
    """

    __slots__ = ("num_tokens", "row_s", "step_s")

    def __init__(self, *, step_s: float, num_tokens: float, row_s: float) -> None:
        self.step_s = step_s
        self.num_tokens = num_tokens
        self.row_s = row_s

    def take(self, rates: list[float]) -> int:
        """How many guesses to verify for a sequence whose guesses are right so often, each if those
        before it are. While no step's time is known: all."""
        if self.step_s == 0.0:
            return len(rates)
        chance = 1.0  # that this guess and all before it are right
        for count, rate in enumerate(rates):
            chance *= rate
            if chance * self.step_s <= self.row_s * self.num_tokens:
                return count
            self.step_s += self.row_s
            self.num_tokens += chance
        return len(rates)


class Speculation:
    """Adds guesses to the sequences of a batch that decode. One for each scheduler.

    It takes only what no other sequence needs: rows of logits that are spare, half the tokens of a
    step if prompts wait for them, and blocks that are left once every sequence could have one.
    """

    def __init__(
        self,
        make_guesser: Callable[[Sequence], Guesser],
        drafting: DraftGain | None = None,
        *,
        has_draft_layers: bool = False,
        learn: Callable[[Sequence], None] | None = None,
    ) -> None:
        """`drafting`: where a draft model or heads propose; `learn` is for what sequences wrote."""
        self._learn = learn
        self._make_guesser = make_guesser
        self._drafting = drafting
        self._has_draft_layers = has_draft_layers

    def add_drafts(
        self,
        batch: ScheduledBatch,
        kv: KVManager,
        step_time: StepTimeModel,
        *,
        max_tokens: int,
    ) -> None:
        """All entries of the batch are one token behind."""
        num_decodes = len(batch.sequences)
        step_s = step_time.decode_s(num_decodes)
        bargain = SpeculationGain(
            step_s=step_s,
            num_tokens=num_decodes,
            row_s=max(step_time.row_s(), LEAST_PRICE * step_s / num_decodes),
        )
        least_rate = bargain.row_s * num_decodes / step_s if step_s > 0.0 else 0.0
        if step_s > 0.0 and not step_time.knows_rows:
            max_tokens = min(max_tokens, max(1, num_decodes // TRY))
        # Hot path: once per sequence that decodes.
        for index, sequence in enumerate(batch.sequences):
            guesser = sequence.guesser
            if guesser is None:
                guesser = sequence.guesser = self._make_guesser(sequence)
            # Guesses that would not pay are still compared with what comes, but a few at a time:
            # that is enough to notice when guesses begin to be right. Proposals are there anyway.
            rests = self._drafting is None and guesser.rate <= least_rate
            if rests and len(sequence.token_ids) % REST:
                continue
            guess = guesser.guess(sequence.token_ids)
            if not guess:
                continue
            most = min(_most(sequence), max_tokens)
            rates = guesser.rates(min(len(guess), most)) if most > 0 else []
            drafts = guess[: bargain.take(rates)]
            if not drafts:
                continue
            drafts = _without_ends(sequence, drafts)
            drafts = _with_room(sequence, drafts, batch, kv, num_decodes)
            if drafts:
                if sequence.grammar is not None:
                    sequence.grammar.drafts = drafts
                batch.drafts[index] = drafts
                batch.counts[index] += len(drafts)
                batch.num_logits[index] += len(drafts)
                max_tokens -= len(drafts)

    def plan_proposals(
        self, batch: ScheduledBatch, kv: KVManager, step_time: StepTimeModel
    ) -> None:
        """How many tokens are to be proposed in this step, and blocks where draft layers write
        them."""
        if self._drafting is None:
            return
        sampling = [s for s, samples in zip(batch.sequences, batch.samples, strict=True) if samples]
        num_sequences = len(sampling)
        rates = [self._drafting.rate if s.guesser is None else s.guesser.rate for s in sampling]
        count = self._drafting.count(
            num_sequences=num_sequences,
            rate=sum(rates) / max(1, num_sequences),
            step_s=step_time.decode_s(num_sequences),
            row_s=step_time.row_s(),
        )
        batch.num_proposed = count
        batch.least_chance, batch.trust = self._drafting.least_chance, self._drafting.trust
        needs_blocks = count > 0 and self._has_draft_layers
        for index, sequence in enumerate(batch.sequences if needs_blocks else ()):
            is_decode = batch.counts[index] == 1 or index in batch.drafts
            if is_decode and batch.samples[index]:
                end = batch.starts[index] + batch.counts[index] + count
                _grow_to(sequence, min(end, sequence.max_num_tokens), batch, kv, num_sequences)

    def finish(self, sequence: Sequence) -> None:
        """It has ended by itself."""
        if self._learn is not None:
            self._learn(sequence)

    def take_proposals(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Once a step's tokens are the sequences' own."""
        if self._drafting is not None:
            self._drafting.take(batch, result)
            self._drafting.observe(batch, result)


def _most(sequence: Sequence) -> int:
    """Guesses that could be of use. None to a sequence that has just caught up, whose first token
    says more than tokens; and what follows a sequence's last token is never wanted."""
    if sequence.num_computed_tokens < sequence.num_admitted_tokens:
        return 0
    grammar = sequence.grammar
    if grammar is not None and (grammar.is_started or grammar.is_slow):
        return 0  # its mask is made already, and no masks for guesses beside it
    return sequence.max_num_tokens - len(sequence.token_ids) - 1


def _without_ends(sequence: Sequence, drafts: list[int]) -> list[int]:
    """Nothing is guessed that ends a sequence: no token behind it could count."""
    if not sequence.stop_ids.isdisjoint(drafts):
        drafts = drafts[: next(i for i, token in enumerate(drafts) if token in sequence.stop_ids)]
    return drafts if sequence.grammar is None else sequence.grammar.possible(drafts)


def _with_room(
    sequence: Sequence, drafts: list[int], batch: ScheduledBatch, kv: KVManager, num_decodes: int
) -> list[int]:
    """Blocks for the drafts, and slots for the recurrent states that they may go back to; or fewer
    drafts. No sequence is preempted for a guess."""
    length = len(sequence.token_ids)
    _grow_to(sequence, length + len(drafts), batch, kv, num_decodes)
    drafts = drafts[: len(sequence.block_table) * BLOCK_SIZE - length]
    if kv.states is not None:
        drafts = drafts[: kv.states.reserve_drafts(sequence, length - 1, len(drafts))]
    return drafts


def _grow_to(
    sequence: Sequence, length: int, batch: ScheduledBatch, kv: KVManager, num_decodes: int
) -> None:
    """Blocks for so many tokens, or as many as there are beyond one for each other sequence."""
    while len(sequence.block_table) * BLOCK_SIZE < length:
        has_room = kv.num_available > num_decodes * kv.num_groups
        grown = kv.grow(sequence) if has_room else []
        if not grown:
            return
        batch.grown += grown


def make_speculation(config: SpeculationConfig) -> Speculation:
    """Guesses from the text itself or recent answers, or proposals of a draft model or heads."""
    if config.method == "ngram":
        return Speculation(lambda _: NgramGuesser(config))
    if config.method == "suffix":
        memories = AnswerMemories(config.suffix_decoding_max_cached_requests)
        return Speculation(
            lambda sequence: SuffixGuesser(config, memories.of(sequence)), learn=memories.learn
        )
    drafting = DraftGain(config.num_speculative_tokens)
    has_layers = config.method not in HEADS_WITHOUT_LAYERS
    return Speculation(lambda _: drafting.guesser(), drafting, has_draft_layers=has_layers)


def count_drafts(stats: EngineStats, batch: ScheduledBatch, result: StepResult) -> None:
    """Add up how many were guessed, and how far they came true."""
    stats.spec_drafts += len(batch.drafts)
    stats.spec_draft_tokens += sum(map(len, batch.drafts.values()))
    per_pos = stats.spec_accepted_per_pos
    for accepted in result.accepted.values():
        stats.spec_accepted_tokens += len(accepted)
        per_pos += [0] * (len(accepted) - len(per_pos))
        for place in range(len(accepted)):
            per_pos[place] += 1
