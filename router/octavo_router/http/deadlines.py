"""One clock tick for all connections: nobody arms a timer of its own per request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

NEVER = float("inf")
_AT_ONCE: Final = 64  # deadlines reported before the loop does anything else


class TimedWaiter(Protocol):
    """Whatever must not wait for ever. Sets its own deadline, as often as it likes."""

    deadline: float  # monotonic; NEVER for none

    def on_deadline(self, now: float) -> None:
        """It has passed. Called each tick until the deadline moves or the watch ends."""


class DeadlineTick:
    """Looks at everyone who waits, a few times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, tick_s: float = 0.1) -> None:
        self._loop = loop
        self._tick_s = tick_s
        self._waiting: set[TimedWaiter] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._late: list[TimedWaiter] = []  # and not notified yet
        self.watch = self._waiting.add  # called per connection: no frame of our own
        self.forget = self._waiting.discard

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._late = []

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self.check(time.monotonic())

    def check(self, now: float) -> None:
        if self._late:  # some of the last look are not notified yet
            return
        self._late = [waiting for waiting in self._waiting if waiting.deadline <= now]
        self._tell(now)

    def _tell(self, now: float) -> None:
        """Some at a time: thousands that came together are late together."""
        late, self._late = self._late[:_AT_ONCE], self._late[_AT_ONCE:]
        if self._late:
            self._loop.call_soon(self._tell, now)
        for waiting in late:
            # One that was late may have ended another.
            if waiting.deadline <= now and waiting in self._waiting:
                waiting.on_deadline(now)
