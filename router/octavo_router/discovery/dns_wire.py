"""DNS messages, as far as SRV records need them: a query out, an answer in. RFC 1035 and 2782."""

from __future__ import annotations

import struct
from typing import NamedTuple

A, AAAA, SRV = 1, 28, 33
_IN = 1
_HEADER = struct.Struct(">HHHHHH")
_RECORD = struct.Struct(">HHIH")
_SRV = struct.Struct(">HHH")
_RECURSE = 0x0100
_TRUNCATED = 0x0200
_MAX_POINTERS = 64


class DnsError(ValueError):
    """A message that does not answer the query."""


class Truncated(DnsError):
    """The answer does not fit in a datagram: ask again over TCP."""


class SrvRecord(NamedTuple):
    """One answer. `port` is an SRV record's; `target` its host, or the address of A and AAAA."""

    name: str
    kind: int
    ttl_s: int
    target: str
    port: int = 0
    priority: int = 0


def encode_query(id_: int, name: str, kind: int) -> bytes:
    labels = [label.encode("idna") for label in name.rstrip(".").split(".")]
    if any(not 0 < len(label) < 64 for label in labels):
        raise DnsError(f"{name!r} is no host name")
    question = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return _HEADER.pack(id_, _RECURSE, 1, 0, 0, 0) + question + struct.pack(">HH", kind, _IN)


def decode_answer(id_: int, message: bytes) -> list[SrvRecord]:
    """The records of an answer, additional ones too. Raises DnsError."""
    try:
        return _decode(id_, message)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise DnsError(f"the answer is cut short or garbled: {error}") from None


def _decode(id_: int, message: bytes) -> list[SrvRecord]:
    reply_id, flags, questions, answers, authorities, additional = _HEADER.unpack_from(message)
    if reply_id != id_ or not flags & 0x8000:
        raise DnsError("the answer is to another question")
    if flags & _TRUNCATED:
        raise Truncated("the answer does not fit in a datagram")
    if code := flags & 0xF:
        raise DnsError(
            "the name does not exist" if code == 3 else f"the server answers with code {code}"
        )
    at = _HEADER.size
    for _ in range(questions):
        _, at = _name(message, at)
        at += 4
    records = []
    for _ in range(answers + authorities + additional):
        name, at = _name(message, at)
        kind, _class, ttl_s, length = _RECORD.unpack_from(message, at)
        at += _RECORD.size
        data = message[at : at + length]
        if len(data) != length:
            raise DnsError("the answer is cut short")
        if kind == SRV:
            priority, _weight, port = _SRV.unpack_from(data)
            target, _ = _name(message, at + _SRV.size)
            records.append(SrvRecord(name, kind, ttl_s, target, port, priority))
        elif (kind, length) in ((A, 4), (AAAA, 16)):
            records.append(SrvRecord(name, kind, ttl_s, _address(data)))
        at += length
    return records


def _name(message: bytes, at: int) -> tuple[str, int]:
    """A name and where it ends. Pointers only lead to earlier names, and to so many."""
    labels: list[str] = []
    end = -1
    for _ in range(_MAX_POINTERS * 2):
        length = message[at]
        if length >= 0xC0:
            if end < 0:
                end = at + 2
            at = (length & 0x3F) << 8 | message[at + 1]
            continue
        if length == 0:
            return ".".join(labels).lower(), end if end >= 0 else at + 1
        label = message[at + 1 : at + 1 + length]
        if len(label) != length:
            raise DnsError("a name is cut short")
        labels.append(label.decode("ascii"))
        at += 1 + length
    raise DnsError("a name has no end")


def _address(data: bytes) -> str:
    import ipaddress

    return str(ipaddress.ip_address(data))
