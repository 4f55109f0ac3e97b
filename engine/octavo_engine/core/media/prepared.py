"""Pictures and sounds as they were prepared: a file that comes again is not decoded again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.core.media.prepare import PreparedPicture

PREPARED_BYTES = 64 << 20  # of pixels and samples
Key = tuple[bytes, int]  # the sha256 of a file, and how many files its prompt has


class PreparedMedia:
    """The least recently used ones are given up."""

    def __init__(self, max_bytes: int = PREPARED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: OrderedDict[Key, PreparedPicture] = OrderedDict()

    def find(self, key: Key) -> PreparedPicture | None:
        picture = self._held.get(key)
        if picture is not None:
            self._held.move_to_end(key)
        return picture

    def hold(self, key: Key, picture: PreparedPicture) -> None:
        """One that is larger than all there is room for is not held."""
        if key in self._held:
            return
        self._held[key] = picture
        self._num_bytes += _size(picture)
        while self._num_bytes > self._max_bytes:
            _, given_up = self._held.popitem(last=False)
            self._num_bytes -= _size(given_up)


def _size(picture: PreparedPicture) -> int:
    return sum(len(tile.pixels) for tile in picture.tiles)
