"""A stream's events on their way out: inline while the client keeps up, else by its task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo_common import failpoints
from octavo_engine.core.text.output_stream import InlineSink, OutputSink

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.routers.token_lines import TokenLines

N = TypeVar("N", contravariant=True)
M = TypeVar("M")


class SseWriter(Protocol[N]):
    """Turns one request's outputs into events. It is given each output once, in order."""

    @property
    def lines(self) -> TokenLines: ...

    def events(self, output: N) -> bytes:
        """Hot path: once per output."""

    def is_last(self, output: N) -> bool:
        """Whether nothing comes after this, whose events were made."""

    def end(self) -> bytes:
        """What follows the last event."""


def sse_sink(exchange: Exchange, writer: SseWriter[M]) -> OutputSink[M]:
    """Opens the stream with the first output and closes it after the last."""
    lines = writer.lines

    def put_inline(output: M) -> None:
        if failpoints.IS_ON:
            failpoints.hit("server.events")
        exchange.write_now(lines.begun(writer.events(output)))

    async def put(output: M) -> None:
        if failpoints.IS_ON:
            failpoints.hit("server.events")
        events = writer.events(output)
        if not exchange.started:
            await exchange.open_stream()
        if writer.is_last(output):
            await exchange.close(lines.begun(events + writer.end()))
        elif events:
            await exchange.write(lines.begun(events))

    return OutputSink(put, InlineSink(exchange.takes_chunks, put_inline))
