"""KV events on their way out: a ZMQ publisher with replay, in a thread of its own.

The engine puts a batch on a queue and goes on. When consumers are slow, ZMQ drops what is beyond
its mark; when the thread itself is, batches are dropped here and counted. Either way the numbers
that consumers see have a gap, and they may ask for what is missing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import ConfigError
from octavo_engine.protocol.kv_events import (
    END_OF_REPLAY,
    as_wire,
    pack_sequence,
    unpack_sequence,
)

if TYPE_CHECKING:
    from octavo_engine.config import KVEventsConfig
    from octavo_engine.protocol.kv_events import KVEventBatch

logger = logging.getLogger(__name__)

_STOP_S = 2.0
_BOUND = ("*", "::", "ipc://", "inproc://")  # addresses with one of these are ours to open


class KVEventPublisher:
    """Raises ConfigError where pyzmq is missing or an address cannot be used."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._zmq = zmq = _import_zmq()
        self._topic = config.topic.encode()
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._max_queue = config.max_queue_size
        self._replay: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._stopping = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        # A pipe can be polled together with a socket; one byte says that there is something to do.
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._pub: Any = None
        self._router: Any = None
        try:
            self._pub = self._open(zmq.PUB, config.endpoint, hwm=config.hwm)
            if config.replay_endpoint is not None:
                self._router = self._open(zmq.ROUTER, config.replay_endpoint, hwm=config.hwm)
        except ConfigError:
            self._close()
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Returns at once. Hot path: once per step that changed the cache.

        A batch that finds no room is lost, and its number with it: readers see the gap.
        """
        number, self._next = self._next, self._next + 1
        if len(self._queue) >= self._max_queue:
            return
        self._queue.append((number, batch))
        self._poke()

    def close(self) -> None:
        """Sends what is queued and ends."""
        self._stopping = True
        self._poke()
        self._thread.join(_STOP_S)
        os.close(self._wake)

    def _poke(self) -> None:
        # A full pipe wakes it anyway; a broken one has no reader, which was logged.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._wake, b"x")

    def _open(self, kind: int, endpoint: str, *, hwm: int) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(hwm)  # beyond it both kinds drop, and never wait
        try:
            if any(mark in endpoint for mark in _BOUND):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"--kv-events-config: {endpoint} cannot be used: {error.strerror}"
            ) from None
        return socket

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while not (self._stopping and not self._queue):
                ready = dict(poller.poll())
                if self._woken in ready:
                    os.read(self._woken, 4096)
                while self._queue:
                    self._send(*self._queue.popleft())
                if self._router in ready:
                    self._answer()
        except Exception:
            logger.exception("The publisher of KV events ended")
        finally:
            self._close()

    def _send(self, number: int, batch: KVEventBatch) -> None:
        payload = self._encode(as_wire(batch))
        self._pub.send_multipart((self._topic, pack_sequence(number), payload))
        self._replay.append((number, payload))

    def _answer(self) -> None:
        """All that is kept from the number that was requested, then the end."""
        identity, *rest = self._router.recv_multipart()
        try:
            first = unpack_sequence(rest[-1] if rest else b"")
        except ValueError:
            logger.warning("Dropped a replay request that is none")
            return
        for number, payload in self._replay:
            if number >= first:
                answer = (identity, b"", self._topic, pack_sequence(number), payload)
                self._router.send_multipart(answer)
        self._router.send_multipart((identity, b"", b"", END_OF_REPLAY, b""))

    def _close(self) -> None:
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close()
        self._context.term()
        os.close(self._woken)


def _import_zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise ConfigError(
            "--kv-events-config needs pyzmq, which is not installed: pip install pyzmq"
        ) from None
    return zmq
