"""KV events in vLLM's format: what an engine's prefix cache holds, block by block.

    message  = topic, sequence number u64 big-endian, payload            (three ZMQ frames)
    payload  = msgpack [timestamp, [event, ...], data parallel rank]
    event    = a map whose first key is `type`; fields that equal their default are left out
    replay   = a request with the first number wanted; the answers, then END_OF_REPLAY

This is the values' part of it, without msgpack and ZMQ: `as_wire` gives what is to be encoded,
`from_wire` reads it back, and the arrays that vLLM wrote before version 0.24 as well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

MEDIUM = "GPU"  # vLLM's word for the memory that the model computes in, also where that is no GPU
HOST_MEDIUM = "CPU"  # its word for the host's memory beside that
DISK_MEDIUM = "DISK"
SHARED_MEDIUM = "SHARED_STORAGE"  # of files that several engines read and write
TIER_MEDIA = (HOST_MEDIUM, DISK_MEDIUM, SHARED_MEDIUM)  # slower than MEDIUM, the quickest first
FULL_ATTENTION = "full_attention"
END_OF_REPLAY = b"\xff" * 8

_SEQUENCE = struct.Struct(">Q")


@dataclass(slots=True)
class BlockStored:
    """Blocks that follow each other and can be found from now on."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None  # one a block: what else its hash covers
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(slots=True)
class BlockRemoved:
    """Blocks that can be found no longer."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(slots=True)
class AllBlocksCleared:
    """Nothing can be found any longer."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class KVEventBatch:
    """What one step changed."""

    ts: float
    events: list[Event] = field(default_factory=list)
    data_parallel_rank: int | None = 0


# Always written, whatever they hold; the others only if they are given. In vLLM's order.
_REQUIRED: dict[type[Event], tuple[str, ...]] = {
    BlockStored: (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name",
    ),
    BlockRemoved: ("block_hashes", "medium"),
    AllBlocksCleared: (),
}  # fmt: skip
_OPTIONAL: dict[type[Event], tuple[str, ...]] = {
    BlockStored: (
        "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    ),
    BlockRemoved: ("group_idx",),
    AllBlocksCleared: (),
}  # fmt: skip
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in _REQUIRED}


def as_wire(batch: KVEventBatch) -> list[Any]:
    """The batch as lists, dicts and scalars, ready for a msgpack encoder that keeps their order."""
    return [batch.ts, [_as_map(event) for event in batch.events], batch.data_parallel_rank]


def from_wire(value: Any) -> KVEventBatch:
    """The batch that a decoded payload holds, in either encoding; events of kinds that are not
    known are skipped. Raises ValueError that says what is wrong."""
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[1], list):
        raise ValueError("a batch of KV events is a list: [timestamp, [event, ...], rank]")
    events = [event for item in value[1] if (event := _event(item)) is not None]
    return KVEventBatch(float(value[0]), events, value[2] if len(value) > 2 else None)


def pack_sequence(number: int) -> bytes:
    return _SEQUENCE.pack(number)


def unpack_sequence(data: bytes) -> int:
    """Raises ValueError."""
    if len(data) != _SEQUENCE.size:
        raise ValueError(f"a sequence number has 8 bytes; got {len(data)}")
    number: int = _SEQUENCE.unpack(data)[0]
    return number


def _as_map(event: Event) -> dict[str, Any]:
    kind = type(event)
    fields: dict[str, Any] = {"type": kind.__name__}
    for name in _REQUIRED[kind]:
        fields[name] = getattr(event, name)
    for name in _OPTIONAL[kind]:
        value = getattr(event, name)
        if value is not None:
            fields[name] = value
    return fields


def _event(item: Any) -> Event | None:
    if isinstance(item, dict):
        tag, given = item.get("type"), item
    elif isinstance(item, list) and item:
        tag, *values = item
        kind = _KINDS.get(tag) if isinstance(tag, str) else None
        names = () if kind is None else (*_REQUIRED[kind], *_OPTIONAL[kind])
        given = dict(zip(names, values, strict=False))  # older ones have fewer slots
    else:
        raise ValueError(f"a KV event is a map or a list; got a {type(item).__name__}")
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        return None
    known = {name: given[name] for name in (*_REQUIRED[kind], *_OPTIONAL[kind]) if name in given}
    if kind is BlockStored:
        known.setdefault("parent_block_hash", None)
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(f"a {kind.__name__} event lacks fields: {error}") from None
