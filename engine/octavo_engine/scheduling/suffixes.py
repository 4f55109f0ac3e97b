"""Guesses how a sequence goes on: as texts did that ended like it, its own and recent answers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.scheduling.ngrams import FIRST_RATE, rate_after

if TYPE_CHECKING:
    from octavo_engine.config import SpeculationConfig
    from octavo_engine.state.sequence import Sequence

MAX_PLACES = 16  # of a pair of tokens that are looked at: the latest
MAX_TOKENS = 1 << 17  # of recent answers in one memory: about 50 MB
MAX_SALTS = 16  # memories, of tenants that share nothing
_END = -1  # behind each answer: no token


class PairIndex:
    """Where each pair of tokens ends in a text that only grows."""

    __slots__ = ("_places", "length")

    def __init__(self) -> None:
        self.length = 0  # tokens that are entered
        # By the pair: what stands behind it.
        self._places: dict[tuple[int, int], list[int]] = {}

    def enter(self, tokens: list[int], end: int) -> None:
        """All that is new of the first `end` tokens. Hot path: once a step and sequence."""
        known = self._places
        for place in range(max(1, self.length), end):
            pair = (tokens[place - 1], tokens[place])
            places = known.get(pair)
            if places is None:
                known[pair] = [place + 1]
            else:
                places.append(place + 1)
                if len(places) > MAX_PLACES:
                    del places[0]
        self.length = end

    def places(self, tokens: list[int]) -> list[int]:
        """Where a text went on behind the last two of `tokens`, the earliest first."""
        return self._places.get((tokens[-2], tokens[-1]), []) if len(tokens) > 1 else []


class Match(NamedTuple):
    """A text goes on at `place` behind as many tokens as are alike."""

    num_alike: int
    text: list[int]
    place: int


class AnswerMemory:
    """Recent answers of one tenant, in two halves: when the later one is full the earlier one is
    forgotten."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._num_answers = 0  # in the later half
        self.halves: list[tuple[list[int], PairIndex]] = [([], PairIndex()), ([], PairIndex())]

    def learn(self, answer: list[int]) -> None:
        tokens, _ = self.halves[-1]
        is_full = len(tokens) + len(answer) > MAX_TOKENS // 2
        if is_full or self._num_answers >= max(1, self._max_answers // 2):
            self.halves = [self.halves[-1], ([], PairIndex())]
            self._num_answers = 0
        tokens, index = self.halves[-1]
        tokens += [*answer[-MAX_TOKENS // 2 + 1 :], _END]
        index.enter(tokens, len(tokens))
        self._num_answers += 1


class AnswerMemories:
    """By the salt that separates the tenants' prefix caches."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._by_salt: OrderedDict[str, AnswerMemory] = OrderedDict()

    def of(self, sequence: Sequence) -> AnswerMemory:
        salt = sequence.request.cache_salt
        memory = self._by_salt.get(salt)
        if memory is None:
            memory = self._by_salt[salt] = AnswerMemory(self._max_answers)
            if len(self._by_salt) > MAX_SALTS:
                self._by_salt.popitem(last=False)
        self._by_salt.move_to_end(salt)
        return memory

    def learn(self, sequence: Sequence) -> None:
        """What the sequence wrote, once it has ended."""
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if self._max_answers and len(answer) > 1:
            self.of(sequence).learn(answer)


class SuffixGuesser:
    """Belongs to one sequence. The longest run of its last tokens that was met before counts, in
    its own text and in recent answers; where it was met several times, they vote on each token.

    The longer the run, the more tokens are guessed. As with n-grams each guess is compared with
    what came, whether the engine made use of it or not.
    """

    __slots__ = ("_config", "_guess", "_index", "_length", "_memory", "rate")

    def __init__(self, config: SpeculationConfig, memory: AnswerMemory) -> None:
        self.rate = FIRST_RATE  # of guesses that are right, given that those before them were
        self._config = config
        self._memory = memory
        self._index = PairIndex()  # of the sequence's own text
        self._length = 0
        self._guess: list[int] = []  # of what follows so many tokens

    def rates(self, count: int) -> list[float]:
        return [self.rate] * count

    def guess(self, tokens: list[int]) -> list[int]:
        """What could follow; empty if nothing like it was met. Hot path: once a step and
        sequence."""
        if len(tokens) != self._length:
            self.rate = rate_after(self.rate, self._guess, self._length, tokens)
            self._length = len(tokens)
            self._index.enter(tokens, len(tokens) - 1)  # nothing follows the last pair
            self._guess = self._go_on(tokens, self._matches(tokens))
        return self._guess

    def _matches(self, tokens: list[int]) -> list[Match]:
        """The longest ones, the latest last."""
        most = self._config.suffix_decoding_max_tree_depth
        found: list[Match] = []
        texts = [*self._memory.halves, (tokens, self._index)]
        for text, index in texts:
            for place in index.places(tokens):
                num_alike = _num_alike(tokens, text, place, most)
                if found and num_alike > found[0].num_alike:
                    found.clear()
                if not found or num_alike == found[0].num_alike:
                    found.append(Match(num_alike, text, place))
        return found

    def _go_on(self, tokens: list[int], matches: list[Match]) -> list[int]:
        """As most of them do, while that is likely enough."""
        draft: list[int] = []
        if not matches:
            return draft
        config = self._config
        factor = config.suffix_decoding_max_spec_factor
        count = min(config.num_speculative_tokens, int(factor * matches[0].num_alike))
        probability = 1.0
        for offset in range(count):
            following = [_token(match, offset, tokens, draft) for match in matches]
            votes: dict[int, int] = {}
            for token in reversed(following):  # of those with as many votes the latest
                votes[token] = votes.get(token, 0) + 1
            best = max(votes, key=votes.__getitem__)
            probability *= votes[best] / len(matches)
            if best == _END or probability < config.suffix_decoding_min_token_prob:
                break
            draft.append(best)
            matches = [
                match for match, token in zip(matches, following, strict=True) if token == best
            ]
        return draft


def _num_alike(tokens: list[int], text: list[int], place: int, most: int) -> int:
    """How many tokens before `place` are the last of `tokens`, up to `most`: two are."""
    length = len(tokens)
    most = min(most, length, place)
    count = 2
    while count < most and text[place - 1 - count] == tokens[length - 1 - count]:
        count += 1
    return count


def _token(match: Match, offset: int, tokens: list[int], draft: list[int]) -> int:
    """What a match goes on with. The sequence's own text runs on into what is guessed."""
    place = match.place + offset
    if place < len(match.text):
        return match.text[place]
    return draft[place - len(tokens)] if match.text is tokens else _END
