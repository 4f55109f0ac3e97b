"""The guesser against one that compares with every place each time, and what is remembered."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from octavo_engine.config import SpeculationConfig
from octavo_engine.scheduling.speculation import make_speculation
from octavo_engine.scheduling.suffixes import (
    MAX_PLACES,
    MAX_SALTS,
    MAX_TOKENS,
    AnswerMemories,
    AnswerMemory,
    SuffixGuesser,
)
from octavo_engine.state.sequence import Sequence
from tests.fakes.requests import make_request


def config(**changes: float) -> SpeculationConfig:
    fields = {"num_speculative_tokens": 6, "suffix_decoding_max_tree_depth": 8} | {
        name if name.startswith("num") else f"suffix_decoding_{name}": value
        for name, value in changes.items()
    }
    return SpeculationConfig(method="suffix", **fields)  # type: ignore[arg-type]  # by name


def sequence(salt: str = "") -> Sequence:
    """One that wrote 50, 51, 52, 53."""
    written = Sequence(make_request([1, 2], cache_salt=salt), max_num_tokens=99)
    written.token_ids += [50, 51, 52, 53]
    return written


def slow_guess(
    tokens: list[int], answers: list[list[int]], settings: SpeculationConfig
) -> list[int]:
    """By definition, where no pair of tokens was met more often than is looked at."""
    best = 0
    found: list[tuple[int, int]] = []
    texts = [*answers, tokens]
    for number, text in enumerate(texts):
        for place in range(2, len(text) + (number < len(answers))):
            alike = 0
            while alike < min(settings.suffix_decoding_max_tree_depth, place, len(tokens)):
                if text[place - 1 - alike] != tokens[-1 - alike]:
                    break
                alike += 1
            if alike >= 2 and alike > best:
                best, found = alike, []
            if alike >= 2 and alike == best:
                found.append((number, place))
    draft: list[int] = []
    share = 1.0
    limit = int(best * settings.suffix_decoding_max_spec_factor)
    for offset in range(min(limit, settings.num_speculative_tokens)):
        going_on = [
            {**dict(enumerate(texts[number])),
             **(dict(enumerate(draft, len(tokens))) if number == len(answers) else {})}
            for number, _ in found
        ]  # fmt: skip
        votes = [text.get(place + offset) for text, (_, place) in zip(going_on, found, strict=True)]
        counts = [votes.count(vote) for vote in votes]
        chosen = max(i for i, count in enumerate(counts) if count == max(counts))
        share *= counts[chosen] / len(votes)
        token = votes[chosen]
        if token is None or share < settings.suffix_decoding_min_token_prob:
            break
        draft.append(token)
        found = [each for each, vote in zip(found, votes, strict=True) if vote == token]
    return draft


@pytest.mark.parametrize("seed", range(30))
def test_it_guesses_what_a_comparison_with_everything_finds(seed: int) -> None:
    rng = random.Random(seed)
    settings = config(
        max_spec_factor=rng.choice([0.5, 1.0, 2.0]), min_token_prob=rng.choice([0.0, 0.3])
    )
    vocabulary = rng.choice([6, 8, 12])

    def text(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    memory, answers = AnswerMemory(100), [text(12) for _ in range(3)]
    for answer in answers:
        memory.learn(answer)
    guesser, tokens = SuffixGuesser(settings, memory), text(3)
    num_guessed = 0
    while len(tokens) < 60:
        guess = guesser.guess(tokens)
        assert guess == slow_guess(tokens, answers, settings)
        num_guessed += len(guess)
        tokens += guess[: rng.randrange(3)] if rng.random() < 0.5 else text(rng.randint(1, 3))
    assert num_guessed > 10


def test_an_answer_that_came_before_is_guessed_at_its_second_token() -> None:
    memory = AnswerMemory(10)
    memory.learn(list(range(50, 80)))
    guesser = SuffixGuesser(config(max_spec_factor=2.0), memory)
    assert guesser.guess([1, 2, 50]) == []
    assert guesser.guess([1, 2, 50, 51]) == [52, 53, 54, 55]
    assert guesser.guess([1, 2, 50, 51, 52]) == [53, 54, 55, 56, 57, 58], "the more is alike"


def test_what_is_less_likely_than_asked_for_is_not_guessed() -> None:
    memory = AnswerMemory(10)
    for last in (7, 8, 9):
        memory.learn([1, 2, 3, last])
    assert SuffixGuesser(config(min_token_prob=0.3), memory).guess([1, 2, 3]) == [9]
    assert SuffixGuesser(config(min_token_prob=0.4), memory).guess([1, 2, 3]) == []


def test_the_rate_follows_what_came() -> None:
    guesser = SuffixGuesser(config(min_token_prob=0.0), AnswerMemory(10))
    tokens = [1, 2, 3] * 4
    for _ in range(40):
        guesser.guess(tokens)
        tokens = [*tokens, tokens[-3]]
    assert guesser.rate > 0.9
    for token in range(10, 80):
        guesser.guess(tokens)
        tokens = [*tokens, token, 1, 2]
    assert guesser.rate < 0.3


def test_tenants_do_not_see_each_others_answers() -> None:
    memories = AnswerMemories(10)
    memories.learn(sequence("a"))
    assert SuffixGuesser(config(), memories.of(sequence("a"))).guess([50, 51]) == [52, 53]
    assert SuffixGuesser(config(), memories.of(sequence("b"))).guess([50, 51]) == []
    for number in range(MAX_SALTS):
        memories.of(sequence(str(number)))
    assert SuffixGuesser(config(), memories.of(sequence("a"))).guess([50, 51]) == []


def test_a_sequence_that_ends_is_learnt_unless_nothing_is_to_be() -> None:
    for max_answers, expected in ((10, [52, 53]), (0, [])):
        speculation = make_speculation(config(max_cached_requests=max_answers))
        speculation.finish(sequence())
        guesser = speculation._make_guesser(sequence())
        assert guesser.guess([9, 50, 51]) == expected


def test_as_many_answers_are_remembered_as_may_be() -> None:
    memory = AnswerMemory(8)
    for number in range(40):
        memory.learn([number, 100 + number, 200 + number])
        known = [
            SuffixGuesser(config(), memory).guess([one, 100 + one]) == [200 + one]
            for one in range(number + 1)
        ]
        assert 4 <= sum(known) <= 8 or number < 4
        assert all(known[-min(4, number + 1) :]), "the latest are"


@pytest.mark.slow
def test_memory_is_bounded_and_a_guess_is_quick_in_it() -> None:
    tracemalloc.start()
    rng = random.Random(0)
    memory = AnswerMemory(1_000_000)
    text = [rng.randrange(1000) for _ in range(MAX_TOKENS // 4)]
    memory.learn(text)
    held = tracemalloc.get_traced_memory()[0]
    for _ in range(5):
        memory.learn([rng.randrange(1000) for _ in range(MAX_TOKENS // 4)])
    assert tracemalloc.get_traced_memory()[0] < 5 * held
    tracemalloc.stop()
    guesser, tokens = SuffixGuesser(config(), memory), text[:2000]
    guesser.guess(tokens)
    started = time.perf_counter()
    for _ in range(200):
        tokens = [*tokens, rng.randrange(1000)]
        guesser.guess(tokens)
    assert (time.perf_counter() - started) / 200 < 0.5e-3


def test_of_a_pair_that_is_everywhere_the_latest_places_are_looked_at() -> None:
    memory = AnswerMemory(100)
    for number in range(3 * MAX_PLACES):
        memory.learn([1, 2, number + 10])
    guess = SuffixGuesser(config(min_token_prob=0.0), memory).guess([1, 2])
    assert guess == [3 * MAX_PLACES + 9]
