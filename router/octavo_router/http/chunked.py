"""The chunked coding: where each chunk ends, strictly for what clients send, and writing it."""

from __future__ import annotations

from typing import Final

from octavo_router.http.fields import CONTROLS, TOKEN

LAST_CHUNK: Final = b"0\r\n\r\n"

_HEX: Final = b"0123456789abcdefABCDEF"
_MAX_SIZE_DIGITS: Final = 15
_MAX_SIZE_LINE: Final = 256  # with extensions, where they are let through
_MAX_TRAILER_BYTES: Final = 16 * 2**10
# The lines of nearly all chunks, as nearly all servers write them: one look-up instead of a parse.
_USUAL_SIZES: Final = {b"%x\r" % size: size for size in range(1, 4096)}


class ChunkError(ValueError):
    """The bytes are not the chunked coding; says what is wrong with them."""


class ChunkDecoder:
    """Takes bytes as they come, gives the data in them. Extensions and trailers are dropped.

    A strict one refuses them where two readers could see different ends in them: for that there
    must be nothing in a line that some take for its end, and no blank that some skip.
    """

    __slots__ = ("_is_strict", "_left", "_line", "_trailer_bytes", "is_done", "num_chunks", "rest")

    # What is awaited, in _left: n > 0 bytes of data; these otherwise.
    _SIZE, _CRLF, _TRAILER = 0, -1, -2

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._left = self._SIZE
        self._line = b""  # the beginning of a line that is not whole yet
        self._trailer_bytes = 0
        self.num_chunks = 0
        self.is_done = False
        self.rest = b""  # what came behind the end

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in `data`. Raises ChunkError; then the decoder is done for."""
        if self._line:
            data, self._line = self._line + data, b""
        pieces: list[bytes] = []
        at, end, left = 0, len(data), self._left
        while at < end:
            if left > 0:
                piece = data[at : at + left]
                pieces.append(piece)
                at += len(piece)
                left -= len(piece)
                if left == 0:
                    left = self._CRLF
            elif left == self._CRLF:
                if end - at < 2:
                    if data[at] != 13:
                        raise ChunkError("a chunk is longer than its size")
                    break
                if data[at : at + 2] != b"\r\n":
                    raise ChunkError("a chunk is longer than its size")
                at += 2
                left = self._SIZE
            elif left == self._SIZE:
                stop = data.find(b"\n", at, at + _MAX_SIZE_LINE)
                if stop < 0:
                    if end - at >= _MAX_SIZE_LINE:
                        raise ChunkError("the size of a chunk has no end")
                    break
                line = data[at:stop]
                left = _USUAL_SIZES.get(line) or self._size(line)
                at = stop + 1
                if left == 0:
                    left = self._TRAILER
                    continue
                self.num_chunks += 1
                behind = at + left
                if data[behind : behind + 2] == b"\r\n":  # it is here as a whole, as most are
                    pieces.append(data[at:behind])
                    at, left = behind + 2, self._SIZE
            else:
                stop = data.find(b"\n", at)
                if stop < 0:
                    if end - at + self._trailer_bytes > _MAX_TRAILER_BYTES:
                        raise ChunkError("the trailers are too large")
                    break
                line = data[at : stop + 1]
                at = stop + 1
                if line == b"\r\n":
                    self.is_done, self.rest = True, data[at:]
                    at = end
                    break
                self._trailer(line)
        self._line = data[at:]
        self._left = left
        return pieces

    def _size(self, line: bytes) -> int:
        if not line.endswith(b"\r"):
            raise ChunkError("the size of a chunk does not end in CRLF")
        digits, semicolon, extension = line[:-1].partition(b";")
        if semicolon or not self._is_strict:
            digits = digits.rstrip(b" \t")
        if self._is_strict and len(extension.translate(None, CONTROLS)) != len(extension):
            raise ChunkError("a chunk extension has control characters")
        if not digits or len(digits) > _MAX_SIZE_DIGITS or digits.translate(None, _HEX):
            raise ChunkError("the size of a chunk is not a hexadecimal number")
        return int(digits, 16)

    def _trailer(self, line: bytes) -> None:
        if self._is_strict:
            name, colon, _ = line.partition(b":")
            is_field = colon and name and not name.translate(None, TOKEN)
            if not is_field or len(line[:-2].translate(None, CONTROLS)) + 2 != len(line):
                raise ChunkError("a trailer is malformed")
            if not line.endswith(b"\r\n"):
                raise ChunkError("a trailer does not end in CRLF")
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _MAX_TRAILER_BYTES:
            raise ChunkError("the trailers are too large")


def chunk(data: bytes) -> bytes:
    """`data` as one chunk. It must not be empty: that would be the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)
