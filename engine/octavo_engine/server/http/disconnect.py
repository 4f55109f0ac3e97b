"""Whether a request's client is still there: work for a client that left is cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from octavo_engine.server.limits import RequestLimits


class ClientGone(Exception):
    """The client closed the connection, or stopped reading; there is no client to answer."""


class ClientLine(Protocol):
    """The connection under one exchange, past ASGI's messages; where the server offers it."""

    ignorable: bytes  # what a client ignores between two pieces of its answer; empty: nothing

    @property
    def has_come(self) -> bool:
        """Whether all of the request is here."""

    @property
    def is_open(self) -> bool:
        """Whether the answer has begun, is not at its end, and its client's buffers have room."""

    def write(self, payload: bytes) -> None:
        """A chunk of the answer, while `is_open`."""

    def watch(self, left: Callable[[], None]) -> None:
        """`left` is called when the client goes; at once, if it is gone."""

    def unwatch(self, left: Callable[[], None]) -> None: ...


class ConnectionWatch(Protocol):
    """What is known of a request's client while it is served; an Exchange is one."""

    line: ClientLine | None
    limits: RequestLimits

    @property
    def has_stopped_reading(self) -> bool:
        """Whether what was written last waits too long for room in the client's buffers."""

    async def gone(self) -> None:
        """Returns when the client has left or has read nothing for too long."""


class CancelOnDisconnect:
    """Cancels the task it was entered in when the client goes, and says so with ClientGone."""

    def __init__(self, exchange: ConnectionWatch) -> None:
        self._exchange = exchange
        self._left = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # coroutines run in tasks
        self._task: asyncio.Task[Any] = task
        line = self._exchange.line
        self._watch: _LineWatch | _MessageWatch = (
            _MessageWatch(self) if line is None else _LineWatch(self, line)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watch.end()
        if not self._left:
            return
        if kind is None:  # it was done in the same moment: take the cancellation that is on its way
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        if self._task.uncancel() == 0 and kind in (None, asyncio.CancelledError):
            raise ClientGone from None

    @property
    def exchange(self) -> ConnectionWatch:
        return self._exchange

    def leave(self) -> None:
        """The client is gone. A second call does nothing."""
        if not self._left:
            self._left = True
            self._task.cancel()


class _LineWatch:
    """Called by the connection; a timer looks for clients that do not read. No task a request."""

    def __init__(self, presence: CancelOnDisconnect, line: ClientLine) -> None:
        self._presence = presence
        self._line = line
        self._interval_s = presence.exchange.limits.write_timeout_s
        self._arm()
        line.watch(presence.leave)

    def end(self) -> None:
        self._line.unwatch(self._presence.leave)
        self._timer.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        if self._presence.exchange.has_stopped_reading:
            self._presence.leave()
        else:
            self._arm()


class _MessageWatch:
    """Driven by the server's messages, for which a task must wait."""

    def __init__(self, presence: CancelOnDisconnect) -> None:
        self._presence = presence
        self._task = asyncio.create_task(self._wait())

    def end(self) -> None:
        self._task.cancel()

    async def _wait(self) -> None:
        await self._presence.exchange.gone()
        self._presence.leave()
