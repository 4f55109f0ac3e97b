"""Copies of requests for another pool, whose answers are dropped: traffic to judge a version by."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from octavo_router.flow.quarantine import key_of
from octavo_router.http.upstream_connection import Loss
from octavo_router.proxy import heads
from octavo_router.routing.outcome import AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_router.flow.quarantine import Quarantine
    from octavo_router.http.request_head import RequestHead
    from octavo_router.http.response_head import ResponseHead
    from octavo_router.http.upstream_connection import UpstreamConnection
    from octavo_router.http.upstream_pool import OnItsWay
    from octavo_router.proxy.interfaces import Dispatching
    from octavo_router.proxy.upstreams import Upstream, Upstreams
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.models import Copy
    from octavo_router.routing.request import RouteRequest

MAX_COPIES: Final = 256  # under way; above that, requests are not copied


class Mirrors:
    """Sends copies. They never wait, are never tried again, and never slow down what they copy."""

    def __init__(
        self, dispatcher: Dispatching, upstreams: Upstreams, quarantine: Quarantine
    ) -> None:
        self.quarantine = quarantine
        self._dispatcher = dispatcher
        self._upstreams = upstreams
        self.under_way: set[_Copy] = set()

    def send(
        self,
        head: RequestHead,
        body: bytes,
        path: str,
        request: RouteRequest,
        copies: Iterable[Copy],
        *,
        total_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        for copy in copies:
            if len(self.under_way) >= MAX_COPIES:
                return
            key = key_of(copy.pool, path, body)
            if self.quarantine.is_suspect(key):
                continue  # a copy is not worth an engine
            placed = replace(request, pool=copy.pool, revision=copy.revision, explain=False)
            lease = self._dispatcher.place(placed)
            if lease is None:
                continue
            upstream = self._upstreams.of(lease.endpoint)
            request_id = request.request_id.encode()
            data = heads.request_bytes(head, upstream.lines, request_id, body, forward=head.forward)
            one = _Copy(self, lease, data, key)
            one.timer = loop.call_later(total_s, one.stop, AttemptResult.TIMEOUT)
            self.under_way.add(one)
            one.start(upstream)

    def stop(self) -> None:
        for one in list(self.under_way):
            one.stop()


class _Copy:
    """The user of one connection."""

    timer: asyncio.TimerHandle

    def __init__(self, mirrors: Mirrors, lease: Lease, data: bytes, key: int) -> None:
        self._mirrors = mirrors
        self._key = key
        self._sent_at = time.monotonic()
        mirrors.quarantine.begin(key, lease.endpoint.id)
        self._lease = lease
        self._data = data
        self._connecting: OnItsWay | None = None
        self._connection: UpstreamConnection | None = None
        self._result = AttemptResult.OK

    def start(self, upstream: Upstream) -> None:
        connection = upstream.pool.take()
        if connection is not None:
            self.on_connected(connection)
        else:
            self._connecting = upstream.pool.connect(self)

    def stop(self, result: AttemptResult = AttemptResult.CLIENT_GONE) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        self._over(result)

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        self._connection = connection
        connection.send(self, self._data)

    def on_whole(self, head: ResponseHead, body: bytes) -> None:
        self.on_head(head)
        self.on_end()

    def on_head(self, head: ResponseHead) -> None:
        self._lease.first_token()
        if head.status in (429, 503):
            self._result = AttemptResult.REFUSED
        elif head.status >= 500:
            self._result = AttemptResult.ERROR_5XX
        elif head.status >= 400:
            self._result = AttemptResult.REJECTED

    def on_body(self, data: bytes) -> None:
        """Dropped."""

    def on_end(self) -> None:
        self._over(self._result)

    def on_lost(self, loss: Loss, problem: str) -> None:
        if loss in (Loss.CLOSED, Loss.BROKEN):
            endpoint = self._lease.endpoint
            self._mirrors.quarantine.lost(self._key, endpoint, self._sent_at, is_said=False)
        self._over(AttemptResult.BROKEN)

    def _over(self, result: AttemptResult) -> None:
        self._connection = None
        self.timer.cancel()
        self._mirrors.under_way.discard(self)
        quarantine = self._mirrors.quarantine
        if result is AttemptResult.OK:
            quarantine.answered(self._key)
        else:
            quarantine.end(self._key, self._lease.endpoint.id)
        self._lease.finish(Outcome(result))
