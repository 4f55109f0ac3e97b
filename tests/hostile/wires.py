"""The parsers of what comes over connections: HTTP/1.1, SSE, JSON, forms, frames of all kinds."""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.hostile.parser import HostileParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.hostile.parser import Read

    Opened = tuple[Read, Sequence[bytes], tuple[type[BaseException], ...]]

_DATA: Final = Path(__file__).parents[1] / "data"


def _http_requests(folder: Path) -> Opened:
    """The router's reader, byte-cut and whole, and what others find in what came and what goes."""
    from tests.fakes.api_fuzz import raw_requests
    from tests.router.http.test_framing import agrees_with_others, cut, read

    def check(data: bytes) -> bool:
        whole = agrees_with_others(data)
        pieces = read(cut(data, [len(data) // 3, len(data) // 2, max(0, len(data) - 3)]))
        assert pieces.requests == whole.requests
        return bool(whole.requests)

    chunked = (
        b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    )
    refused = [one for one in raw_requests(1, 0) if len(one) < 1024]
    plain = b"POST /v1/a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nAccept: */*\r\n\r\nabc"
    whole = [chunked, plain, plain + chunked, chunked + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]
    return check, [*refused[:8], *whole * 8], ()


def _http_responses(folder: Path) -> Opened:
    from octavo_router.http.response_head import ResponseError, ResponseHeadParser

    def read(data: bytes) -> None:
        head = ResponseHeadParser().parse(data)
        assert 0 <= head.status <= 999
        assert head.content_length is None or head.content_length >= 0

    seeds = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: application/json\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n",
        b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n",
    ]
    return read, seeds, (ResponseError,)


def _chunks(folder: Path) -> Opened:
    from octavo_router.http.chunked import ChunkDecoder, ChunkError

    def read(data: bytes) -> None:
        whole = b"".join(ChunkDecoder(is_strict=True).feed(data))
        bytewise = ChunkDecoder(is_strict=True)
        assert whole == b"".join(
            part for i in range(len(data)) for part in bytewise.feed(data[i : i + 1])
        )

    return read, [b"3\r\nabc\r\n10;x=y\r\n0123456789abcdef\r\n0\r\n\r\n"], (ChunkError,)


def _json_bodies(folder: Path) -> Opened:
    """The engine's reader and both of the router's: what the router reads, the engine reads."""
    from octavo_engine.errors import RequestError
    from octavo_engine.server.http import strict_json
    from octavo_engine.server.openai.schemas import ChatCompletionRequest
    from octavo_router.residency import native
    from octavo_router.residency import scan as slow
    from tests.router.residency.bodies import ADAPTERS, KINDS, Bodies, outcome

    fast, bodies = native.load(), Bodies(1)

    def read(data: bytes) -> bool:
        is_read = False
        for kind in KINDS:
            expected = outcome(slow.scan, data, kind, ADAPTERS)
            assert outcome(fast.scan, data, kind, ADAPTERS) == expected
            is_read |= expected != ("refused",)
        if is_read:
            strict_json.parse(data, max_depth=64)
        with suppress(RequestError):
            strict_json.decode(data, ChatCompletionRequest, max_depth=64)
        return is_read

    return read, [bodies.body() for _ in range(60)], (RequestError,)


def _continued_streams(folder: Path) -> Opened:
    """What a client says that it has of a stream."""
    from octavo_engine.protocol.resume import unpack
    from octavo_router.errors import Rejected
    from octavo_router.proxy.continuation import remember
    from octavo_router.proxy.resume import StreamMemory
    from octavo_router.residency import native
    from tests.router.proxy.test_resume import STREAM

    hot = native.load()

    def read(data: bytes) -> bool:
        memory = StreamMemory(hot.split_token_lines, hot.find_event_end, keeps_lines=True)
        remember(memory, data, is_stream=True)
        if memory.can_resume:
            frame, _ = unpack(memory.resume_body(b""))
            assert "kv_address" not in json.loads(frame)
        return memory.can_resume

    parts = [b"".join(STREAM[:count]) for count in range(1, len(STREAM))]
    return read, [*parts, parts[-4] + parts[0]], (Rejected,)


def _forms(folder: Path) -> Opened:
    from octavo_engine.errors import RequestError
    from octavo_engine.server.http.multipart import FormReader
    from tests.engine.server.http.test_multipart import CONTENT, NAMED, form

    def read(data: bytes) -> bool:
        whole, bytewise = FormReader(b"boundary"), FormReader(b"boundary")
        found = [event for event in whole.feed(data) if not isinstance(event, bytes)]
        for i in range(len(data)):
            found += [one for one in bytewise.feed(data[i : i + 1]) if not isinstance(one, bytes)]
        assert whole.is_whole == bytewise.is_whole
        return whole.is_whole

    file = NAMED % "file" + '; filename="a.wav"\r\nContent-Type: audio/wav'
    seeds = [
        form((NAMED % "model", b"m"), (file, CONTENT)),
        form((NAMED % "a", b""), before=b"x\r\n"),
    ]
    return read, seeds, (RequestError,)


def _event_streams(folder: Path) -> Opened:
    """An engine's stream as the router reads, remembers and continues it."""
    from octavo_engine.protocol.resume import unpack
    from octavo_router.proxy.events import EventRelay
    from octavo_router.proxy.resume import BAD_STREAM
    from octavo_router.residency import native
    from tests.router.proxy.test_resume import STREAM, memory

    hot = native.load()

    def read(data: bytes) -> bool:
        kept, half = memory(), len(data) // 2
        relayed = kept.feed(data[:half]) + kept.feed(data[half:])
        assert b"\n: octavo " not in b"\n" + relayed
        if kept.can_resume:
            frame, body = unpack(kept.resume_body(b"body"))
            assert body == b"body"
            json.loads(frame)
        assert kept.usage is not None
        relay = EventRelay(hot.find_event_end, max_bytes=2**20)
        assert data.startswith(relay.feed(data[:half]) + relay.feed(data[half:]))
        return kept.lost_with != BAD_STREAM

    return read, [b"".join(STREAM[: i + 1]) for i in range(len(STREAM))], ()


def _usage(folder: Path) -> Opened:
    from octavo_router.residency import native
    from octavo_router.residency import usage as slow

    fast = native.load()

    def read(data: bytes) -> None:
        assert tuple(fast.find_usage(data)) == tuple(slow.find_usage(data))

    answer = {"choices": [{"text": 'an "usage" : {', "index": 0}], "usage": {
        "prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1}}}  # fmt: skip
    return read, [json.dumps(answer).encode()], ()


def _core_frames(folder: Path) -> Opened:
    from octavo_engine.core.process import wire
    from tests.engine.core.process.test_wire import FROM_CORE, TO_CORE

    def read(data: bytes) -> None:
        with suppress(wire.WireError):
            wire.MessageReader(wire.TO_CORE).feed(data)
        with suppress(wire.WireError):
            wire.MessageReader(wire.FROM_CORE).feed(data)

    seeds = [wire.encode(message) for message in (*TO_CORE, *FROM_CORE)]  # type: ignore[arg-type]
    return read, seeds, ()


def _peer_frames(folder: Path) -> Opened:
    from octavo_engine.tiers import peer_wire as wire
    from octavo_engine.tiers.page import NAME_BYTES, PageSizes

    kinds = tuple(wire.FrameKind)

    def frame(kind: wire.FrameKind, payload: bytes) -> bytes:
        return struct.pack("<4sB3xII", b"OKVP", kind, len(payload), zlib.crc32(payload)) + payload

    def read(data: bytes) -> None:
        # The checksum is made right in half of them: else nothing behind it would be reached.
        if len(data) > 16 and data[-1] % 2:
            payload = data[16:]
            data = data[:8] + struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            channel = wire.PeerChannel(ours, sizes=PageSizes(64))
            channel.deadline = time.monotonic() + 60.0
            found = channel.receive(*kinds)
        match found.kind:
            case wire.FrameKind.HELLO:
                wire.parse_message(found.payload, wire.PeerHello)
            case wire.FrameKind.CHALLENGE:
                wire.parse_message(found.payload, wire.PeerChallenge)
            case wire.FrameKind.PROOF:
                wire.parse_message(found.payload, wire.PeerProof)
            case wire.FrameKind.LOOKUP:
                assert all(len(name) == NAME_BYTES for name in wire.parse_names(found.payload))
            case wire.FrameKind.GET:
                names = wire.parse_wanted(found.payload)
                assert all(NAME_BYTES <= len(name) <= wire.MAX_NAME_BYTES for name in names)
            case wire.FrameKind.FOUND:
                wire.parse_found(found.payload, [bytes(NAME_BYTES)] * 9)

    nonce, proof = "0" * 32, "a" * 64
    handshake = [
        (wire.FrameKind.HELLO, {"version": 1, "nonce": nonce}),
        (wire.FrameKind.CHALLENGE, {"nonce": nonce, "proof": proof}),
        (wire.FrameKind.PROOF, {"proof": proof, "identity": {"weights": "a"}}),
    ]
    seeds = [frame(kind, json.dumps(fields).encode()) for kind, fields in handshake]
    seeds += [frame(wire.FrameKind.LOOKUP, bytes(range(17)) * 9),
              frame(wire.FrameKind.GET, wire.pack_wanted([bytes(17), bytes(21)])),
              frame(wire.FrameKind.FOUND, b"\xff\x80"), frame(wire.FrameKind.END, b""),
              frame(wire.FrameKind.PAGE, struct.pack("<II", 2, 16) + bytes(64)),
              frame(wire.FrameKind.REFUSED, b"no")]  # fmt: skip
    return read, seeds, (wire.PeerError,)


def _load_frames(folder: Path) -> Opened:
    from octavo_engine.protocol.stream import Delta, Draining, Hello, Load, Snapshot
    from octavo_router.errors import Unreachable
    from octavo_router.signals.frames import FrameReader
    from tests.fakes.engine_stream import pack_evicted, pack_frame, pack_stored

    def read(data: bytes) -> None:
        reader, half = FrameReader(), len(data) // 2
        reader.feed(data[:half])
        reader.feed(data[half:])

    frames = [
        pack_frame(Hello("e", "m", ["m"], ["lora"])),
        pack_frame(Snapshot(pack_stored((1, 2), (3, 4)), last=True)),
        pack_frame(Delta(1, pack_stored((5, 1)), pack_evicted(3), Load(), ["lora"])),
        pack_frame(Draining()),
    ]
    seeds = [*frames, b"".join(frames)]
    return read, seeds, (Unreachable,)


def _kv_events(folder: Path) -> Opened:
    from octavo_router.errors import Unreachable
    from octavo_router.signals.kv_events import decode_batch

    golden = json.loads((_DATA / "vllm_kv_events.json").read_text())
    seeds = [bytes.fromhex(one) for one in golden.values() if isinstance(one, str)]
    return decode_batch, seeds, (Unreachable,)


def _kv_batches(folder: Path) -> Opened:
    """The same events, written from changed JSON: the bytes are sound, the fields are not."""
    import msgspec

    from octavo_router.errors import Unreachable
    from octavo_router.signals.kv_events import decode_batch

    def read(data: bytes) -> None:
        try:
            payload = msgspec.msgpack.encode(json.loads(data))
        except (ValueError, OverflowError, RecursionError):
            return
        decode_batch(payload)

    events = [["BlockStored", [1, 2], 3, [5, 6, 7, 8], 2, None, "GPU", "lora", None, 0, "full"],
              {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
               "token_ids": [1, 2], "block_size": 2}, ["BlockRemoved", [1], "GPU", 0],
              ["AllBlocksCleared"]]  # fmt: skip
    return read, [json.dumps([1.5, events, 0]).encode()], (Unreachable,)


def _gateway_messages(folder: Path) -> Opened:
    """Envoy's protocol of external processing."""
    from octavo_router.epp import messages
    from octavo_router.epp.hints import read_served, read_subset
    from octavo_router.epp.wire import ProtobufError

    def read(data: bytes) -> None:
        message = messages.read_message(data)
        read_subset(message.metadata)
        read_served(message.metadata, ())
        messages.read_metadata(message.metadata, "other")
        messages.read_headers(message.content)
        messages.read_body(message.content)

    golden = json.loads((_DATA.parent / "router/epp/golden.json").read_text())
    seeds = [bytes.fromhex(text) for text in golden["requests"].values()]
    return read, seeds, (ProtobufError,)


def _dns(folder: Path) -> Opened:
    from octavo_router.discovery.dns_wire import SRV, A, DnsError, decode_answer, encode_query
    from tests.router.discovery.test_resolver import answer, name, record, srv

    query = encode_query(7, "_x._tcp.a", SRV)
    full = answer(query, record(b"\xc0\x0c", SRV, srv(8001, b"\x02e0\xc0\x14")),
                  record(name("e0.a"), A, bytes([10, 0, 0, 1])))  # fmt: skip
    return lambda data: decode_answer(7, data), [full, answer(query)], (DnsError,)


def _resume_frames(folder: Path) -> Opened:
    """What a router sends to an engine that continues a generation."""
    from octavo_engine.errors import RequestError
    from octavo_engine.protocol.resume import Resume, pack
    from octavo_engine.server.http.resume_frame import read_frame

    def read(data: bytes) -> None:
        # The length is made right in half of them: else little of what it frames would be read.
        if len(data) > 4 and data[-1] % 2:
            data = struct.pack("<I", max(0, len(data) - 6)) + data[4:]
        resume, _ = read_frame(data)
        assert all(number >= 0 for ids in resume.tokens for number in ids)

    one = Resume(
        id="chatcmpl-1", created=9, seed=-7, tokens=[[5, 6], [7]], finished=[1], opened=[0]
    )
    several = Resume(id="resp_1", created=9, seed=1, tokens=[[5, 6]], pieces=[1, 1], events=7)
    return read, [pack(one, b"{}"), pack(several, b"{}")], (RequestError,)


WIRES: Final[dict[str, HostileParser]] = {
    "HTTP/1.1 requests": HostileParser(
        open=_http_requests,
        words=(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"\r\n\r\n", b"\r"),
    ),
    "HTTP/1.1 responses": HostileParser(open=_http_responses, words=(b"chunked", b"\r\n", b": ")),
    "chunks": HostileParser(open=_chunks, words=(b"\r\n", b"0\r\n\r\n", b";")),
    "JSON bodies": HostileParser(open=_json_bodies, json_share=0.4, words=(b"\\ud800", b"1e400")),
    "forms": HostileParser(open=_forms, words=(b"--boundary", b"\r\n", b"--", b"filename=")),
    "event streams": HostileParser(open=_event_streams, words=(b"data: ", b": octavo ", b"\n\n")),
    "continued streams": HostileParser(
        open=_continued_streams, words=(b"data: ", b": octavo begin ", b"\n\n", b": octavo 0 1\n")
    ),
    "usage": HostileParser(open=_usage, words=(b'"usage":', b"{")),
    "core frames": HostileParser(open=_core_frames),
    "resume frames": HostileParser(open=_resume_frames, words=(b"[[", b"],[", b"-1")),
    "KV peer frames": HostileParser(open=_peer_frames),
    "load frames": HostileParser(open=_load_frames),
    "KV events": HostileParser(open=_kv_events),
    "KV event fields": HostileParser(open=_kv_batches, json_share=1.0),
    "gateway messages": HostileParser(open=_gateway_messages),
    "DNS answers": HostileParser(open=_dns),
}
