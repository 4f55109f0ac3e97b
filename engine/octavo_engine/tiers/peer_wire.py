"""What engines say to each other about KV blocks: frames over TCP, each with its checksum.

    frame     = magic | kind u8 | length u32 | CRC-32 of the payload u32 | payload
    client      HELLO        → nonce
    server      CHALLENGE    → nonce, proof that it has the secret
    client      PROOF        → its own proof, and the identity of its blocks
    server      WELCOME, or REFUSED with one sentence
    then        LOOKUP names → FOUND, one bit a name
                GET names    → PAGE (place of the name, how many of its tokens are right, bytes)
                               for each that is there, and END

Names are those of full blocks and states; those of GET may be of tails too, and a byte with its
length stands before each.

Numbers are little-endian. Proofs are those of `shared_secret`. Nothing is encrypted.
"""

from __future__ import annotations

import struct
import time
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from octavo_engine.checksum import crc32
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.prefix_hash import TOKEN_BYTES
from octavo_engine.shared_secret import Nonce, Proof  # noqa: TC001  (fields of messages)
from octavo_engine.tiers.page import NAME_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from octavo_engine.tiers.page import BlockName, Page, PageSizes

    Content = bytes | bytearray | memoryview

VERSION = 3
CLIENT, SERVER = f"kv {VERSION} client", f"kv {VERSION} server"  # who proves the secret
MAX_NAMES = 1 << 16  # in one frame
MAX_NAME_BYTES = NAME_BYTES + TOKEN_BYTES * (BLOCK_SIZE - 1)  # a tail is no full block
_MAGIC = b"OKVP"
_HEADER = struct.Struct("<4sB3xII")
_PLACE = struct.Struct("<II")
_SMALL = 1 << 16  # bytes that are copied together rather than sent in two parts

T = TypeVar("T")


class PeerError(Exception):
    """The other side is gone, slow, or sends what is not to be trusted; says which."""


class PeerRefused(PeerError):
    """The other side is well and will not serve this engine: trying again soon is no use."""


class FrameKind(IntEnum):
    """Of a frame."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    LOOKUP = 6
    FOUND = 7
    GET = 8
    PAGE = 9
    END = 10
    FOLLOW = 11  # as GET, of blocks that are being computed: each is sent once it is there
    WAIT = 12  # a sign of life while none is


MAX_BYTES = {  # of a payload; those of pages are known to both sides
    FrameKind.HELLO: 1024,
    FrameKind.CHALLENGE: 1024,
    FrameKind.PROOF: 16384,
    FrameKind.WELCOME: 0,
    FrameKind.REFUSED: 4096,
    FrameKind.LOOKUP: MAX_NAMES * NAME_BYTES,
    FrameKind.FOUND: MAX_NAMES // 8,
    FrameKind.GET: MAX_NAMES * (1 + MAX_NAME_BYTES),
    FrameKind.END: 0,
    FrameKind.FOLLOW: MAX_NAMES * NAME_BYTES,
    FrameKind.WAIT: 0,
}


class PeerHello(msgspec.Struct, frozen=True):
    """The first frame."""

    version: int
    nonce: Nonce


class PeerChallenge(msgspec.Struct, frozen=True):
    """The server's answer to it."""

    nonce: Nonce
    proof: Proof


class PeerProof(msgspec.Struct, frozen=True):
    """The client's answer to that. The identity names all that makes blocks differ."""

    proof: Proof
    identity: dict[str, str]


class FrameHead(NamedTuple):
    """What a header says, checked as far as that goes without the payload."""

    kind: FrameKind
    length: int
    checksum: int


class Frame(NamedTuple):
    """One that arrived whole; a page's payload is apart from its place."""

    kind: FrameKind
    payload: bytes = b""
    place: int = 0
    num_tokens: int = 0  # of a page: its first ones that are the name's
    page: Page | None = None


def parse_head(data: Content, *, expected: Sequence[FrameKind], sizes: PageSizes) -> FrameHead:
    """Raises PeerError unless it is the header of a frame that may come now."""
    magic, number, length, checksum = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise PeerError("it does not speak the protocol of KV blocks")
    if number not in expected:
        raise PeerError(f"it sent a frame of kind {number} out of turn")
    kind = FrameKind(number)
    is_wrong = kind is FrameKind.PAGE and length - _PLACE.size not in sizes
    if is_wrong or length > MAX_BYTES.get(kind, length):
        raise PeerError(f"it sent a frame {kind.name} of {length} bytes")
    return FrameHead(kind, length, checksum)


def parse_names(payload: bytes) -> list[BlockName]:
    """Of LOOKUP and FOLLOW. Raises PeerError."""
    if len(payload) % NAME_BYTES:
        raise PeerError("it sent names that are cut off")
    return [payload[at : at + NAME_BYTES] for at in range(0, len(payload), NAME_BYTES)]


def pack_wanted(names: Sequence[BlockName]) -> bytes:
    return b"".join(bytes((len(name),)) + name for name in names)


def parse_wanted(payload: bytes) -> list[BlockName]:
    """Of GET. Raises PeerError."""
    names: list[BlockName] = []
    at = 0
    while at < len(payload):
        length = payload[at]
        name = payload[at + 1 : at + 1 + length]
        is_right = (
            NAME_BYTES <= length <= MAX_NAME_BYTES and not (length - NAME_BYTES) % TOKEN_BYTES
        )
        if not is_right or len(name) < length or len(names) == MAX_NAMES:
            raise PeerError("it sent names that are no blocks'")
        names.append(name)
        at += 1 + length
    return names


def pack_found(flags: Sequence[bool]) -> bytes:
    return np.packbits(np.array(flags, dtype=np.bool_)).tobytes()


def parse_found(payload: bytes, names: Sequence[BlockName]) -> set[BlockName]:
    """Those of `names` that are there. Raises PeerError."""
    if len(payload) != -(-len(names) // 8):
        raise PeerError("its answer does not fit the names that were looked up")
    flags = np.unpackbits(np.frombuffer(payload, np.uint8), count=len(names))
    return {name for name, flag in zip(names, flags, strict=True) if flag}


def parse_message(payload: bytes, kind: type[T]) -> T:
    """Of the handshake. Raises PeerError."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"it sent a message that cannot be read: {error}") from None


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What makes their blocks other than ours."""
    return sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))


class PeerChannel:
    """Frames on a connection. One thread uses it. Until `deadline` (monotonic seconds) each call
    may wait."""

    def __init__(self, connection: socket.socket, *, sizes: PageSizes) -> None:
        self._connection, self._sizes = connection, sizes
        self.deadline = 0.0

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Raises PeerError."""
        head = _HEADER.pack(_MAGIC, kind, len(payload), crc32(payload))
        self._send(head, payload)

    def send_page(self, place: int, page: Page, num_tokens: int = BLOCK_SIZE) -> None:
        """Raises PeerError."""
        prefix = _PLACE.pack(place, num_tokens)
        checksum = crc32(page.data, crc32(prefix))
        length = len(prefix) + page.nbytes
        self._send(_HEADER.pack(_MAGIC, FrameKind.PAGE, length, checksum) + prefix, page.data)

    def receive(self, *expected: FrameKind) -> Frame:
        """The next frame; a refusal may come at any time. Raises PeerError, PeerRefused."""
        data = bytearray(_HEADER.size)
        self._fill(memoryview(data))
        return self._rest(data, (*expected, FrameKind.REFUSED))

    def receive_request(self, idle_s: float, frame_s: float) -> Frame | None:
        """A client's next LOOKUP, GET or FOLLOW; None when it left, or said nothing for so long.
        Once it has begun, a frame must be whole within `frame_s`. Raises PeerError."""
        data = bytearray(_HEADER.size)
        self._connection.settimeout(idle_s)
        try:
            num_bytes = self._connection.recv_into(data, 1)
        except OSError:
            return None
        if num_bytes == 0:
            return None
        self.deadline = time.monotonic() + frame_s
        self._fill(memoryview(data)[1:])
        return self._rest(data, (FrameKind.LOOKUP, FrameKind.GET, FrameKind.FOLLOW))

    def _rest(self, data: bytearray, expected: Sequence[FrameKind]) -> Frame:
        head = parse_head(data, expected=expected, sizes=self._sizes)
        if head.kind is FrameKind.PAGE:
            return self._page(head)
        payload = bytearray(head.length)
        self._fill(memoryview(payload))
        if crc32(payload) != head.checksum:
            raise PeerError("the checksum of a frame is wrong")
        if head.kind is FrameKind.REFUSED:
            raise PeerRefused(payload.decode("utf-8", "replace"))
        return Frame(head.kind, bytes(payload))

    def _page(self, head: FrameHead) -> Frame:
        prefix = bytearray(_PLACE.size)
        self._fill(memoryview(prefix))
        page = np.empty(head.length - _PLACE.size, np.uint8)
        self._fill(page.data)
        if crc32(page.data, crc32(prefix)) != head.checksum:
            raise PeerError("the checksum of a block is wrong")
        place, num_tokens = _PLACE.unpack(prefix)
        return Frame(FrameKind.PAGE, place=place, num_tokens=num_tokens, page=page)

    def _send(self, head: bytes, payload: Content) -> None:
        try:
            self._connection.settimeout(self._left_s())
            if len(payload) <= _SMALL:
                self._connection.sendall(head + payload)
                return
            self._connection.sendall(head)
            self._connection.settimeout(self._left_s())
            self._connection.sendall(payload)
        except OSError as error:
            raise PeerError(_sentence(error)) from None

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                self._connection.settimeout(self._left_s())
                num_bytes = self._connection.recv_into(view)
            except OSError as error:
                raise PeerError(_sentence(error)) from None
            if num_bytes == 0:
                raise PeerError("it closed the connection")
            view = view[num_bytes:]

    def _left_s(self) -> float:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0.0:
            raise PeerError("it is too slow")
        return left_s


def _sentence(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it is too slow"
    return f"the connection failed: {error.strerror or error}"
