"""Frames between engines: what is not whole, not in turn or not true is refused, and nothing else
breaks.

Red when: a checksum is not compared; a length is believed; a thread dies of what it reads.
"""

import random
import socket
import struct
import threading
import time
import zlib

import msgspec
import numpy as np
import pytest

from octavo_engine.caches import STATE_GROUP
from octavo_engine.shared_secret import proof
from octavo_engine.tiers import block_server
from octavo_engine.tiers.block_server import (
    BlockServer,
    CopiedBlock,
    FollowedBlocks,
    FollowRequest,
    PageRequest,
)
from octavo_engine.tiers.page import PageSizes, block_name, is_tail
from octavo_engine.tiers.peer_engine import PeerAddress, PeerEngine
from octavo_engine.tiers.peer_wire import (
    CLIENT,
    MAX_BYTES,
    SERVER,
    VERSION,
    FrameKind,
    PeerChannel,
    PeerError,
    PeerHello,
    PeerProof,
    PeerRefused,
    differences,
    pack_found,
    pack_wanted,
    parse_found,
    parse_head,
    parse_message,
    parse_names,
    parse_wanted,
)

PAGE_BYTES = 3000
IDENTITY = {"weights": "a", "dtype": "b"}
NAMES = [bytes([i]) * 17 for i in range(40)]


def page_of(name):
    return np.frombuffer(random.Random(name).randbytes(PAGE_BYTES), np.uint8)


class Source:
    """All blocks but those of uneven first bytes. Of tails it has two tokens."""

    def has(self, name):
        return name[0] % 2 == 0

    def copy(self, names):
        request = PageRequest(names)
        copied = {
            name: CopiedBlock(page_of(name), 2 if is_tail(name) else 16)
            for name in names
            if self.has(name)
        }
        request.fill([copied.get(name) for name in names])
        return request

    def follow(self, names):
        request = FollowRequest(names)
        pages = {name: page_of(name) for name in names if self.has(name)}
        request.fill(FollowedBlocks(pages, is_more_coming=False))
        return request


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(block_server, "BATCH_BYTES", 4 * PAGE_BYTES)
    server = BlockServer(
        "127.0.0.1", 0, Source(), identity=IDENTITY, sizes=PageSizes(PAGE_BYTES), secret=b"s" * 16
    )
    yield server
    server.close()


def peer_of(server, *, identity=IDENTITY, secret=b"s" * 16):
    address = PeerAddress("127.0.0.1", server.port)
    return PeerEngine(address, identity=identity, sizes=PageSizes(PAGE_BYTES), secret=secret)


def look_up(peer, names=NAMES, timeout_s=5.0):
    done = threading.Event()
    found = set()

    def note(names):
        found.update(names)
        done.set()

    peer.lookup(names, timeout_s, note)
    assert done.wait(10)
    return found


def fetch(peer, names=NAMES, timeout_s=5.0):
    done = threading.Event()
    pages: dict[bytes, np.ndarray] = {}
    peer.fetch(names, timeout_s, pages.__setitem__, done.set)
    assert done.wait(10)
    return pages


def check_served(server):
    """It serves whole and true blocks."""
    peer = peer_of(server)
    there = set(NAMES[::2])
    assert look_up(peer) == there
    pages = fetch(peer)
    assert pages.keys() == there
    assert all(np.array_equal(page, page_of(name)) for name, page in pages.items())
    assert fetch(peer, []) == {}
    peer.close()


def test_blocks_are_found_and_read_by_name(server):
    check_served(server)
    check_served(server)
    assert server.num_sent == 40


def test_a_connection_that_broke_is_made_again(server):
    peer = peer_of(server)
    assert look_up(peer)
    for connection in list(server._connections):
        connection.shutdown(socket.SHUT_RDWR)
    assert len(fetch(peer)) == 20
    assert peer.num_failures == 0
    peer.close()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"identity": {"weights": "a", "dtype": "c"}}, "not the same: dtype differs"),
        ({"identity": {}}, "not the same: dtype, weights differ"),
        ({"secret": b"t" * 16}, "the secrets differ"),
        ({"secret": b""}, "the secrets differ"),
    ],
)
def test_who_is_refused_learns_why_and_gets_nothing(server, caplog, given, reason):
    peer = peer_of(server, **given)
    assert look_up(peer) == set()
    assert reason in caplog.text
    assert peer.is_down
    assert fetch(peer) == {}
    peer.close()
    assert server.num_sent == 0
    check_served(server)


def test_a_server_without_the_secret_is_left_before_it_learns_anything():
    heard = []

    def pretend(listener):
        connection, _ = listener.accept()
        channel = PeerChannel(connection, sizes=PageSizes(PAGE_BYTES))
        channel.deadline = time.monotonic() + 5
        hello = parse_message(channel.receive(FrameKind.HELLO).payload, PeerHello)
        guess = proof(b"guess", SERVER, hello.nonce, "0" * 32)
        message = msgspec.json.encode({"nonce": "0" * 32, "proof": guess})
        channel.send(FrameKind.CHALLENGE, message)
        heard.append(connection.recv(1000))
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        address = PeerAddress("127.0.0.1", listener.getsockname()[1])
        peer = PeerEngine(address, identity=IDENTITY, sizes=PageSizes(PAGE_BYTES), secret=b"s" * 16)
        assert look_up(peer) == set()
        thread.join(5)
    assert heard == [b""]
    peer.close()


def test_no_more_connections_than_allowed_are_held(server, monkeypatch):
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 2)
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    time.sleep(0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as third:
        assert third.recv(1) == b""
    for connection in held:
        connection.close()


def test_a_client_that_says_nothing_is_left(server, monkeypatch):
    monkeypatch.setattr(block_server, "HANDSHAKE_S", 0.1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as silent:
        assert silent.recv(1) == b""


def test_every_flipped_bit_of_a_page_is_noticed():
    near, far = socket.socketpair()
    with near, far:
        sender = PeerChannel(near, sizes=PageSizes(PAGE_BYTES))
        sender.deadline = time.monotonic() + 5
        sender.send_page(3, page_of(NAMES[0]), 7)
        whole = far.recv(PAGE_BYTES + 100)
    frame = receive_of(whole, FrameKind.PAGE)
    assert (frame.place, frame.num_tokens) == (3, 7) and np.array_equal(
        frame.page, page_of(NAMES[0])
    )
    chance = random.Random(0)
    ignored = {5, 6, 7}  # of the header, which nobody reads
    for at in [*range(24), *(chance.randrange(24, len(whole)) for _ in range(200))]:
        if at in ignored:
            continue
        changed = bytearray(whole)
        changed[at] ^= 1 << chance.randrange(8)
        with pytest.raises(PeerError):
            receive_of(bytes(changed), FrameKind.PAGE)


def receive_of(data, *expected):
    """What a channel makes of these bytes, where no more come."""
    near, far = socket.socketpair()
    with near:
        far.sendall(data)
        far.close()
        channel = PeerChannel(near, sizes=PageSizes(PAGE_BYTES))
        channel.deadline = time.monotonic() + 1
        return channel.receive(*expected)


def test_a_page_of_another_size_than_was_named_is_not_taken(server):
    """Both sides know two sizes: that of blocks and that of states."""
    sizes = PageSizes(PAGE_BYTES, state=PAGE_BYTES * 3)
    peer = PeerEngine(
        PeerAddress("127.0.0.1", server.port), identity=IDENTITY, sizes=sizes, secret=b"s" * 16
    )
    state = block_name(NAMES[0][:-1], STATE_GROUP)  # the server gives a block's page for it
    assert fetch(peer, [NAMES[2], state]).keys() == {NAMES[2]}
    assert peer.num_failures == 1
    peer._up_at = 0.0
    done = threading.Event()
    pages: dict[bytes, np.ndarray] = {}
    peer.follow([NAMES[2], state], pages.__setitem__, done.set, is_wanted=lambda: True)
    assert done.wait(10)
    assert pages.keys() == {NAMES[2]} and peer.num_failures == 2
    peer.close()


def test_a_refusal_may_come_at_any_time():
    with pytest.raises(PeerRefused, match="no"):
        receive_of(frame_bytes(FrameKind.REFUSED, b"no"), FrameKind.PAGE)


@pytest.mark.parametrize("kind", list(MAX_BYTES))
def test_lengths_are_bounded_before_memory_is_taken(kind):
    for length, fits in ((MAX_BYTES[kind], True), (MAX_BYTES[kind] + 1, False), (2**32 - 1, False)):
        data = struct.pack("<4sB3xII", b"OKVP", kind, length, 0)
        if fits:
            assert parse_head(data, expected=[kind], sizes=PageSizes(1)).length == length
            continue
        with pytest.raises(PeerError, match=f"{kind.name} of {length} bytes"):
            parse_head(data, expected=[kind], sizes=PageSizes(1))


def test_found_flags_say_which():
    for count in (0, 1, 7, 8, 9, 40):
        names = NAMES[:count]
        flags = [number % 3 == 0 for number in range(count)]
        assert parse_found(pack_found(flags), names) == set(names[::3])
    with pytest.raises(PeerError):
        parse_found(b"ab", NAMES[:8])
    with pytest.raises(PeerError):
        parse_names(b"a" * 18)


def test_names_of_tails_stand_beside_those_of_full_blocks():
    names = [NAMES[0], NAMES[1] + b"abcd", NAMES[2] + bytes(60), NAMES[3]]
    assert parse_wanted(pack_wanted(names)) == names and parse_wanted(b"") == []
    for wrong in (b"", b"a" * 16, NAMES[0] + b"abc", NAMES[0] + bytes(64)):
        with pytest.raises(PeerError):
            parse_wanted(pack_wanted([NAMES[0], wrong]))
    with pytest.raises(PeerError):
        parse_wanted(pack_wanted(names)[:-1])


def test_a_tail_has_the_name_of_what_came_of_it(server, monkeypatch):
    peer = peer_of(server)
    long, short = NAMES[0] + bytes(20), NAMES[2] + bytes(8)
    wanted = [NAMES[4], long, NAMES[5] + bytes(8), short]
    assert list(fetch(peer, wanted)) == [NAMES[4], long[: 17 + 8], short]
    # More of a tail than was named cannot be.
    assert fetch(peer, [NAMES[0] + bytes(4)]) == {} and peer.num_failures == 1
    peer.close()


def test_what_waits_for_one_engine_is_one_request(server, monkeypatch):
    """Each part ends once its last block is there, at the latest when one behind it comes."""
    sizes, come, gate = [], [], threading.Event()

    def count(payload):
        names = parse_wanted(payload)
        sizes.append(len(names))
        return names

    monkeypatch.setattr(block_server, "parse_wanted", count)
    peer = peer_of(server)
    peer._submit(lambda channel: gate.wait(5), 5, lambda: None)
    ends = [threading.Event() for _ in range(4)]
    for number, parts in enumerate((NAMES[:3], [], NAMES[4:10], NAMES[11:12])):

        def done(number=number):
            come.append(f"end {number}")
            ends[number].set()

        def take(name, page, number=number):
            come.append(number)

        peer.fetch(parts, 5.0, take, done)
    gate.set()
    assert all(end.wait(5) for end in ends)
    assert sizes == [10]
    assert come == [0, 0, "end 0", "end 1", 2, 2, 2, "end 2", "end 3"]
    peer.close()


def test_identities_differ_by_name():
    assert differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ["a", "c"]


def frame_bytes(kind, payload):
    return struct.pack("<4sB3xII", b"OKVP", kind, len(payload), zlib.crc32(payload)) + payload


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_the_parsers_raise_nothing_but_peer_errors(seed):
    chance = random.Random(seed)
    for _ in range(400):
        kind = chance.choice(list(FrameKind))
        texts = [b"{}", b'{"version":1,"nonce":"' + b"0" * 32 + b'"}', b'{"nonce":1}', b"[" * 900]
        payload = chance.choice([chance.randbytes(chance.randrange(60)), *texts])
        data = frame_bytes(kind, payload)
        for _ in range(chance.randrange(3)):
            data = bytearray(data)
            data[chance.randrange(len(data))] = chance.randrange(256)
        data = bytes(data)[: chance.choice([len(data), chance.randrange(len(data) + 1)])]
        try:
            frame = receive_of(data, *chance.sample(list(FrameKind), 4))
            chance.choice([parse_names, parse_wanted])(frame.payload)
            parse_message(frame.payload, PeerHello)
            parse_message(frame.payload, PeerProof)
        except PeerError:
            continue


@pytest.mark.parametrize("seed", range(3))
def test_whatever_clients_send_the_server_goes_on_serving(server, monkeypatch, caplog, seed):
    monkeypatch.setattr(
        block_server, "HANDSHAKE_S", 2
    )  # honest ones must make it on a busy machine
    monkeypatch.setattr(block_server, "FRAME_S", 2)
    chance = random.Random(seed)
    for _ in range(60):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
            if chance.random() < 0.6:
                shake_hands(client)
            kind = chance.choice(list(FrameKind))
            payload = chance.choice([chance.randbytes(chance.randrange(3000)), b"".join(NAMES)])
            data = bytearray(chance.choice([frame_bytes(kind, payload), payload]) or b"x")
            if chance.random() < 0.5:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            client.sendall(data[: chance.choice([len(data), chance.randrange(len(data) + 1)])])
    assert "Unhandled" not in caplog.text
    check_served(server)


def shake_hands(client):
    channel = PeerChannel(client, sizes=PageSizes(PAGE_BYTES))
    channel.deadline = time.monotonic() + 5
    nonce = "0" * 32
    channel.send(FrameKind.HELLO, msgspec.json.encode({"version": VERSION, "nonce": nonce}))
    theirs = msgspec.json.decode(channel.receive(FrameKind.CHALLENGE).payload)
    own = proof(b"s" * 16, CLIENT, nonce, theirs["nonce"])
    channel.send(FrameKind.PROOF, msgspec.json.encode({"proof": own, "identity": IDENTITY}))
    channel.receive(FrameKind.WELCOME)
