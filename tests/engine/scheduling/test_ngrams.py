"""The guesser against one that looks through the whole sequence each time, and what it learns."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest

from octavo_engine.config import SpeculationConfig
from octavo_engine.scheduling.ngram_table import MOST_BITS, NgramTable
from octavo_engine.scheduling.ngrams import FIRST_RATE, NgramGuesser


def slow_guess(tokens: list[int], config: SpeculationConfig) -> list[int]:
    """By definition: the longest run of last tokens that was there before, its latest place."""
    for size in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[len(tokens) - size :]:
                going_on = list(tokens)
                for place in range(config.num_speculative_tokens):
                    going_on.append(going_on[start + place])
                return going_on[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(8))
def test_it_guesses_what_a_search_through_everything_finds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        low = rng.randint(1, 4)
        config = SpeculationConfig(
            num_speculative_tokens=rng.randint(1, 7),
            prompt_lookup_min=low,
            prompt_lookup_max=low + rng.randint(0, 3),
        )
        guesser, tokens = NgramGuesser(config), [rng.randrange(3)]
        num_guesses = 0
        for _ in range(60):  # one token a step, or several: drafts, forced ones, a whole prompt
            tokens += rng.choices(range(3), k=rng.choice([1, 1, 1, 2, 5, 30]))
            guess = guesser.guess(tokens)
            assert guess == slow_guess(tokens, config)
            assert guesser.guess(tokens) == guess, "asking twice changes nothing"
            num_guesses += bool(guess)
        assert num_guesses > 10


def test_a_short_pattern_is_guessed_to_go_on() -> None:
    guesser = NgramGuesser(
        SpeculationConfig(num_speculative_tokens=7, prompt_lookup_min=2, prompt_lookup_max=2)
    )
    assert guesser.guess([9, 1, 2, 3, 1, 2]) == [3, 1, 2, 3, 1, 2, 3]
    assert guesser.guess([9, 1, 2, 3, 1, 2, 8]) == []


def test_what_comes_tells_how_good_its_guesses_are_whether_they_were_used_or_not() -> None:
    config = SpeculationConfig(prompt_lookup_min=1, prompt_lookup_max=1)
    right, wrong = NgramGuesser(config), NgramGuesser(config)
    same: list[int] = [1, 1]
    other = list(range(5)) * 2
    rng = random.Random(0)
    for _ in range(100):
        right.guess(same)
        same.append(1)
        wrong.guess(other)
        other.append(rng.choice([n for n in range(5) if n not in wrong.guess(other)[:1]]))
    assert wrong.rate < 0.01 < FIRST_RATE < 0.99 < right.rate


def test_only_guesses_whose_turn_came_count() -> None:
    """Behind a wrong one nothing is learned; and one that is still to come is neither."""
    config = SpeculationConfig(prompt_lookup_min=1, prompt_lookup_max=1)
    rates = []
    for following in ([2, 3, 4], [2, 8], [8, 3, 4], [2, 8, 4, 5]):
        guesser = NgramGuesser(config)
        tokens = [1, 2, 3, 4, 1]
        assert guesser.guess(tokens) == [2, 3, 4, 1]
        guesser.guess([*tokens, *following])
        rates.append(guesser.rate)
    three_right, right_then_wrong, wrong, also = rates
    assert three_right > FIRST_RATE > right_then_wrong == also > wrong


def test_a_token_costs_the_same_however_long_the_sequence_is() -> None:
    def per_token_s(length: int) -> float:
        guesser = NgramGuesser(SpeculationConfig(prompt_lookup_min=2, prompt_lookup_max=4))
        tokens = [(i * i) % 97 for i in range(length)]
        guesser.guess(tokens)
        best = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(50):
                tokens.append(len(tokens) % 50)
                guesser.guess(tokens)
            best = min(best, time.perf_counter() - started)
        return best / 50

    assert per_token_s(50_000) < 10 * per_token_s(500)  # a search would be a hundred times slower


def test_a_long_sequence_takes_few_bytes_and_its_table_is_built_quickly() -> None:
    """128 sequences of 32,000 tokens once took 2.7 GB, and the first look at one 60 ms."""
    rng = random.Random(0)
    tokens = [rng.randrange(50_000) for _ in range(32_000)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    guesser = NgramGuesser(SpeculationConfig())
    guesser.guess(tokens)
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 32 * len(tokens)
    best = float("inf")
    for _ in range(5):
        guesser = NgramGuesser(SpeculationConfig())
        began = time.process_time()
        guesser.guess(tokens)
        best = min(best, time.process_time() - began)
    assert best < 0.02


def test_however_long_a_sequence_is_its_table_has_a_bound() -> None:
    table = NgramTable(2, 4)
    rng = random.Random(1)
    tokens = [rng.randrange(1000) for _ in range(400_000)]
    table.find_and_enter(tokens)
    assert table.num_bytes == 16 << MOST_BITS
    tokens += tokens[-100:-50]  # what was said lately is found whatever was forgotten
    assert table.find_and_enter(tokens) == len(tokens) - 100


def test_most_of_a_long_text_is_still_found_and_nothing_that_was_not_there() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(30_000) for _ in range(20_000)]
    table = NgramTable(3, 3)
    table.find_and_enter(tokens)
    num_found = 0
    for _ in range(1000):
        place = rng.randrange(3, 20_000)
        tokens += [50_000, *tokens[place - 3 : place]]  # the first is new: no longer run is old
        found = table.find_and_enter(tokens)
        if found:
            assert tokens[found - 3 : found] == tokens[-3:]
            num_found += 1
    assert num_found > 980
