"""The names of KV blocks: hashes chained over all tokens before them, ours and vLLM's recipe.

Ours is keyed and 128 bits wide, so that a hit needs no comparison of tokens:

    cache key = length-prefixed parts: model digest, tokenizer, KV format
    root      = blake2b-128(version, cache key, salt, adapter)
    block i   = blake2b-128(block i - 1 or root, tokens as little-endian u32)

Whatever else a block's content depends on (an image in it, say) is folded into the parent first.
The same function names a partly filled block; its number of tokens is part of the input by length.
"""

from __future__ import annotations

import struct
import sys
from array import array
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DIGEST_BYTES = 16
TOKEN_BYTES = 4
VERSION = b"octavo-kv-1"  # raise it when the recipe changes: old and new must never meet

_ROOT = b"octavo root"  # blake2b's personalisation keeps the three kinds of input apart
_BLOCK = b"octavo block"
_EXTRA = b"octavo extra"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32, end to end."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The opposite of `pack_tokens`."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def make_cache_key(*parts: bytes | str) -> bytes:
    """What separates one model's KV from another's: model digest, tokenizer, KV format, ..."""
    return _join(parts)


def root_digest(cache_key: bytes, *, salt: str = "", adapter: str = "") -> bytes:
    """The parent of first blocks. Prompts with different roots never share a block."""
    parts = (VERSION, cache_key, salt, adapter)
    return blake2b(_join(parts), digest_size=DIGEST_BYTES, person=_ROOT).digest()


def block_digest(
    parent: bytes, tokens: bytes | memoryview, *, extras: Sequence[bytes] = ()
) -> bytes:
    """The digest of one block from its parent's and its packed tokens."""
    if extras:
        joined = parent + _join(extras)
        parent = blake2b(joined, digest_size=DIGEST_BYTES, person=_EXTRA).digest()
    # The parent is a prefix, not blake2b's key: 16 + 64 bytes then take one compression, not two.
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES, person=_BLOCK).digest()


def chain_digests(parent: bytes, token_ids: Iterable[int], *, block_size: int = 16) -> list[bytes]:
    """The digests of all full blocks of `token_ids`, which follow the block named `parent`."""
    packed = memoryview(pack_tokens(token_ids))
    width = block_size * TOKEN_BYTES
    digests = []
    for start in range(0, len(packed) - width + 1, width):
        parent = block_digest(parent, packed[start : start + width])
        digests.append(parent)
    return digests


def _join(parts: Iterable[bytes | str]) -> bytes:
    """Length-prefixed, so that no two lists of parts read alike."""
    raw = [part.encode() if isinstance(part, str) else part for part in parts]
    return b"".join(struct.pack("<I", len(part)) + part for part in raw)


# -- vLLM's sha256_cbor, for its event format ------------------------------------------------------


def vllm_none_hash(seed: str | None = None) -> bytes:
    """The parent of first blocks in vLLM: constant, or made from PYTHONHASHSEED when that is
    set."""
    return sha256(_cbor("vllm-none-hash" if seed is None else seed)).digest()


def vllm_block_hash(
    parent: bytes | None, token_ids: Sequence[int], extra_keys: tuple[object, ...] | None = None
) -> bytes:
    """sha256 over the canonical CBOR of [parent, [tokens], extra keys or null]."""
    value = (parent or vllm_none_hash(), tuple(token_ids), extra_keys or None)
    return sha256(_cbor(value)).digest()


def vllm_event_id(digest: bytes) -> int:
    """The hash as it is published: the low 64 bits, unsigned."""
    return int.from_bytes(digest[-8:], "big")


def _cbor(value: object) -> bytes:
    match value:
        case None:
            return b"\xf6"
        case int():
            return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
        case bytes():
            return _cbor_head(2, len(value)) + value
        case str():
            text = value.encode()
            return _cbor_head(3, len(text)) + text
        case tuple() | list():
            return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
        case _:
            raise TypeError(f"a block key cannot hold a {type(value).__name__}")


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for info, bits, form in ((24, 8, ">B"), (25, 16, ">H"), (26, 32, ">I"), (27, 64, ">Q")):
        if number < 1 << bits:
            return bytes([major << 5 | info]) + struct.pack(form, number)
    raise OverflowError(f"{number} does not fit in 64 bits")
