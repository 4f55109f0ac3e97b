"""What the hosts of one engine say to each other: frames over TCP, each with its checksum.

    frame    = magic | kind u8 | length u32 | CRC-32 of the payload u32 | payload
    node       HELLO      → version, nonce, its rank
    leader     CHALLENGE  → nonce, proof that it has the secret
    node       PROOF      → its own proof, and the digest of its model
    leader     WELCOME, or REFUSED with one sentence
    then       CONTROL (`messages`), ROWS of a step; from the leader PLAN too

Numbers are little-endian. Proofs are those of `shared_secret`. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from octavo_engine.checksum import crc32
from octavo_engine.executor.messages import MAX_MESSAGE
from octavo_engine.shared_secret import Nonce, Proof, new_nonce, proof, proves

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

VERSION = 1
LEADER, NODE = f"node {VERSION} leader", f"node {VERSION} node"  # who proves the secret
HANDSHAKE_S = 5.0  # for all of it
SILENT_S = 10  # after which a host that acknowledges nothing is gone
_MAGIC = b"OKND"
_HEADER = struct.Struct("<4sB3xII")

T = TypeVar("T")


class NodeError(Exception):
    """The other host is gone, or sends what is not to be trusted; says which."""


class NodeRefused(NodeError):
    """The leader will not have this node as it is: trying again is no use."""


class NodeFrameKind(IntEnum):
    """Of a frame."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    CONTROL = 6
    PLAN = 7
    ROWS = 8


# Of a payload, while a connection begins.
HANDSHAKE_BYTES = {
    NodeFrameKind.HELLO: 1024,
    NodeFrameKind.CHALLENGE: 1024,
    NodeFrameKind.PROOF: 1024,
    NodeFrameKind.WELCOME: 0,
    NodeFrameKind.REFUSED: 4096,
}


class NodeHello(msgspec.Struct, frozen=True):
    """The first frame."""

    version: int
    nonce: Nonce
    rank: int


class LeaderChallenge(msgspec.Struct, frozen=True):
    """The leader's answer to it."""

    nonce: Nonce
    proof: Proof


class NodeProof(msgspec.Struct, frozen=True):
    """The node's answer to that."""

    proof: Proof
    model: str  # the digest of its configuration


class NodeFrame(NamedTuple):
    """One that arrived whole."""

    kind: NodeFrameKind
    payload: bytes


class NodeChannel:
    """Frames on a connection. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.limits: Mapping[NodeFrameKind, int] = HANDSHAKE_BYTES  # bytes of what may come
        self._deadline: float | None = time.monotonic() + HANDSHAKE_S
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def welcome(self, limits: Mapping[NodeFrameKind, int]) -> None:
        """The handshake is over: a wait has no end but the other host's."""
        self.limits = limits
        self._deadline = None
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, SILENT_S // 2),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, SILENT_S // 2),
            (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
        ):
            self._connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, kind: NodeFrameKind, payload: bytes = b"") -> None:
        """Raises NodeError."""
        head = _HEADER.pack(_MAGIC, kind, len(payload), crc32(payload))
        try:
            with self._sending:
                self._connection.sendall(head + payload)
        except OSError as error:
            raise NodeError(_sentence(error)) from None

    def receive(self, *expected: NodeFrameKind) -> NodeFrame:
        """The next frame, of one of these kinds, or any that may come. Raises NodeError, and
        NodeRefused."""
        magic, number, length, checksum = _HEADER.unpack(self._read(_HEADER.size))
        if magic != _MAGIC:
            raise NodeError("it does not speak the protocol of an engine's hosts")
        kinds: Collection[NodeFrameKind] = (
            (*expected, NodeFrameKind.REFUSED) if expected else self.limits
        )
        if number not in kinds or number not in self.limits:
            raise NodeError(f"it sent a frame of kind {number} out of turn")
        kind = NodeFrameKind(number)
        if length > self.limits[kind]:
            raise NodeError(f"it sent a frame {kind.name} of {length} bytes")
        payload = self._read(length)
        if crc32(payload) != checksum:
            raise NodeError("the checksum of a frame is wrong")
        if kind is NodeFrameKind.REFUSED:
            raise NodeRefused(payload.decode("utf-8", "replace"))
        return NodeFrame(kind, payload)

    def shut(self) -> None:
        """Ends what waits for it, now and from then on."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Once no other thread uses it."""
        self.shut()
        self._connection.close()

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            try:
                if self._deadline is not None:
                    # A timeout of 0 would mean not to wait at all, which is no TimeoutError.
                    left_s = self._deadline - time.monotonic()
                    self._connection.settimeout(max(left_s, 1e-6))
                num_bytes = self._connection.recv_into(view)
            except OSError as error:
                raise NodeError(_sentence(error)) from None
            if num_bytes == 0:
                raise NodeError("it closed the connection")
            view = view[num_bytes:]
        return bytes(data)


def admit(channel: NodeChannel, secret: bytes, model: str, ranks: Collection[int]) -> int:
    """By the leader: the rank of the node that connected, one of `ranks`. Raises NodeError."""
    hello = _parse(channel.receive(NodeFrameKind.HELLO).payload, NodeHello)
    nonce = new_nonce()
    ours = proof(secret, LEADER, hello.nonce, nonce)
    channel.send(NodeFrameKind.CHALLENGE, msgspec.json.encode(LeaderChallenge(nonce, ours)))
    answer = _parse(channel.receive(NodeFrameKind.PROOF).payload, NodeProof)
    reason = ""
    if not proves(answer.proof, secret, NODE, hello.nonce, nonce):
        reason = "the secrets differ"
    elif hello.version != VERSION:
        reason = f"it speaks version {hello.version} of the protocol, and the leader {VERSION}"
    elif answer.model != model:
        reason = "its model is not the leader's: config.json differs"
    elif hello.rank not in ranks:
        reason = f"no node of rank {hello.rank} is missing"
    if reason:
        channel.send(NodeFrameKind.REFUSED, reason.encode())
        raise NodeRefused(reason)
    channel.send(NodeFrameKind.WELCOME)
    channel.welcome({NodeFrameKind.CONTROL: MAX_MESSAGE})
    return hello.rank


def join(channel: NodeChannel, secret: bytes, model: str, rank: int) -> None:
    """By a node. Raises NodeError, and NodeRefused."""
    nonce = new_nonce()
    channel.send(NodeFrameKind.HELLO, msgspec.json.encode(NodeHello(VERSION, nonce, rank)))
    theirs = _parse(channel.receive(NodeFrameKind.CHALLENGE).payload, LeaderChallenge)
    if not proves(theirs.proof, secret, LEADER, nonce, theirs.nonce):
        raise NodeRefused("the secrets differ")
    own = NodeProof(proof(secret, NODE, nonce, theirs.nonce), model)
    channel.send(NodeFrameKind.PROOF, msgspec.json.encode(own))
    channel.receive(NodeFrameKind.WELCOME)
    channel.welcome({NodeFrameKind.CONTROL: MAX_MESSAGE})


def _parse(payload: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except (ValueError, RecursionError) as error:
        raise NodeError(f"it sent a message that cannot be read: {error}") from None


def _sentence(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it is too slow, or does not answer"
    return f"the connection failed: {error.strerror or error}"
