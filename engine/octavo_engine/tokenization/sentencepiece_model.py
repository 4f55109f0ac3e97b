"""Reads a SentencePiece `tokenizer.model`: the fields of its protobuf that a tokenizer needs."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4
MAX_PIECES = 1 << 22

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf's wire types


class ScoredPiece(NamedTuple):
    """One entry of the vocabulary; its place is its id."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What the file says, with protobuf's defaults for what it does not."""

    pieces: tuple[ScoredPiece, ...]
    model_type: int
    byte_fallback: bool
    suffix_space: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool


def parse_model(data: bytes, where: str) -> SentencePieceModel:
    """Raises ModelError for anything that is not such a file."""
    try:
        return _model(data)
    except (ValueError, struct.error) as error:
        raise ModelError(f"{where} is not a SentencePiece model: {error}") from None


def _model(data: bytes) -> SentencePieceModel:
    pieces: list[ScoredPiece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number not in (1, 2, 3):
            continue
        if not isinstance(value, bytes):
            raise ValueError(f"its field {number} is no message")
        if number == 1:
            pieces.append(_piece(value))
            if len(pieces) > MAX_PIECES:
                raise ValueError(f"it has more than {MAX_PIECES} pieces")
        else:
            (trainer if number == 2 else normalizer).update(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    charsmap = normalizer.get(2, b"")
    if not isinstance(charsmap, bytes):
        raise ValueError("its character map is a number")
    return SentencePieceModel(
        pieces=tuple(pieces),
        model_type=_number(trainer, 3, UNIGRAM),
        byte_fallback=bool(_number(trainer, 35, 0)),
        suffix_space=bool(_number(trainer, 24, 0)),
        charsmap=charsmap,
        add_dummy_prefix=bool(_number(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_number(normalizer, 4, 1)),
        escape_whitespaces=bool(_number(normalizer, 5, 1)),
    )


def _piece(data: bytes) -> ScoredPiece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()  # UnicodeDecodeError is a ValueError
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
        elif number <= 3:
            raise ValueError(f"field {number} of a piece has the wrong type")
    if score != score or kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE):
        raise ValueError(f"the piece {text!r:.40} has the score {score} and the type {kind}")
    return ScoredPiece(text, score, kind)


def _number(fields: dict[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"its setting {number} is no number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError("a field has the number 0")
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"the wire type {wire} is unknown")
        if size > len(data) - at:
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than ten bytes")
