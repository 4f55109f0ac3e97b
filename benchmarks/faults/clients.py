"""Clients that send requests of every kind again and again, and compare each answer.

Each answer must be the one that an engine gave before anything went wrong, whole or joined from a
stream: the same text, calls, log-probabilities, finish reasons and usage.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httpx

from benchmarks.faults.answers import answer_of, body_of, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.faults.answers import Answer, Case

    Expected: TypeAlias = "tuple[Case, dict[str, Any], Answer]"

BODIES: Final = 48  # different ones, of all kinds in turn
TIMEOUT_S: Final = 600.0  # of a request: far beyond what any takes
_MAX_CAUSES: Final = 8


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    ended: Counter[str] = field(default_factory=Counter)  # by case
    not_survived: Counter[str] = field(default_factory=Counter)  # of them: lost or changed
    live: dict[int, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    hit: int = 0  # requests that were under way at a kill

    @property
    def board(self) -> dict[str, tuple[int, int]]:
        """Of each case: tried, lost."""
        return {case: (tried, self.not_survived[case]) for case, tried in self.ended.items()}


async def ask(
    client: httpx.AsyncClient, url: str, case: Case, body: dict[str, Any], *, request_id: str = ""
) -> Answer:
    """Raises ValueError on anything but one whole answer."""
    headers = {"x-request-id": request_id} if request_id else {}
    if not body.get("stream"):
        response = await client.post(url + case.path, json=body, headers=headers)
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {response.text[:300]}")
        return answer_of(case, response.json())
    raw = bytearray()
    async with client.stream("POST", url + case.path, json=body, headers=headers) as response:
        async for piece in response.aiter_bytes():
            raw += piece
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {bytes(raw[:300])!r}")
    return joined(case, bytes(raw))


def limits_of(count: int, *, keeps_connections: bool = True) -> httpx.Limits:
    """A connection for each of so many clients, which never expires.

    By default httpx ends one that was idle for five seconds, also where a request has just been
    given it and has not begun: after a pause of this process that request is lost by its own side,
    with a ReadError of a ClosedResourceError.
    """
    return httpx.Limits(
        max_connections=count,
        max_keepalive_connections=count if keeps_connections else 0,
        keepalive_expiry=None,
    )


def causes(error: BaseException) -> str:
    """The error, and what it came of: who ended a connection is seen only in the innermost one."""
    found: list[str] = []
    inner: BaseException | None = error
    while inner is not None and len(found) < _MAX_CAUSES:
        found.append(f"{type(inner).__name__}: {inner}")
        inner = inner.__cause__ or inner.__context__
    return " of ".join(found)


class Clients:
    """They go on until they are stopped."""

    def __init__(
        self,
        url: Callable[[], str],
        expected: Sequence[Expected],
        *,
        pause_s: float = 0.0,
        keeps_connections: bool = True,
    ) -> None:
        self.tally = Tally()
        self._url = url  # of the next request
        self._expected = expected
        self._pause_s = pause_s  # in the mean, between two requests of a client
        self._keeps_connections = keeps_connections
        self._count = 0
        self._is_ending = False

    async def run(self, count: int) -> None:
        limits = limits_of(count, keeps_connections=self._keeps_connections)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._one(client, random.Random(n)) for n in range(count)))

    def end(self) -> None:
        self._is_ending = True

    async def _one(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._is_ending:
            await asyncio.sleep(rng.uniform(0.0, 2.0) * self._pause_s)
            case, body, wanted = self._expected[rng.randrange(len(self._expected))]
            self._count += 1
            number, tally = self._count, self.tally
            tally.live[number] = case.name
            began_at = time.monotonic()
            try:
                answer = await ask(client, self._url(), case, body, request_id=f"client-{number}")
                if answer != wanted:
                    tally.not_survived[case.name] += 1
                    tally.changed.append(f"{case.name}: {answer} instead of {wanted}")
            except (ValueError, KeyError, httpx.HTTPError) as error:
                tally.not_survived[case.name] += 1
                after_s = time.monotonic() - began_at
                tally.lost.append(
                    f"client-{number}, {case.name}, stream {bool(body.get('stream'))}, after"
                    f" {after_s:.1f} s: {causes(error)}"
                )
                print(f"  {time.strftime('%X')} lost: {tally.lost[-1][:300]}", flush=True)
            finally:
                del tally.live[number]
            tally.ended[case.name] += 1
            tally.longest_s = max(tally.longest_s, time.monotonic() - began_at)


async def until(fact: Any, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if fact():
            return True
        await asyncio.sleep(0.02)
    return False


async def expected_answers(
    url: str, cases: Sequence[Case], *, models: Sequence[str] = ("m",), seed: int = 1
) -> list[Expected]:
    """Each body, and its answer while nothing goes wrong: the same whole and streamed."""
    found = []
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for number in range(BODIES):
            case = cases[number % len(cases)]
            body = body_of(case, number, seed)
            body["model"] = models[number // len(cases) % len(models)]
            whole = await ask(client, url, case, body)
            streamed = {**body, "stream": True, **case.streaming}
            parts = await ask(client, url, case, streamed)
            if whole != parts:
                raise SystemExit(f"{case.name}: whole {whole}, streamed {parts}")
            found += [(case, body, whole), (case, streamed, whole)]
    return found
