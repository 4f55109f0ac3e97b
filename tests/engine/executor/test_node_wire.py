"""Frames between the hosts of an engine: what is not whole, not in turn or not true is refused, and
a host without the secret learns and changes nothing."""

from __future__ import annotations

import random
import socket
import struct
import threading
import zlib
from typing import TYPE_CHECKING

import msgspec
import pytest

from octavo_engine.executor.node_wire import (
    HANDSHAKE_BYTES,
    LEADER,
    NODE,
    NodeChannel,
    NodeError,
    NodeFrameKind,
    NodeHello,
    NodeProof,
    NodeRefused,
    admit,
    join,
)
from octavo_engine.shared_secret import proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"s" * 16
MODEL = "0" * 64


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def frame(kind: int, payload: bytes = b"", *, magic: bytes = b"OKND") -> bytes:
    return struct.pack("<4sB3xII", magic, kind, len(payload), zlib.crc32(payload)) + payload


def shake(
    ends: tuple[socket.socket, socket.socket],
    node: Callable[[NodeChannel], None],
    ranks: set[int] | None = None,
) -> int | NodeError:
    """What the leader makes of a node."""
    thread = threading.Thread(target=_quietly, args=(node, NodeChannel(ends[0])))
    thread.start()
    try:
        return admit(NodeChannel(ends[1]), SECRET, MODEL, ranks or {1, 2})
    except NodeError as error:
        ends[1].shutdown(socket.SHUT_RDWR)
        return error
    finally:
        thread.join(10)
        assert not thread.is_alive()


def _quietly(node: Callable[[NodeChannel], None], channel: NodeChannel) -> None:
    try:
        node(channel)
    except NodeError:
        return


def test_a_node_with_the_secret_joins_and_both_can_talk(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    found: list[bytes] = []

    def node(channel: NodeChannel) -> None:
        join(channel, SECRET, MODEL, 2)
        channel.limits = {NodeFrameKind.ROWS: 1 << 20}
        channel.send(NodeFrameKind.CONTROL, b"ready")
        found.append(channel.receive().payload)

    leader = NodeChannel(ends[1])
    thread = threading.Thread(target=node, args=(NodeChannel(ends[0]),))
    thread.start()
    assert admit(leader, SECRET, MODEL, {1, 2}) == 2
    assert leader.receive() == (NodeFrameKind.CONTROL, b"ready")
    rows = random.Random(1).randbytes(1 << 20)
    leader.send(NodeFrameKind.ROWS, rows)
    thread.join(10)
    assert found == [rows]


@pytest.mark.parametrize(
    ("secret", "model", "rank", "reason"),
    [
        (b"t" * 16, MODEL, 1, "it closed the connection"),  # it sees that the leader's is another
        (SECRET, "1" * 64, 1, "its model is not the leader's: config.json differs"),
        (SECRET, MODEL, 3, "no node of rank 3 is missing"),
    ],
)
def test_who_is_no_node_is_refused(
    ends: tuple[socket.socket, socket.socket], secret: bytes, model: str, rank: int, reason: str
) -> None:
    heard: list[str] = []

    def node(channel: NodeChannel) -> None:
        try:
            join(channel, secret, model, rank)
        except NodeRefused as error:
            heard.append(str(error))
            channel.close()

    outcome = shake(ends, node)
    assert isinstance(outcome, NodeError)
    assert str(outcome) == reason
    assert heard == ["the secrets differ" if secret != SECRET else reason]


def test_a_node_that_only_claims_to_have_the_secret_is_refused(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """It cannot give back the leader's own proof, either."""
    nonce = "ab" * 16

    def node(channel: NodeChannel) -> None:
        channel.send(NodeFrameKind.HELLO, msgspec.json.encode(NodeHello(1, nonce, 1)))
        challenge = msgspec.json.decode(channel.receive(NodeFrameKind.CHALLENGE).payload)
        answer = NodeProof(challenge["proof"], MODEL)
        channel.send(NodeFrameKind.PROOF, msgspec.json.encode(answer))

    outcome = shake(ends, node)
    assert isinstance(outcome, NodeRefused)
    assert str(outcome) == "the secrets differ"
    assert proof(SECRET, NODE, nonce, nonce) != proof(SECRET, LEADER, nonce, nonce)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n", "does not speak the protocol"),
        (frame(6, b"early"), "a frame of kind 6 out of turn"),
        (frame(99), "a frame of kind 99 out of turn"),
        (frame(1, b"x" * 1025), "a frame HELLO of 1025 bytes"),
        (frame(1, b"{}")[:-1] + b"!", "the checksum of a frame is wrong"),
        (frame(1, b"{}"), "cannot be read: .*version"),
        (frame(1, b"[" * 1000), "cannot be read"),
        (frame(1, b'{"version": 1, "nonce": "x", "rank": 1}'), "cannot be read: .*nonce"),
    ],
)
def test_what_is_no_handshake_is_turned_away(
    ends: tuple[socket.socket, socket.socket], data: bytes, message: str
) -> None:
    ends[0].sendall(data)
    with pytest.raises(NodeError, match=message):
        admit(NodeChannel(ends[1]), SECRET, MODEL, {1})


def test_a_length_is_refused_before_memory_is_taken(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    channel = NodeChannel(ends[1])
    channel.welcome({NodeFrameKind.ROWS: 100})
    ends[0].sendall(struct.pack("<4sB3xII", b"OKND", NodeFrameKind.ROWS, (1 << 32) - 1, 0))
    with pytest.raises(NodeError, match="a frame ROWS of 4294967295 bytes"):
        channel.receive()


def test_who_sends_byte_by_byte_does_not_hold_the_others_up(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_engine.executor.node_wire.HANDSHAKE_S", 0.3)
    channel = NodeChannel(ends[1])
    data = frame(NodeFrameKind.HELLO, b" " * 1000)
    done = threading.Event()

    def drip() -> None:
        for byte in data:
            if done.wait(0.02):
                return
            ends[0].send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(NodeError, match="it is too slow"):
            admit(channel, SECRET, MODEL, {1})
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("seed", range(8))
def test_damaged_streams_end_in_an_error_or_are_whole(
    ends: tuple[socket.socket, socket.socket], seed: int
) -> None:
    """Of handshakes cut, repeated and changed anywhere. None is admitted."""
    rng = random.Random(seed)
    hello = msgspec.json.encode(NodeHello(1, "0" * 32, 1))
    answer = msgspec.json.encode(NodeProof("0" * 64, MODEL))
    data = bytearray(frame(NodeFrameKind.HELLO, hello) + frame(NodeFrameKind.PROOF, answer))
    for _ in range(rng.randrange(0, 4)):
        place = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place : place + rng.randrange(1, 20)]
            case 2:
                data[place:place] = rng.randbytes(rng.randrange(1, 20))
    ends[0].sendall(data)
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(NodeError):
        admit(NodeChannel(ends[1]), SECRET, MODEL, {1})


def test_what_may_come_while_a_connection_begins_is_small() -> None:
    assert max(HANDSHAKE_BYTES.values()) <= 4096
    assert (
        not {NodeFrameKind.CONTROL, NodeFrameKind.PLAN, NodeFrameKind.ROWS} & HANDSHAKE_BYTES.keys()
    )
