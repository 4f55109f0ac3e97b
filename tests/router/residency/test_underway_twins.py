"""Prompts under way, compiled and in Python: the same random life, the same answers."""

from random import Random

import pytest

from octavo_router.residency import native, underway
from octavo_router.residency.underway import names_of
from tests.fakes.endpoints import make_endpoint, make_keys

ENDPOINTS = [make_endpoint(number) for number in range(3)]


def prompt(random):
    return make_keys(
        (f"system {random.randrange(3)}", random.choice((1, 3, 4, 5, 9, 40))),
        (f"question {random.randrange(4)}", random.randrange(30)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_twins_count_and_credit_alike(seed):
    random = Random(seed)
    fast, slow = native.load().Underway(), underway.PyUnderway()
    assert type(fast) is not type(slow)
    placed, computing = [], []
    for _ in range(300):
        keys, endpoint = prompt(random), random.choice(ENDPOINTS)
        names = names_of(keys)
        if random.random() < 0.5:
            placed.append(names)
            computing.append((names, endpoint))
            for one in (fast, slow):
                one.begin(names)
                one.compute(names, keys, endpoint)
        if placed and random.random() < 0.4:
            ended = placed.pop(random.randrange(len(placed)))
            for one in (fast, slow):
                one.end(ended)
        if computing and random.random() < 0.4:
            computed = computing.pop(random.randrange(len(computing)))
            for one in (fast, slow):
                one.computed(*computed)
        assert fast.num_computing == slow.num_computing == len(computing)
        assert [fast.sharers(name) for name in names] == [slow.sharers(name) for name in names]
        before = [random.randrange(300), random.randrange(300)]
        by_fast, by_slow = list(before), list(before)
        fast.credit(names, keys, ENDPOINTS[:2], by_fast, 16.5)
        slow.credit(names, keys, ENDPOINTS[:2], by_slow, 16.5)
        assert by_fast == by_slow


def test_ending_what_never_began_is_an_error():
    fast = native.load().Underway()
    with pytest.raises(IndexError):
        fast.end(names_of(make_keys(("a", 5))))
    with pytest.raises(ValueError, match="8 bytes"):
        fast.begin((b"short",))
