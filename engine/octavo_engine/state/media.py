"""Pictures in a request: where in the prompt they stand, which they are, and their pixels."""

from __future__ import annotations

import msgspec


class MediaSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [first, first + length) of a prompt are placeholders of one picture."""

    digest: bytes  # 16 bytes of its pixels and of how they were made; equal ones are one picture
    first: int
    length: int
    kind: str = "image"
    # Its tokens see each other, the later ones too: all that are left of them go into one step.
    is_two_way: bool = False
    # Lines and columns of its tokens, of models whose ropes turn by these.
    grid: tuple[int, int] | None = None
    # Rows in a line, where a token of the text stands behind each line. 0: all are rows.
    line_rows: int = 0

    @property
    def num_rows(self) -> int:
        """That the encoder makes of it."""
        return self.length - self.length // (self.line_rows + 1) if self.line_rows else self.length

    @property
    def end(self) -> int:
        return self.first + self.length

    @property
    def shortening(self) -> int:
        """By how much tokens behind it stand earlier for such a rope: it takes as many places as
        its longer side has tokens."""
        return 0 if self.grid is None else self.length - max(self.grid)


class TileGrid(msgspec.Struct, frozen=True, array_like=True):
    """How tiles become one picture: the whole of it, small, comes first, then its parts line by
    line. Of the parts' rows, put together, a rectangle is kept, with one row behind each line. A
    picture without parts has one such row."""

    rows: int  # of tiles
    columns: int
    top: int  # these four count rows of the language model's input
    left: int
    height: int
    width: int
    # To which the rectangle is shrunk; as large as it is, where that is not.
    shrunk_height: int
    shrunk_width: int

    @property
    def num_tiles(self) -> int:
        return 1 + self.rows * self.columns

    @property
    def num_kept(self) -> int:
        """Rows of the rectangle, and those behind its lines."""
        return self.shrunk_height * (self.shrunk_width + 1)


class MediaItem(msgspec.Struct, frozen=True):
    """What the encoder reads: pixels as they were prepared, and how they become numbers:
    (pixel * scale - mean) / std of its colour. Tiles of a grid lie one under the other."""

    digest: bytes
    height: int
    width: int
    pixels: bytes  # RGB, a byte each, row by row
    scale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    tiles: TileGrid | None = None
