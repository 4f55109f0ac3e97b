"""Workloads made by chance from a seed: the shapes of load that distinguish policies."""

from __future__ import annotations

import math
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Protocol

from octavo.study.workload import Arrival, Texts, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

# Arrivals come at one a second on average; `Workload.at_load` sets the pace.
MEAN_THINK_S = 5.0
AGENT_CALLS = 43


class Make(Protocol):
    def __call__(self, num_requests: int, rng: Random) -> list[Arrival]: ...


def synthetic(name: str, num_requests: int, *, seed: int = 0) -> Workload:
    """One of SYNTHETIC; the same for the same seed."""
    return Workload(name, tuple(SYNTHETIC[name](num_requests, Random(f"{name}/{seed}"))))


def multi_turn(num_requests: int, rng: Random) -> list[Arrival]:
    """Conversations of 2 to 10 turns: each prompt holds all earlier turns, behind one of
    a few system prompts. People think between turns, for `MEAN_THINK_S` on average."""
    texts = Texts()
    systems = [texts.new(500) for _ in range(8)]
    arrivals: list[Arrival] = []
    for session in _sessions("conversation", arrivals, rng):
        session.prompt = (rng.choice(systems),)
        for _ in range(min(rng.randint(2, 10), num_requests - len(arrivals))):
            session.call(texts.new(_length(rng, 400)), texts.new(_length(rng, 200)))
        if len(arrivals) == num_requests:
            break
    return arrivals


def shared_system(num_requests: int, rng: Random) -> list[Arrival]:
    """150 system prompts of 6,000 tokens, each used five times and more: together more than one
    engine can hold, and less than all of them can."""
    texts = Texts()
    systems = [texts.new(6000) for _ in range(150)]
    return [
        Arrival((rng.choice(systems), texts.new(_length(rng, 800))), texts.new(_length(rng, 200)),
                now)
        for now in _poisson(num_requests, rng)
    ]  # fmt: skip


def random_prompts(num_requests: int, rng: Random) -> list[Arrival]:
    """Prompts that share nothing, a few of them long: there is nothing to gain but balance."""
    texts = Texts()
    return [
        Arrival((texts.new(_length(rng, 1000)),), texts.new(_length(rng, 200)), now)
        for now in _poisson(num_requests, rng)
    ]


def hot_prefix(num_requests: int, rng: Random) -> list[Arrival]:
    """Nine in ten prompts begin with the same 4,000 tokens; one engine must not serve them all."""
    texts = Texts()
    hot = texts.new(4000)
    return [
        Arrival(
            (hot, texts.new(_length(rng, 200)))
            if rng.random() < 0.9
            else (texts.new(_length(rng, 2000)),),
            texts.new(_length(rng, 200)),
            now,
        )
        for now in _poisson(num_requests, rng)
    ]


def bursts(num_requests: int, rng: Random) -> list[Arrival]:
    """64 requests in one moment, every minute or so: half of the bursts repeat one prompt, the
    others are agents that share a context of 8,000 tokens."""
    texts = Texts()
    arrivals: list[Arrival] = []
    now = 0.0
    while len(arrivals) < num_requests:
        now += rng.expovariate(1 / 64)
        context = texts.new(8000)
        is_repeat = rng.random() < 0.5
        question = texts.new(200)
        for _ in range(min(64, num_requests - len(arrivals))):
            prompt = (context, question if is_repeat else texts.new(200))
            arrivals.append(Arrival(prompt, texts.new(_length(rng, 100)), now))
    return arrivals


def agents(num_requests: int, rng: Random) -> list[Arrival]:
    """Agents of 43 calls whose context grows to about 140,000 tokens, behind instructions and tools
    that all of them share. Tools run between calls, for `MEAN_THINK_S` on average, and every fourth
    request is a prompt of somebody else that shares nothing."""
    texts = Texts()
    instructions = texts.new(20_000)
    arrivals: list[Arrival] = []
    for session in _sessions("agent", arrivals, rng):
        session.prompt = (instructions,)
        for call in range(AGENT_CALLS):
            if call % 4 == 3:
                alone = (texts.new(_length(rng, 2000)),)
                at = session.started_at + 8 * call
                arrivals.append(Arrival(alone, texts.new(_length(rng, 200)), at))
            session.call(texts.new(_length(rng, 2000)), texts.new(_length(rng, 150)))
            if len(arrivals) >= num_requests:
                return arrivals[:num_requests]
    return arrivals


class _Session:
    """Calls that follow each other, each behind all before it."""

    def __init__(self, name: str, started_at: float, arrivals: list[Arrival], rng: Random) -> None:
        self.prompt: tuple[range, ...] = ()  # of the next call
        self.started_at = started_at
        self._name, self._arrivals, self._rng = name, arrivals, rng
        self._after: int | None = None

    def call(self, text: range, answer: range) -> None:
        is_first = self._after is None
        delay_s = self.started_at if is_first else self._rng.expovariate(1 / MEAN_THINK_S)
        prompt = (*self.prompt, text)
        self._arrivals.append(Arrival(prompt, answer, delay_s, self._after, self._name))
        self._after = len(self._arrivals) - 1
        self.prompt = (*prompt, answer)


def _sessions(kind: str, arrivals: list[Arrival], rng: Random) -> Iterator[_Session]:
    """One a second on average, without an end."""
    now = 0.0
    for number in count(1):
        now += rng.expovariate(1.0)
        yield _Session(f"{kind} {number}", now, arrivals, rng)


SYNTHETIC: dict[str, Make] = {
    "multi-turn": multi_turn,
    "shared-system": shared_system,
    "random": random_prompts,
    "hot-prefix": hot_prefix,
    "bursts": bursts,
    "agents": agents,
}


def _poisson(count: int, rng: Random) -> Iterator[float]:
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1.0)
        yield now


def _length(rng: Random, median: int) -> int:
    """Most are near the median; one in fifty is four times as long."""
    return max(1, min(int(rng.lognormvariate(math.log(median), 0.7)), 8 * median))
