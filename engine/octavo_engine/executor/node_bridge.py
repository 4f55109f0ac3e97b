"""Between a rank's memory on one host and its process on another: the same rings and the same
socket at both ends, and a connection that carries their messages.

So neither the leader nor a rank's process knows of hosts. Each end has a bridge:

    leader's host   socket ⇄ ┐           ┌ ⇄ socket    node's host
                    plans  → ┤ bridge ═══ bridge ├ → plans
                    rows   ⇄ ┘           └ ⇄ rows
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from octavo_engine import _native
from octavo_engine.executor import messages
from octavo_engine.executor.commands import stage_of
from octavo_engine.executor.messages import MAX_MESSAGE
from octavo_engine.executor.node_wire import NodeError, NodeFrameKind
from octavo_engine.executor.rank_processes import shut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from octavo_engine.executor.node_wire import NodeChannel

LOOK_S = 0.25  # so often a wait looks whether the bridge is closed


class BridgeFiles:
    """The memory of this end: `ring` is read by rank `place[0]` of `place[1]`."""

    def __init__(self, ring: int, place: tuple[int, int], rows: Sequence[int]) -> None:
        self.ring, self.place, self.rows = ring, place, rows


class NodeBridge:
    """One end of it: the leader's, or that of the node of a rank. Owns the channel and its end of
    the socket. `closed` says why it is over."""

    def __init__(
        self,
        channel: NodeChannel,
        connection: Connection,
        files: BridgeFiles,
        rank: int,
        num_ranks: int,
        *,
        is_leader: bool,
        change: Callable[[messages.ToWorker], messages.ToWorker] | None = None,
    ) -> None:
        """`change` is for messages to the rank: a host has settings of its own."""
        self.why = ""
        self.closed = threading.Event()
        self._channel, self._connection, self._files = channel, connection, files
        self._rank, self._num_ranks, self._is_leader = rank, num_ranks, is_leader
        self._change = change
        self._threads: list[threading.Thread] = []
        self._plans: _native.Ring | None = None
        self._rows: _native.Ring | None = None  # what comes over the connection goes there
        self._begin(self._read_socket)
        self._begin(self._read_channel)

    def close(self, why: str = "it was closed") -> None:
        """From any thread; a second call does nothing."""
        if self.closed.is_set():
            return
        self.why = why
        self.closed.set()
        self._channel.shut()
        shut(self._connection)

    def join(self) -> None:
        """Once it is closed, until nothing of it is left."""
        for thread in self._threads:
            thread.join()
        self._channel.close()
        self._connection.close()

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except NodeError as error:
                self.close(str(error))
            except (EOFError, OSError, ValueError, messages.BrokenMessage) as error:
                self.close(f"its process is gone: {type(error).__name__}")

        thread = threading.Thread(target=run, name="octavo-bridge", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read_socket(self) -> None:
        while not self.closed.is_set():
            if not self._connection.poll(LOOK_S):
                continue
            body = self._connection.recv_bytes(MAX_MESSAGE)
            if self._is_leader:
                self._note(messages.TO_WORKER.decode(body))
            self._channel.send(NodeFrameKind.CONTROL, body)

    def _read_channel(self) -> None:
        while not self.closed.is_set():
            kind, payload = self._channel.receive()
            if kind is NodeFrameKind.PLAN:
                assert self._plans is not None
                self._put(self._plans, payload)
            elif kind is NodeFrameKind.ROWS:
                assert self._rows is not None
                self._put(self._rows, payload)
            else:
                self._take_control(payload)

    def _take_control(self, payload: bytes) -> None:
        """Only what is a message is passed on."""
        decoder = messages.FROM_WORKER if self._is_leader else messages.TO_WORKER
        try:
            message = decoder.decode(payload)
        except messages.NO_MESSAGE as error:
            raise NodeError(f"it sent what is no message: {error}") from None
        if not isinstance(message, messages.ToWorker):
            messages.send(self._connection, message)
            return
        if self._change is not None:
            message = self._change(message)
        self._note(message)
        messages.send(self._connection, message)

    def _note(self, message: messages.ToWorker) -> None:
        """What is prepared says how large messages are from now on."""
        if not isinstance(message, messages.PrepareWorker) or self._plans is not None:
            return
        stage = stage_of(self._rank, self._num_ranks)
        files, size = self._files, message.row_bytes
        limits = {NodeFrameKind.CONTROL: MAX_MESSAGE}
        # The leader's end takes what the stage leaves; the node's what the stage before left.
        incoming, outgoing = (stage, stage - 1) if self._is_leader else (stage - 1, stage)
        if 0 <= incoming < len(files.rows):
            self._rows = _native.Ring(0, 2, files.rows[incoming], size)
            limits[NodeFrameKind.ROWS] = size
        if self._is_leader:
            self._plans = _native.Ring(*files.place, files.ring, message.slot_bytes)
            self._begin(lambda: self._forward(self._plans, NodeFrameKind.PLAN))
        else:
            self._plans = _native.Ring(0, files.place[1], files.ring, message.slot_bytes)
            limits[NodeFrameKind.PLAN] = message.slot_bytes
        if 0 <= outgoing < len(files.rows):
            ring = _native.Ring(1, 2, files.rows[outgoing], size)
            self._begin(lambda: self._forward(ring, NodeFrameKind.ROWS))
        self._channel.limits = limits

    def _forward(self, ring: _native.Ring | None, kind: NodeFrameKind) -> None:
        assert ring is not None
        while not self.closed.is_set():
            message = ring.take_within(LOOK_S)
            if message is not None:
                self._channel.send(kind, message)

    def _put(self, ring: _native.Ring, message: bytes) -> None:
        while not ring.put(message, LOOK_S):
            if self.closed.is_set():
                raise NodeError("it was closed")
