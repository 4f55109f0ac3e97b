"""How news of one request reach whoever reads them: a task that waits, or a tap that does not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.text.output_processor import TrackedRequest
    from octavo_engine.core.text.outputs import RequestOutput

SUSPEND_AFTER_S = 2.0  # without a look at what is there; see OutputReader

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class InlineSink(Generic[T]):
    """Where news may go at once, past the task that waits for them: no wake-up, no iterator.

    It is given none but while `is_open` says so, and never the last ones, so that beginning, end
    and whatever goes wrong stay with the task.
    """

    is_open: Callable[[], bool]
    tell: Callable[[T], None]

    def after(self, read: Callable[[U], T]) -> InlineSink[U]:
        """A tap for what `read` makes such news of."""
        tell = self.tell
        return InlineSink(self.is_open, lambda news: tell(read(news)))


class OutputReader:
    """Of one request, which one task reads. What is not read piles up in the request; where that
    goes on for a while, `suspend` is called, and once more when it is read again."""

    __slots__ = (
        "_has_begun", "_interval", "_is_silent", "_is_suspended", "_request", "_suspend", "_tap",
        "_unread_since", "_waiter",
    )  # fmt: skip

    def __init__(
        self,
        request: TrackedRequest,
        *,
        silent: bool,
        tap: InlineSink[RequestOutput] | None,
        interval: int = 1,
        suspend: Callable[[bool], None] | None = None,
    ) -> None:
        self._request = request
        self._is_silent = silent  # it reads at the end only
        self._interval = interval  # tokens of one answer that are worth a piece of news
        self._has_begun = False
        self._tap = tap
        self._suspend = suspend
        self._is_suspended = False
        self._unread_since = 0.0  # 0: the task waits for news
        self._waiter: asyncio.Future[None] | None = None  # while the task has nothing to do

    def tell(self) -> None:
        """The request has news, or an error. Hot path: once per request and step."""
        request, waiter = self._request, self._waiter
        if waiter is None or waiter.done():  # it has older news in hand, and will look again
            self._note_unread()
            return
        if not self._is_due:
            return
        if not request.finished:
            tap = self._tap
            if tap is not None and tap.is_open():
                news = request.take()
                if news is not None:
                    try:
                        tap.tell(news)
                    except Exception as error:  # the request's alone: its task decides
                        waiter.set_exception(error)
                return
        waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """The news since the last call, once there are any; after them the request's error."""
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
        """Whether what has piled up is to be read now. The first token is never waited with."""
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
