"""How many repeats the whole may afford: a share of what is active, of a tenant's, of an engine's.

When everything fails, each retry is a request more for those that are left. So repeats are counted
before they are sent, never above a fixed share of the work there is; a tenant has a smaller share
of its own; and where a pool refuses most of what it gets, some is refused here at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from octavo_router.config.settings import RetryConfig

Spent = Literal["", "budget", "client_budget"]

WINDOW_S = 120.0
QUIET_S = 10.0  # without a loss, before an engine's next death is another one
MIN_ATTEMPTS = 32  # before a share of refusals means anything
NUM_PARTS = 12  # the window forgets a twelfth at a time
MAX_TENANTS = 1024


_SAYS_NOTHING = frozenset(
    (AttemptResult.CLIENT_GONE, AttemptResult.EXPIRED, AttemptResult.CONNECT_FAILED)
)


class Windowed:
    """Two counts over the last two minutes."""

    __slots__ = ("_at", "_first", "_parts", "_second", "_until")

    def __init__(self) -> None:
        self._parts: list[tuple[float, float]] = []
        self._first = 0.0
        self._second = 0.0
        self._at = 0
        self._until = 0.0  # the part's end

    def count(self, now: float, second: float = 0.0) -> None:
        """One of the first. Hot path: once per request."""
        if now >= self._until:
            self._forget(now)
        self._first += 1.0
        self._second += second

    def add(self, now: float, first: float = 0.0, second: float = 0.0) -> None:
        self._forget(now)
        self._first += first
        self._second += second

    def read(self, now: float) -> tuple[float, float]:
        self._forget(now)
        return (
            self._first + sum(first for first, _ in self._parts),
            self._second + sum(second for _, second in self._parts),
        )

    def _forget(self, now: float) -> None:
        part = int(now / (WINDOW_S / NUM_PARTS))
        if part == self._at:
            return
        passed = min(part - self._at, NUM_PARTS)
        self._parts.append((self._first, self._second))
        self._parts += [(0.0, 0.0)] * (passed - 1)
        del self._parts[: max(0, len(self._parts) - (NUM_PARTS - 1))]
        self._first = self._second = 0.0
        self._at = part
        self._until = (part + 1) * (WINDOW_S / NUM_PARTS)


class RetryBudget:
    """Repeats under way, against requests under way; and repeats of each tenant, over time."""

    __slots__ = ("_clock", "_tenants", "config", "num_active", "num_repeating")

    def __init__(self, config: RetryConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.num_active = 0  # requests
        self.num_repeating = 0  # of them, those in a second or later attempt
        self._clock = clock
        self._tenants: dict[str, Windowed] = {}

    def begin(self, tenant: str, now: float | None = None) -> None:
        """A request came in."""
        self.num_active += 1
        window = self._tenants.get(tenant) or self._of(tenant)
        window.count(self._clock() if now is None else now)

    def end(self, *, num_repeats: int) -> None:
        """It is over, after so many repeats that `take` allowed."""
        self.num_active -= 1
        self.num_repeating -= num_repeats

    def take(self, tenant: str) -> Spent:
        """Ask before each repeat. "": go on, it is counted; else which budget is spent."""
        allowed = max(self.config.budget_min, int(self.config.budget * self.num_active))
        if self.num_repeating >= allowed:
            return "budget"
        now = self._clock()
        window = self._of(tenant)
        requests, repeats = window.read(now)
        if repeats >= max(self.config.budget_min, self.config.client_share * requests):
            return "client_budget"
        window.add(now, second=1.0)
        self.num_repeating += 1
        return ""

    def _of(self, tenant: str) -> Windowed:
        window = self._tenants.get(tenant)
        if window is None:
            if len(self._tenants) >= MAX_TENANTS:  # the oldest: dictionaries keep their order
                del self._tenants[next(iter(self._tenants))]
            window = self._tenants[tenant] = Windowed()
        return window


class _Allowance(NamedTuple):
    left: int  # losses that count for nothing
    at: float  # the last loss
    epoch: str


_NO_LOSS: Final = _Allowance(0, -QUIET_S, "")


class Losses:
    """What the end of an engine may cost without counting: all that it had in hand, once.

    A third of the pool dies, and a third of all requests must go on elsewhere at the same moment:
    far more than a share for repeats allows, and yet no storm, for an engine dies once. So does one
    that hangs, as its silence to routers shows, and one that is signalled to end, and at its
    deadline gives back what it has not answered. One that goes on losing what it is given, without
    having been started again, has nothing free until it was quiet for a while.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._allowed: dict[str, _Allowance] = {}

    def covers(self, endpoint: str, epoch: str, in_flight: int) -> bool:
        """A request that it had accepted was lost there, of so many, this one included.

        `epoch`: which of its lives that was, "" where that is not known. What one life lost is
        nothing against the next one: an engine that starts within a second may die again within
        another.
        """
        now = self._clock()
        before = self._allowed.pop(endpoint, _NO_LOSS)
        left = before.left
        if now - before.at >= QUIET_S or epoch != before.epoch:
            left = in_flight
            self._forget(now)
        # The latest loss stands last.
        self._allowed[endpoint] = _Allowance(max(left - 1, 0), now, epoch)
        return left > 0

    def _forget(self, now: float) -> None:
        for endpoint, allowance in tuple(self._allowed.items()):
            if now - allowance.at < QUIET_S:
                break
            del self._allowed[endpoint]


class Throttle:
    """Refuses some requests at once where most would be refused anyway.

        p = max(0, (requests - K * accepted) / (requests + 1))        over two minutes, by pool

    Fed with how attempts ended (`note`), so what it refuses itself does not count. `tick` settles
    the shares about once a second: asking costs one look-up.
    """

    __slots__ = ("_clock", "_pools", "_rng", "config", "shares")

    def __init__(self, config: RetryConfig, clock: Callable[[], float], rng: Random) -> None:
        self.config = config  # may be replaced at any time
        self._clock = clock
        self._rng = rng
        self._pools: dict[str, Windowed] = {}
        self.shares: dict[str, float] = {}  # refused now, by pool; mostly none

    def note(self, pool: str, result: AttemptResult) -> None:
        """An attempt ended so. Only who answers can say that it is full: a client that left, or an
        engine that could not be reached, says nothing of those that will be there next.
        """
        if result in _SAYS_NOTHING:
            return
        window = self._pools.get(pool)
        if window is None:
            window = self._pools[pool] = Windowed()
        window.count(self._clock(), 0.0 if result is AttemptResult.REFUSED else 1.0)

    def tick(self) -> None:
        now = self._clock()
        shares = {}
        for pool, window in list(self._pools.items()):
            requests, accepted = window.read(now)
            if not requests:
                del self._pools[pool]
            if requests < MIN_ATTEMPTS:
                continue  # two refusals at night must not refuse the morning's first requests
            share = (requests - self.config.throttle_factor * accepted) / (requests + 1.0)
            if share > 0.0:
                shares[pool] = share
        self.shares = shares

    def refuses(self, pool: str) -> bool:
        """Whether this request should be refused now."""
        share = self.shares.get(pool)
        return share is not None and self._rng.random() < share
