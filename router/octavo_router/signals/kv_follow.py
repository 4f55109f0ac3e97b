"""Follows the KV events of one plain server over ZMQ: in order, with replay where one was missed.

    live     SUB     [topic, seq u64 BE, payload]
    replay   DEALER  ["", from seq]  ->  ["", (topic,) seq, payload]*, ends with seq all ones

A gap that cannot be replayed, or a seq that starts again, means: forget all blocks and go on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from octavo_router.errors import Unreachable
from octavo_router.signals.kv_events import decode_batch

if TYPE_CHECKING:
    from octavo_router.metrics import LabelledCounter
    from octavo_router.signals.kv_residency import KvResidency

logger = logging.getLogger(__name__)

SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES
REPLAY_S = 5.0
MAX_MESSAGE_BYTES = 64 * 2**20


class KvFollower:
    """One task. `replay` is the address of the server's replay socket; empty: it has none."""

    def __init__(
        self, live: str, replay: str, residency: KvResidency, tally: LabelledCounter
    ) -> None:
        self._live = live
        self._replay = replay
        self._residency = residency
        self._tally = tally
        self._next: int | None = None  # the seq that comes next

    async def follow(self) -> None:
        """Ends only by being cancelled; without pyzmq it does nothing, and says so."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            logger.warning(
                "Cannot follow KV events: pip install pyzmq", extra={"reason": str(error)}
            )
            return
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.subscribe(b"")
            socket.connect(self._live)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == SEQ_BYTES:
                    await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            context.destroy(linger=0)

    async def _take(self, context: Any, seq: int, payload: bytes) -> None:
        expected = self._next
        if expected is not None and seq < expected:
            if seq == 0:  # the server began a new life
                self._forget("restart")
            else:
                self._tally.add("batch", "repeated")
                return
        elif seq != (expected or 0):
            await self._catch_up(context, expected or 0, seq, is_first=expected is None)
            if self._next is not None and seq < self._next:
                return  # the replay brought this one too
            if self._next is not None and seq > self._next:
                self._forget("gap")
        self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._next = seq + 1
        try:
            events = decode_batch(payload)
        except Unreachable as error:
            # What it said is lost, and with it what followed from it.
            logger.warning("Could not read KV events", extra={"reason": str(error)})
            self._forget("unreadable")
            return
        self._residency.apply(events)

    async def _catch_up(self, context: Any, wanted: int, seq: int, *, is_first: bool) -> None:
        """From `wanted` up to `seq`, by replay; where that fails, from nothing."""
        if self._replay:
            try:
                async with asyncio.timeout(REPLAY_S):
                    if await self._replay_from(context, wanted):
                        self._tally.add("batch", "replayed")
                        return
            except TimeoutError:
                logger.warning(
                    "No replay of KV events was available", extra={"endpoint": self._replay}
                )
        if not is_first:
            self._forget("gap")
            self._next = None

    async def _replay_from(self, context: Any, wanted: int) -> bool:
        """False where the server had nothing to tell."""
        import zmq

        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.connect(self._replay)
            await socket.send_multipart([b"", wanted.to_bytes(SEQ_BYTES, "big")])
            is_begun = False
            while True:
                frames = await socket.recv_multipart()
                seq_bytes, payload = frames[-2], frames[-1]
                if len(frames) < 3 or len(seq_bytes) != SEQ_BYTES:
                    continue
                if seq_bytes == END_OF_REPLAY:
                    return is_begun
                seq = int.from_bytes(seq_bytes, "big")
                if not is_begun and seq > wanted:
                    self._forget("gap")  # its buffer begins later: that is all there is to have
                is_begun = True
                if seq >= (self._next or 0):
                    self._apply(seq, payload)
        finally:
            socket.close(linger=0)

    def _forget(self, why: str) -> None:
        self._tally.add("batch", why)
        self._residency.clear()
