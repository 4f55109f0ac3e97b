"""The compiled index and its slow twin, driven through the same random life."""

import struct
from hashlib import blake2b

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo_router.residency import index as slow
from octavo_router.residency import native

LIMITS = {"max_keys_per_slot": 60, "max_assumed_keys_per_slot": 24}


def key(name, depth):
    return blake2b(f"{name}/{depth}".encode(), digest_size=8).digest()


def chain(name, length):
    return b"".join(key(name, depth) for depth in range(length))


names = st.sampled_from("abcdef")
lengths = st.integers(0, 30)


class Twins(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        fast = native.load()
        assert fast.is_native
        self.fast = fast.ResidencyIndex(**LIMITS)
        self.slow = slow.PyResidencyIndex(**LIMITS)
        self.slots = []

    def both(self, name, *args):
        expected = getattr(self.slow, name)(*args)
        assert getattr(self.fast, name)(*args) == expected
        return expected

    def pick(self, data):
        return data.draw(st.sampled_from(self.slots))

    @precondition(lambda self: len(self.slots) < 4)
    @rule()
    def add_slot(self):
        self.slots.append(self.both("add_slot"))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def drop_slot(self, data):
        slot = self.pick(data)
        self.slots.remove(slot)
        self.both("drop_slot", slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def clear(self, data):
        self.both("clear", self.pick(data))

    @precondition(lambda self: self.slots)
    @rule(
        data=st.data(), name=names, first=lengths, length=lengths, tokens=st.integers(0, 2**32 - 1)
    )
    def store(self, data, name, first, length, tokens):
        entries = [struct.pack("<8sI", key(name, first + i), tokens) for i in range(length)]
        self.both("apply", self.pick(data), b"".join(entries), b"")

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), name=names, first=lengths, length=lengths)
    def evict(self, data, name, first, length):
        keys = b"".join(key(name, first + i) for i in range(length))
        self.both("apply", self.pick(data), b"", keys)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), name=names, length=lengths, rate=st.floats(0, 100))
    def assume(self, data, name, length, rate):
        self.both("assume", self.pick(data), chain(name, length), rate)

    @rule(name=names, length=lengths)
    def match(self, name, length):
        self.both("match", chain(name, length), self.slots)

    @invariant()
    def counts_agree(self):
        for slot in self.slots:
            self.both("num_keys", slot)
        assert self.fast.num_refused == self.slow.num_refused


TestTwins = Twins.TestCase
TestTwins.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None
)


def test_a_long_life_of_many_keys_agrees():
    """Tables grow, shrink and close their gaps thousands of times."""
    fast = native.load().ResidencyIndex()
    twin = slow.PyResidencyIndex()
    slot = fast.add_slot()
    assert twin.add_slot() == slot
    for step in range(300):
        size = 5_000 if step % 100 < 50 else 500
        first = step * 37 % 20_000
        evicted = b"".join(key("x", (first + i * 7) % 25_000) for i in range(1_500))
        entries = [struct.pack("<8sI", key("x", first + i), step) for i in range(0, size, 11)]
        for index in (fast, twin):
            index.apply(slot, b"".join(entries), evicted)
        assert fast.num_keys(slot) == twin.num_keys(slot)
    probes = [key("x", number) for number in range(25_000)]
    assert [fast.match(probe, [slot]) for probe in probes] == [
        twin.match(probe, [slot]) for probe in probes
    ]
