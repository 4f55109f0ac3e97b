"""Test generations: a few greedy tokens for a fixed prompt, asked of an engine under suspicion."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from octavo_router.config import RouterConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.http.response_head import AnswerHead
    from octavo_router.http.upstream_connection import Loss, UpstreamConnection
    from octavo_router.proxy.upstreams import Upstreams
    from octavo_router.routing.dispatcher import Dispatcher

_MAX_TOKENS: Final = 4
_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 64 * 2**10


class Canaries:
    """Runs them, and tells the dispatcher what came back."""

    def __init__(self, dispatcher: Dispatcher, upstreams: Upstreams, config: RouterConfig) -> None:
        self.config = config  # may be replaced at any time
        self._dispatcher = dispatcher
        self._upstreams = upstreams
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, endpoint: Endpoint) -> None:
        task = asyncio.get_running_loop().create_task(self._run(endpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, endpoint: Endpoint) -> None:
        answer = await self._ask(endpoint)
        self._dispatcher.canary_finished(endpoint, answer)

    async def _ask(self, endpoint: Endpoint) -> str | None:
        """The text; None where there was none in time."""
        upstream = self._upstreams.of(endpoint)
        body = {
            "prompt": self.config.health.canary_prompt,
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
        }
        if endpoint.names:
            body["model"] = endpoint.names[0]
        exchange = _Exchange(upstream.lines.host, upstream.lines.extra, json.dumps(body).encode())
        connection = upstream.pool.take()
        connecting = None
        if connection is not None:
            exchange.on_connected(connection)
        else:
            connecting = upstream.pool.connect(exchange)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                data = await exchange.done
        except TimeoutError:
            return None
        finally:
            if connecting is not None:
                connecting.cancel()
            exchange.stop()
        return _text_of(data)


class _Exchange:
    """The user of one connection."""

    def __init__(self, host: bytes, extra: bytes, body: bytes) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._request = b"".join(
            (
                b"POST /v1/completions",
                host,
                extra,
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body),
                body,
            )
        )
        self._connection: UpstreamConnection | None = None
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        connection.send(self, self._request)

    def on_whole(self, head: AnswerHead, body: bytes) -> None:
        self._connection = None
        self._end(body if head.status == 200 else b"")

    def on_head(self, head: AnswerHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _MAX_BYTES:
            self.stop()
            self._end(b"")

    def on_end(self) -> None:
        self._connection = None
        self._end(b"".join(self._pieces) if self._status == 200 else b"")

    def on_lost(self, loss: Loss, problem: str) -> None:
        self._connection = None
        self._end(b"")

    def stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _end(self, data: bytes) -> None:
        if not self.done.done():
            self.done.set_result(data)


def _text_of(data: bytes) -> str | None:
    try:
        text = json.loads(data)["choices"][0]["text"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) and text else None
