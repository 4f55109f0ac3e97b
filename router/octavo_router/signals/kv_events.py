"""KV events as vLLM and SGLang publish them: bytes of a batch into typed events, tolerantly.

Both encodings are read: maps with a `type`, and the older positional arrays of any length. What is
unknown is skipped; what cannot be read makes the whole batch unreadable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from octavo_router.errors import Unreachable

BlockId: TypeAlias = int | bytes  # as published, folded to unsigned where it is a number


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that now hold these tokens, one after the other."""

    hashes: tuple[BlockId, ...]
    parent: BlockId | None
    token_ids: tuple[int, ...]  # empty where the publisher does not say
    block_size: int
    lora_name: str = ""
    medium: str = "GPU"
    extra_keys: tuple[Any, ...] | None = None  # one for each block, where reported
    group: int = 0
    kind: str = "full_attention"


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[BlockId, ...]
    medium: str = "GPU"
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left."""


Event: TypeAlias = Stored | Removed | Cleared

# The positions of the array encoding. Older versions end earlier.
_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_POSITIONS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}


def decode_batch(payload: bytes) -> list[Event]:
    """The events of a batch, in order. Raises Unreachable."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch[1]
        return [event for event in map(_event, events) if event is not None]
    except (TypeError, ArithmeticError, ValueError, LookupError, RecursionError) as error:
        raise Unreachable(f"a batch of KV events cannot be read: {error}") from error


def _event(raw: Any) -> Event | None:
    fields = _fields(raw)
    match fields.get("type"):
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            hashes = tuple(map(_block_id, fields["block_hashes"]))
            return Removed(hashes, _medium(fields), fields.get("group_idx") or 0)
        case "AllBlocksCleared":
            return Cleared()
    return None


def _fields(raw: Any) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    names = _POSITIONS.get(raw[0], ())
    return {"type": raw[0], **dict(zip(names, raw[1:], strict=False))}


def _stored(fields: dict[str, Any]) -> Stored:
    parent = fields.get("parent_block_hash")
    tokens = fields["token_ids"] or ()
    if tokens and isinstance(tokens[0], list | tuple):  # pairs, under some speculative modes
        tokens = [pair[0] for pair in tokens]
    extra_keys = fields.get("extra_keys")
    if extra_keys is None and fields.get("cache_salt"):
        extra_keys = [[["cache_salt", fields["cache_salt"]]]]  # SGLang's way to say it
    return Stored(
        hashes=tuple(map(_block_id, fields["block_hashes"])),
        parent=None if parent is None else _block_id(parent),
        token_ids=tuple(map(_token_id, tokens)),
        block_size=int(fields["block_size"]),
        lora_name=fields.get("lora_name") or "",
        medium=_medium(fields),
        extra_keys=None if extra_keys is None else tuple(extra_keys),
        group=fields.get("group_idx") or 0,
        kind=fields.get("kv_cache_spec_kind") or "full_attention",
    )


def _block_id(value: Any) -> BlockId:
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF  # signed in some systems, unsigned in others
    if isinstance(value, bytes):
        return value
    raise TypeError(f"a block hash cannot be a {type(value).__name__}")


def _token_id(value: Any) -> int:
    if isinstance(value, int) and 0 <= value < 2**32:
        return value
    raise ValueError(f"{value!r} is no token id")


def _medium(fields: dict[str, Any]) -> str:
    return str(fields.get("medium") or "GPU").upper()
