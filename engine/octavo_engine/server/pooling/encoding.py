"""How numbers are written: as JSON, as base64, as plain bytes of a type and byte order."""

from __future__ import annotations

import base64
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.server.pooling.bodies import (
        EmbedDtype,
        EncodingFields,
        EncodingFormat,
        Endianness,
    )

_WIDTHS: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What a request wants its vectors in; type and order are of base64 and bytes."""

    format: EncodingFormat = "float"
    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"

    @classmethod
    def of(cls, request: EncodingFields) -> Encoding:
        return cls(
            format=request.encoding_format or "float",
            dtype=request.embed_dtype or "float32",
            endianness=request.endianness or "native",
        )

    @property
    def is_binary(self) -> bool:
        """The body is the numbers themselves, not JSON."""
        return self.format in ("bytes", "bytes_only")

    def value(self, row: NDArray[np.float32]) -> bytes:
        """One text's numbers as a JSON value. Hot path: once per text."""
        if self.format == "base64":
            return b'"' + base64.b64encode(self.pack(row)) + b'"'
        return msgspec.json.encode(row.tolist())

    def pack(self, row: NDArray[np.float32]) -> bytes:
        order = "<" if self._is_little else ">"
        if self.dtype == "bfloat16":
            return _bfloat16(row).astype(order + "u2").tobytes()
        return row.astype(f"{order}f{_WIDTHS[self.dtype]}").tobytes()

    def layout(self, rows: list[NDArray[np.float32]]) -> list[dict[str, Any]]:
        """Where each text's numbers lie when all are written one after the other."""
        start = 0
        places: list[dict[str, Any]] = []
        for index, row in enumerate(rows):
            end = start + row.size * _WIDTHS[self.dtype]
            places.append(
                {
                    "index": index,
                    "embed_dtype": self.dtype,
                    "endianness": "little" if self._is_little else "big",
                    "start": start,
                    "end": end,
                    "shape": list(row.shape),
                }
            )
            start = end
        return places

    @property
    def _is_little(self) -> bool:
        return (sys.byteorder if self.endianness == "native" else self.endianness) == "little"


def signs(row: NDArray[np.float32]) -> NDArray[np.uint8]:
    """One bit a number, whether it is positive; eight to a byte, the first in the highest bit."""
    return np.packbits(row > 0)


def _bfloat16(row: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The upper halves, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(row, np.float32).view(np.uint32)
    half, one, shift = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    return (bits + half + ((bits >> shift) & one)) >> shift
