"""Requests that engines die of: at few engines until they are answered, refused after two deaths.

    under way ──answered──► trusted
        │  └── until then at two engines at most, however many send it at once
        └──its engine died──► suspect, at one engine at a time ──got further──► trusted
                                 └──that one died too──► refused for retry.quarantine_s, forgotten

A request is known by its pool, path and body, not by its sender. All that an engine had begun when
it died is suspect; what is answered elsewhere is cleared by that. Pure but for the clock, bounded,
and belongs to the event loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from octavo_router.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from octavo_router.config.settings import RetryConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Change

MAX_DEATHS: Final = 2
MAX_WATCHED: Final = 16_384
MAX_COPIES: Final = 16  # that join the engines which have it; further ones wait
PROOF_S: Final = 2.0  # what runs for so long without a death goes anywhere
REPORT_S: Final = 3.0  # within which a death shows in the endpoint's state
REFUSAL_S: Final = 1.0  # in which a dead engine's answers to what comes later are not deaths


class Death(NamedTuple):
    endpoint: Endpoint
    at: float
    is_certain: bool  # the engine said so itself


@dataclass(slots=True)
class DeathWatch:
    """One request that is not trusted, and where copies of it are under way."""

    since: float  # the second copy's time, or the first death's
    copies: Counter[str] = field(default_factory=Counter)  # by endpoint id
    deaths: list[Death] = field(default_factory=list)
    refused_until: float = 0.0


# By `key_of`: True is trusted, and an endpoint's id is one copy there; most never come to more.
Watched: TypeAlias = dict[int, "bool | str | DeathWatch"]


def key_of(pool: str, path: str, body: bytes) -> int:
    """Not to be guessed: Python's hashes of bytes have a secret of the process."""
    return hash((pool, path, body))


def digest_of(body: bytes) -> str:
    """For the log; the same wherever it is sent."""
    return blake2b(body, digest_size=16).hexdigest()


class Quarantine:
    """`begin` and `end` around each attempt; `lost` and `answered` as it comes to something."""

    __slots__ = ("_clock", "_died_at", "_down_at", "config", "watched")

    def __init__(self, config: RetryConfig, clock: Callable[[], float]) -> None:
        self.config = config  # may be replaced at any time
        self.watched: Watched = {}
        self._clock = clock
        self._died_at: dict[str, float] = {}  # by endpoint id
        self._down_at: dict[str, float] = {}

    def refusal(self, key: int) -> Rejected | None:
        """Why it is sent to no engine now."""
        watch = self.watched.get(key)
        if type(watch) is not DeathWatch or not watch.refused_until:
            return None
        if self._clock() >= watch.refused_until:
            del self.watched[key]
            return None
        return Rejected(
            422, "request_quarantined",
            f"{MAX_DEATHS} engines ended while they answered this request, so it is refused for "
            f"{self.config.quarantine_s:g} s; change the request, or report it to the operator",
        )  # fmt: skip

    def is_suspect(self, key: int) -> bool:
        """An engine died of it, and no other has answered it since."""
        watch = self.watched.get(key)
        return type(watch) is DeathWatch and bool(watch.deaths)

    def engines(self, key: int) -> Collection[str] | None:
        """The ids of those that it may go to now; None: any."""
        watch = self.watched.get(key)
        if type(watch) is not DeathWatch or len(watch.copies) + len(watch.deaths) < MAX_DEATHS:
            return None
        if watch.deaths:
            return watch.copies or None
        if self._clock() - watch.since >= PROOF_S:
            return None
        return watch.copies if watch.copies.total() < MAX_COPIES else ()

    def begin(self, key: int, id_: str) -> None:
        """An attempt goes to this endpoint."""
        watched = self.watched
        known = watched.get(key)
        if known is None:
            if len(watched) >= MAX_WATCHED:
                self.forget()
            watched[key] = id_
        elif type(known) is str:
            watched[key] = DeathWatch(self._clock(), Counter((known, id_)))
        elif type(known) is DeathWatch:
            known.copies[id_] += 1

    def end(self, key: int, id_: str) -> None:
        """It is over, without an answer."""
        known = self.watched.get(key)
        if type(known) is str:
            del self.watched[key]
        elif type(known) is DeathWatch and known.copies[id_] > 0:
            known.copies[id_] -= 1
            known.copies = +known.copies
            if not known.copies and not known.deaths:
                del self.watched[key]

    def answered(self, key: int, *, is_further: bool = True) -> None:
        """It has its answer, or the first of it. `is_further`: more than where an engine died."""
        known = self.watched.get(key)
        if known is not True and (is_further or type(known) is not DeathWatch or not known.deaths):
            self.watched[key] = True

    def lost(self, key: int, endpoint: Endpoint, sent_at: float, *, is_said: bool) -> bool:
        """Its engine died, or the connection: whether it is refused from now on.

        `is_said`: the engine answered that it is dead, as it does to what comes after that too.
        """
        now = self._clock()
        if not self.config.quarantine_s:
            return False
        known_at = self._died_at.get(endpoint.id)
        if known_at is not None and is_said and known_at <= sent_at < known_at + REFUSAL_S:
            return False
        if known_at is None or sent_at >= known_at:
            self._died_at[endpoint.id] = now
        watch = self.watched.get(key)
        if type(watch) is not DeathWatch:
            watch = self.watched[key] = DeathWatch(
                now, Counter((watch,) if type(watch) is str else ())
            )
        if any(death.endpoint is endpoint and sent_at < death.at for death in watch.deaths):
            return bool(watch.refused_until)  # another copy was lost by the same death
        watch.deaths = [death for death in watch.deaths if self._is_true(death, now)]
        watch.deaths.append(Death(endpoint, now, is_said))
        if len(watch.deaths) < MAX_DEATHS:
            return False
        watch.refused_until = now + self.config.quarantine_s
        return True

    def changed(self, change: Change) -> None:
        """An endpoint came, went, or changed its state."""
        endpoint = change.endpoint
        if endpoint.state in ("down", "connecting"):
            self._down_at[endpoint.id] = self._clock()

    def forget(self) -> None:
        """Makes room: what is trusted is learnt again, and old deaths are over."""
        now = self._clock()
        oldest = now - self.config.quarantine_s
        for key, known in tuple(self.watched.items()):
            is_old = type(known) is DeathWatch and not known.copies and known.since < oldest
            if known is True or is_old:
                del self.watched[key]
        for times in (self._died_at, self._down_at):
            for id_, at in tuple(times.items()):
                if at < oldest:
                    del times[id_]

    def _is_true(self, death: Death, now: float) -> bool:
        """A connection may break without a death: then the endpoint is never reported down."""
        if now - death.at >= self.config.quarantine_s:
            return False
        is_down = self._down_at.get(death.endpoint.id, float("-inf")) >= death.at - REPORT_S
        return death.is_certain or is_down or now - death.at < REPORT_S
