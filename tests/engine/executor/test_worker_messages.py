"""What goes over the sockets of ranks, damaged in every way: an error that names the rank."""

from __future__ import annotations

import random
import struct
import sys
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.config import EngineConfig
from octavo_engine.errors import WorkerLost
from octavo_engine.executor import messages
from octavo_engine.executor.rank_processes import RankProcess, RankProcesses

CONFIG = EngineConfig(device="cpu", tensor_parallel_size=2)
TO_WORKER: list[messages.ToWorker] = [
    messages.StartWorker(CONFIG, 1, 2, (1, 2), 10.0, 20, "text"),
    messages.PrepareWorker(
        BackendLimits(max_tokens=8, max_seqs=2, max_logit_rows=2, max_model_len=64), 100, 4096
    ),
    messages.PackAdapter(3, "/adapters/sql", "0123456789abcdef"),
]
FROM_WORKER: list[messages.FromWorker] = [
    messages.WorkerLoaded(),
    messages.WorkerPrepared(),
    messages.AdapterPacked(3, 1, "truncated"),
    messages.WorkerFailed("ModelError", "truncated"),
]
# A rank that sends what it is given, as it is, and then waits to be killed.
SENDS = """
import socket, sys, time
end = socket.socket(fileno=int(sys.argv[sys.argv.index("--socket") + 1]))
end.recv(1)
end.sendall(bytes.fromhex(sys.argv[1]))
time.sleep(60)
"""


def damaged(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] = rng.randrange(256)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += rng.randbytes(rng.randrange(1, 9))
            case 3:
                place = rng.randrange(len(data))
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
        if not data:
            return bytes(data)
    return bytes(data)


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_message_is_an_error_or_another_message(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = Pipe()
    directions: list[tuple[list[Any], Any]] = [
        (TO_WORKER, messages.TO_WORKER),
        (FROM_WORKER, messages.FROM_WORKER),
    ]
    num_broken = 0
    for _ in range(200):
        known, decoder = rng.choice(directions)
        ours.send_bytes(damaged(rng, msgspec.msgpack.encode(rng.choice(known))))
        try:
            messages.receive(theirs, decoder)
        except messages.BrokenMessage as error:
            assert "are no message" in str(error)
            num_broken += 1
    assert num_broken > 50


def test_whole_messages_arrive_as_they_were() -> None:
    ours, theirs = Pipe()
    for message in TO_WORKER:
        messages.send(ours, message)
        assert messages.receive(theirs, messages.TO_WORKER) == message
    for reply in FROM_WORKER:
        messages.send(ours, reply)
        assert messages.receive(theirs, messages.FROM_WORKER) == reply


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa7Unknown",
        b"\x81\xa4type\xacStartWorker",
        b"\x91" * 50_000,
        bytes(range(256)),
    ],
)
def test_a_rank_that_sends_no_message_is_killed_and_named(sent: bytes) -> None:
    stream = struct.pack("!i", len(sent)) + sent
    command = [sys.executable, "-S", "-c", SENDS, stream.hex()]
    ranks = RankProcesses(CONFIG, 10.0, command)
    try:
        with pytest.raises(WorkerLost, match="rank 1 of 2 was killed, since it sent"):
            ranks.expect(messages.WorkerLoaded)
        process = ranks.processes[0]
        assert isinstance(process, RankProcess)
        assert process.popen.wait(10) != 0
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_frame_without_end_is_refused_from_its_length_alone() -> None:
    command = [sys.executable, "-S", "-c", SENDS, struct.pack("!i", 1 << 30).hex()]
    ranks = RankProcesses(CONFIG, 10.0, command)
    try:
        with pytest.raises(
            WorkerLost, match="rank 1 of 2 was killed, since it sent a message above"
        ):
            ranks.expect(messages.WorkerLoaded)
    finally:
        ranks.close()
