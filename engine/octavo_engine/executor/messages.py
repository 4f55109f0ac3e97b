"""What rank 0 and the other ranks say to each other over a socket: while they start, when an
adapter is loaded, and what stages count.

Steps do not go this way: see `leader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from octavo_engine.backends.backend import BackendLimits  # noqa: TC001  (msgspec reads it)
from octavo_engine.config import EngineConfig  # noqa: TC001  (msgspec reads it)
from octavo_engine.errors import OctavoError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class StartWorker(msgspec.Struct, tag=True, frozen=True):
    """To a rank, first of all: load your part of the model."""

    config: EngineConfig
    rank: int
    size: int
    ring: tuple[int, int]  # which reader of the ring it is, of so many with rank 0
    patience_s: float  # at barriers
    log_level: int
    log_format: str


class PrepareWorker(msgspec.Struct, tag=True, frozen=True):
    """To a rank that has loaded: be ready for steps. They come through a ring of such slots, and a
    step's rows from stage to stage in messages of `row_bytes` at most."""

    limits: BackendLimits
    num_blocks: int
    slot_bytes: int
    row_bytes: int = 0


class PackAdapter(msgspec.Struct, tag=True, frozen=True):
    """To a rank: read the adapter in this folder, whose content has this digest, and keep your part
    of it under the number."""

    number: int
    path: str
    digest: str


class WorkerLoaded(msgspec.Struct, tag=True, frozen=True):
    """From a rank."""


class WorkerPrepared(msgspec.Struct, tag=True, frozen=True):
    """From a rank that takes steps from now on."""


class WorkerAlive(msgspec.Struct, tag=True, frozen=True):
    """From a rank, every second: its process runs."""


class AdapterPacked(msgspec.Struct, tag=True, frozen=True):
    """From a rank: it has its part of the adapter, or none because of the error."""

    number: int
    rank: int
    error: str = ""


class ExpertCounts(msgspec.Struct, tag=True, frozen=True):
    """From a rank: for how many rows each expert of its layers was chosen so far, when it came to
    the command of that number; nothing of layers that it does not have."""

    number: int
    layers: list[list[int]]


class WorkerFailed(msgspec.Struct, tag=True, frozen=True):
    """From a rank that ends now. `kind` is the class of an OctavoError, or any other error's."""

    kind: str
    message: str


ToWorker: TypeAlias = StartWorker | PrepareWorker | PackAdapter
FromWorker: TypeAlias = (
    WorkerLoaded | WorkerPrepared | WorkerAlive | AdapterPacked | ExpertCounts | WorkerFailed
)

M = TypeVar("M")

MAX_MESSAGE = 1 << 20  # bytes; settings are a few KB
# ValueError: text that is no UTF-8. OctavoError: settings that break their own rules.
NO_MESSAGE = (msgspec.MsgspecError, OctavoError, ValueError, OverflowError, RecursionError)


class BrokenMessage(Exception):
    """The other end sent something that is no message."""


_encoder = msgspec.msgpack.Encoder()
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def send(connection: Connection, message: ToWorker | FromWorker) -> None:
    connection.send_bytes(_encoder.encode(message))


def receive(connection: Connection, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """The next message. Raises EOFError or OSError where the other end is gone, and BrokenMessage
    for what is none of ours; then stop reading."""
    try:
        body = connection.recv_bytes(MAX_MESSAGE)
    except OSError as error:
        if str(error) == "bad message length":  # Connection's own words; it has no class for it
            raise BrokenMessage(f"a message above the limit of {MAX_MESSAGE} bytes") from None
        raise
    try:
        return decoder.decode(body)
    except NO_MESSAGE as error:
        raise BrokenMessage(f"{len(body)} bytes are no message: {error}") from error
