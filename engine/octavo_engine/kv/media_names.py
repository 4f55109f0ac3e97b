"""What the names of KV blocks with pictures in them cover beside tokens.

Placeholders of all pictures are one token. In a block's name each picture is therefore covered by
its own digest, and in the list of a block's tokens, by which partly equal blocks are found, stands
a word made from it in place of the placeholder. Words are shorter than digests: one who finds a
block by them compares its pictures too.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.prefix_hash import block_digest, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from octavo_engine.state.media import MediaSpan
    from octavo_engine.state.sequence import Sequence

_NO_TOKEN = 1 << 31  # vocabularies are smaller


class MediaPart(NamedTuple):
    """So many of a block's tokens from `place` on are a picture's, from its `offset`-th on."""

    digest: bytes
    place: int
    length: int
    offset: int


def parts_of(spans: List[MediaSpan], index: int) -> tuple[MediaPart, ...]:
    """The pictures in block `index` of a sequence."""
    begin = index * BLOCK_SIZE
    parts = []
    for span in spans:
        first, end = max(span.first, begin), min(span.end, begin + BLOCK_SIZE)
        if first < end:
            parts.append(MediaPart(span.digest, first - begin, end - first, first - span.first))
    return tuple(parts)


def extras_of(parts: tuple[MediaPart, ...]) -> tuple[bytes, ...]:
    """What a block's digest covers beside its tokens."""
    return tuple(p.digest + struct.pack("<III", p.place, p.length, p.offset) for p in parts)


def named_tokens(sequence: Sequence) -> list[int]:
    """Its tokens, with words of the pictures in place of their placeholders."""
    spans = sequence.request.media
    if not spans:
        return sequence.token_ids
    tokens = sequence.token_ids[:]
    for span in spans:
        tokens[span.first : span.end] = _words(span.digest, 0, span.length)
    return tokens


def packed_block(sequence: Sequence, index: int) -> bytes:
    """The tokens of one of its blocks, with words in place of placeholders."""
    tokens = sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
    for part in parts_of(sequence.request.media, index) if sequence.request.media else ():
        end = part.place + part.length
        tokens[part.place : end] = _words(part.digest, part.offset, part.length)
    return pack_tokens(tokens)


def _words(digest: bytes, offset: int, count: int) -> list[int]:
    word = int.from_bytes(digest[:4], "little") + offset
    return [(word + i) % _NO_TOKEN + _NO_TOKEN for i in range(count)]


def name_full_blocks(sequence: Sequence, known: List[bytes]) -> list[bytes]:
    """The digests of all its full blocks, of which the first ones are known."""
    tokens = pack_tokens(named_tokens(sequence))
    digests = list(known)
    parent = digests[-1] if digests else sequence.root
    width = len(pack_tokens((0,))) * BLOCK_SIZE
    for index in range(len(digests), len(tokens) // width):
        extras = extras_of(parts_of(sequence.request.media, index))
        parent = block_digest(parent, tokens[index * width : (index + 1) * width], extras=extras)
        digests.append(parent)
    return digests


def num_agreeing(left: tuple[MediaPart, ...], right: tuple[MediaPart, ...], num_tokens: int) -> int:
    """How many of the first `num_tokens` of two blocks are of the same pictures, or of none."""
    if left == right:
        return num_tokens
    ours, theirs = _by_place(left), _by_place(right)
    differ = (p for p in range(num_tokens) if ours.get(p) != theirs.get(p))
    return next(differ, num_tokens)


def _by_place(parts: tuple[MediaPart, ...]) -> dict[int, tuple[bytes, int]]:
    return {
        part.place + i: (part.digest, part.offset + i) for part in parts for i in range(part.length)
    }
