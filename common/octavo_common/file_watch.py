"""Files that others replace while we run: whether they changed, and whether that was taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Stamp = tuple[int, int, int]


def stamp_of(stat: os.stat_result) -> Stamp:
    """Another one for each write and each replacement.

    By time alone two writes within a tick of the file system's clock are one; the inode shows
    files that were moved here, the size what was written in place.
    """
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class FileWatch:
    """Whether what is there now was taken. A change counts until `load` has taken it.

    `refusal`: the error by which `load` says that it cannot use what it finds. `on_refusal` gets
    it, once for each state of the files.
    """

    def __init__(
        self,
        paths: Iterable[str],
        *,
        refusal: type[Exception],
        on_refusal: Callable[[Exception], None],
    ) -> None:
        self._paths = [path for path in paths if path]
        self._refusal = refusal
        self._on_refusal = on_refusal
        self._taken = self._refused = self._look()

    def take(self, load: Callable[[], None], *, force: bool = False) -> bool:
        """Calls `load` where any file was written anew, and again at each look for as long as it
        refuses: half of the files may be there, or what is wrong may be put right elsewhere.
        `force`: also where nothing changed. Whether it took them.
        """
        seen = self._look()
        if seen == self._taken and not force:
            return False
        try:
            load()
        except self._refusal as error:
            if seen != self._refused or force:
                self._on_refusal(error)
            self._refused = seen
            return False
        self._taken = self._refused = seen
        return True

    def _look(self) -> list[Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> Stamp:
    try:
        return stamp_of(os.stat(path))
    except OSError:  # between removal and renaming
        return 0, 0, 0
