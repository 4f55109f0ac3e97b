"""A stream's events on their way out: at once where the client keeps up, else by its task."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo_engine.core.text.output_stream import InlineSink

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.routers.token_lines import TokenLines

N = TypeVar("N", contravariant=True)
M = TypeVar("M")


class SseWriter(Protocol[N]):
    """Makes events of one request's news. Each piece is given once, in order."""

    @property
    def lines(self) -> TokenLines: ...

    def events(self, news: N) -> bytes:
        """Hot path: once per piece of news."""

    def is_last(self, news: N) -> bool:
        """Whether nothing comes after this, whose events were made."""

    def end(self) -> bytes:
        """What stands behind the last event."""


def tap(exchange: Exchange, teller: SseWriter[M]) -> InlineSink[M]:
    """For the news between the first and the last: written as they come."""

    def tell(news: M) -> None:
        exchange.write_now(teller.lines.begun(teller.events(news)))

    return InlineSink(exchange.takes_chunks, tell)


async def tell(exchange: Exchange, teller: SseWriter[M], news: AsyncGenerator[M, None]) -> None:
    """All news that the tap has not taken, to the end of the stream."""
    lines = teller.lines
    async with aclosing(news):
        async for piece in news:
            events = teller.events(piece)
            if not exchange.started:
                await exchange.open_stream()
            if teller.is_last(piece):
                await exchange.close(lines.begun(events + teller.end()))
            elif events:
                await exchange.write(lines.begun(events))
