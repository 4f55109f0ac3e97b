"""How the outputs of a request leave the core: through its task, or inline past it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_engine.core.text.output_processor import TrackedRequest
    from octavo_engine.core.text.outputs import RequestOutput

SUSPEND_AFTER_S = 2.0  # without a look at what is there; see OutputReader

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class InlineSink(Generic[T]):
    """Takes outputs at once, without waking the request's task.

    It is given outputs only while `is_open` returns true, and never the last one, so that the
    beginning, the end and all errors stay with the task.
    """

    is_open: Callable[[], bool]
    put: Callable[[T], None]

    def after(self, read: Callable[[U], T]) -> InlineSink[U]:
        """A sink for what `read` turns into outputs of this one."""
        put = self.put
        return InlineSink(self.is_open, lambda output: put(read(output)))


@dataclass(frozen=True, slots=True)
class OutputSink(Generic[T]):
    """Where the outputs of a request go, each once and in order.

    `put` takes any output and may wait for its consumer; `inline` takes those between the first and
    the last while it is open.
    """

    put: Callable[[T], Awaitable[None]]
    inline: InlineSink[T] | None = None

    def after(self, read: Callable[[U], T]) -> OutputSink[U]:
        """A sink for what `read` turns into outputs of this one."""
        put, inline = self.put, self.inline
        return OutputSink(
            lambda output: put(read(output)), None if inline is None else inline.after(read)
        )


class OutputReader:
    """One request's outputs, read by one task. Unread output accumulates in the request; after
    SUSPEND_AFTER_S `suspend(True)` is called, and `suspend(False)` when reading goes on."""

    __slots__ = (
        "_has_begun", "_inline", "_interval", "_is_silent", "_is_suspended", "_request", "_suspend",
        "_unread_since", "_waiter",
    )  # fmt: skip

    def __init__(
        self,
        request: TrackedRequest,
        *,
        silent: bool,
        inline: InlineSink[RequestOutput] | None,
        interval: int = 1,
        suspend: Callable[[bool], None] | None = None,
    ) -> None:
        self._request = request
        self._is_silent = silent  # only the last output is read
        self._interval = interval  # tokens of one answer before it is read
        self._has_begun = False
        self._inline = inline
        self._suspend = suspend
        self._is_suspended = False
        self._unread_since = 0.0  # 0: the task waits for output
        self._waiter: asyncio.Future[None] | None = None  # while the task has nothing to do

    def wake(self) -> None:
        """The request has output, or an error. Hot path: once per request and step."""
        request, waiter = self._request, self._waiter
        if waiter is None or waiter.done():  # it handles older output, and will look again
            self._note_unread()
            return
        if not self._is_due:
            return
        if not request.finished:
            inline = self._inline
            if inline is not None and inline.is_open():
                output = request.take()
                if output is not None:
                    try:
                        inline.put(output)
                    except Exception as error:  # the request's alone: its task decides
                        waiter.set_exception(error)
                return
        waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """The output since the last call, once there is any; after it the request's error."""
        request = self._request
        self._unread_since = 0.0
        if self._is_suspended and self._suspend is not None:
            self._is_suspended = False
            self._suspend(False)
        while True:
            if self._is_due and not (self._is_silent and request.error is not None):
                output = request.take()
                if output is not None:
                    self._has_begun = True
                    return output
            if request.error is not None:
                raise request.error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _note_unread(self) -> None:
        if self._suspend is None or self._is_silent or self._is_suspended:
            return
        now = time.monotonic()
        if not self._unread_since:
            self._unread_since = now
        elif now - self._unread_since >= SUSPEND_AFTER_S and not self._request.finished:
            self._is_suspended = True
            self._suspend(True)

    @property
    def _is_due(self) -> bool:
        """Whether unread output is due now. The first token is never delayed."""
        request = self._request
        if request.finished:
            return True
        if self._is_silent:
            return False
        if self._interval == 1 or not self._has_begun:
            return True
        pending = request.pending
        return pending is not None and any(
            len(output.token_ids) >= self._interval for output in pending.outputs
        )
