"""Serves KV blocks of this engine to others, which name them.

Each connection has a thread, and their number is bounded. Whether a block is there is looked up at
once; its bytes are copied by the engine between two steps, some MiB at a time, and sent while the
next ones are copied. Blocks of a prompt that is being computed are sent after each step, while the
next one computes.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from octavo_engine.shared_secret import new_nonce, proof, proves
from octavo_engine.tiers.peer_wire import (
    CLIENT,
    SERVER,
    VERSION,
    FrameKind,
    PeerChallenge,
    PeerChannel,
    PeerError,
    PeerHello,
    PeerProof,
    differences,
    pack_found,
    parse_message,
    parse_names,
    parse_wanted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_engine.tiers.page import BlockName, Page, PageSizes

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
HANDSHAKE_S = 5.0
IDLE_S = 600.0  # without a request; clients connect again
FRAME_S = 10.0  # from the first byte of a request to its last
SEND_S = 30.0  # for one frame to be taken in by a client
COPY_S = 30.0  # for the engine to copy a batch: it may be in a long step
BATCH_BYTES = 4 << 20  # that are copied at a time
ARRIVAL_S = 0.5  # in which a prompt that is followed may still be on its way to this engine
SIGN_S = 1.0  # between signs of life while a prompt is computed
FOLLOW_PAUSE_S = 0.002  # before the engine is looked at again that had nothing new


class EngineAnswer(Generic[T]):
    """What a connection waits for; the engine's thread fills it."""

    def __init__(self, names: Sequence[BlockName]) -> None:
        self.names = names
        self._answer: T | None = None
        self._filled = threading.Event()

    def fill(self, answer: T) -> None:
        self._answer = answer
        self._filled.set()

    def wait(self, timeout_s: float, sign: Callable[[], None] | None = None) -> T:
        """`sign` is called about once a second meanwhile. Raises PeerError."""
        end = time.monotonic() + timeout_s
        while (left_s := end - time.monotonic()) > 0 and not self._filled.wait(
            left_s if sign is None else min(SIGN_S, left_s)
        ):
            if sign is not None:
                sign()
        if self._answer is None:
            raise PeerError("the engine did not copy blocks in time")
        return self._answer


class CopiedBlock(NamedTuple):
    """A block's bytes."""

    page: Page
    num_tokens: int  # of its first ones that are the name's: fewer where a tail is known in part


class PageRequest(EngineAnswer["list[CopiedBlock | None]"]):
    """Copies of blocks; None where one is gone."""


class FollowedBlocks(NamedTuple):
    """Of blocks that are being computed: those that are there by now."""

    pages: dict[BlockName, Page]
    is_more_coming: bool  # a sequence is about to compute others of them


class FollowRequest(EngineAnswer[FollowedBlocks]):
    """Blocks of a prompt, as far as they are computed."""


class BlockSource(Protocol):
    """Where blocks are; called by the connections' threads."""

    def has(self, name: BlockName) -> bool:
        """As far as is known now."""

    def copy(self, names: Sequence[BlockName]) -> PageRequest:
        """Have the engine copy them soon."""

    def follow(self, names: Sequence[BlockName]) -> FollowRequest:
        """Have it copy those that are there after its next step, and say if others will come."""


class BlockServer:
    """Listens from the moment it is made until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        source: BlockSource,
        *,
        identity: Mapping[str, str],
        sizes: PageSizes,
        secret: bytes = b"",
    ) -> None:
        """Raises OSError if the address cannot be bound. Port 0: any that is free."""
        self._source, self._identity, self._secret = source, dict(identity), secret
        self._sizes = sizes
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self.num_sent = 0  # blocks
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="kv-peer-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        # Closing alone does not wake a thread that waits in accept.
        _shut(self._listener)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _shut(connection)
        self._thread.join(timeout=2.0)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("Could not accept a connection for KV blocks: %s", error)
                time.sleep(0.1)  # such as too many open files
                continue
            with self._lock:
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full:
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection, address[0]), name="kv-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        channel = PeerChannel(connection, sizes=self._sizes)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._admit(channel, host):
                self._answer_all(channel)
        except PeerError as error:
            logger.info("Ended a connection for KV blocks with %s: %s", host, error)
        except Exception:
            logger.exception("Unhandled error on a connection for KV blocks")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _admit(self, channel: PeerChannel, host: str) -> bool:
        channel.deadline = time.monotonic() + HANDSHAKE_S
        hello = parse_message(channel.receive(FrameKind.HELLO).payload, PeerHello)
        if hello.version != VERSION:
            return self._refuse(channel, host, f"protocol version {hello.version} is not known")
        nonce = new_nonce()
        own = proof(self._secret, SERVER, hello.nonce, nonce)
        channel.send(FrameKind.CHALLENGE, msgspec.json.encode(PeerChallenge(nonce, own)))
        theirs = parse_message(channel.receive(FrameKind.PROOF).payload, PeerProof)
        if not proves(theirs.proof, self._secret, CLIENT, hello.nonce, nonce):
            return self._refuse(channel, host, "the secrets differ")
        if names := differences(self._identity, theirs.identity):
            return self._refuse(channel, host, mismatch(names))
        channel.send(FrameKind.WELCOME)
        return True

    def _refuse(self, channel: PeerChannel, host: str, reason: str) -> bool:
        logger.warning("Refused to send KV blocks to %s: %s", host, reason)
        channel.send(FrameKind.REFUSED, reason.encode()[:1024])
        return False

    def _answer_all(self, channel: PeerChannel) -> None:
        while not self._is_closed:
            frame = channel.receive_request(IDLE_S, FRAME_S)
            if frame is None:
                return
            if frame.kind is FrameKind.GET:
                self._send_pages(channel, parse_wanted(frame.payload))
                continue
            names = parse_names(frame.payload)
            if frame.kind is FrameKind.LOOKUP:
                found = pack_found([self._source.has(name) for name in names])
                channel.deadline = time.monotonic() + SEND_S
                channel.send(FrameKind.FOUND, found)
            else:
                self._send_as_computed(channel, names)

    def _send_pages(self, channel: PeerChannel, names: Sequence[BlockName]) -> None:
        size = self._sizes.blocks_in(BATCH_BYTES)
        batches = [names[at : at + size] for at in range(0, len(names), size)]
        place = 0
        copied = self._source.copy(batches[0]) if batches else None
        for number in range(len(batches)):
            assert copied is not None
            blocks = copied.wait(COPY_S)
            copied = None
            if number + 1 < len(batches):
                copied = self._source.copy(batches[number + 1])
            for block in blocks:
                if block is not None:
                    channel.deadline = time.monotonic() + SEND_S
                    channel.send_page(place, block.page, block.num_tokens)
                    self.num_sent += 1
                place += 1
        channel.deadline = time.monotonic() + SEND_S
        channel.send(FrameKind.END)

    def _send_as_computed(self, channel: PeerChannel, names: Sequence[BlockName]) -> None:
        """Until all are sent, or the engine computes none of the others any more."""

        def sign() -> None:
            channel.deadline = time.monotonic() + SEND_S
            channel.send(FrameKind.WAIT)

        places = {name: place for place, name in enumerate(names)}
        began_at = signed_at = time.monotonic()
        was_coming = False
        while places and not self._is_closed:
            found = self._source.follow(list(places)).wait(COPY_S, sign)
            for name, page in found.pages.items():
                channel.deadline = time.monotonic() + SEND_S
                channel.send_page(places.pop(name), page)
                self.num_sent += 1
            was_coming |= found.is_more_coming
            now = time.monotonic()
            if not found.is_more_coming and (was_coming or now - began_at >= ARRIVAL_S):
                break
            if found.pages:
                signed_at = now
            else:
                if now - signed_at >= SIGN_S:
                    sign()
                    signed_at = now
                time.sleep(FOLLOW_PAUSE_S)
        channel.deadline = time.monotonic() + SEND_S
        channel.send(FrameKind.END)


def mismatch(names: Sequence[str]) -> str:
    """Why engines cannot share blocks."""
    verb = "differs" if len(names) == 1 else "differ"
    return f"its KV blocks are not the same: {', '.join(names)} {verb}"


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it may not be connected any more
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
