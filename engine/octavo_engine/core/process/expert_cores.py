"""Core processes that compute experts for each other: they start with the same memory, and if one
ends all are started again, since a step that one has left cannot be computed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.core.process.core_handle import CoreHandle


class ExpertCores:
    """`size` of them, each launched by its own supervisor, all on one event loop."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "--enable-expert-parallel with --data-parallel-size needs Linux, for memory to "
                "share; leave it out"
            )
        self._size = size
        self._file: int | None = None
        self._cores: list[CoreHandle] = []

    def file(self) -> int:
        """Memory for the core that is launched next, and for all others of this start."""
        if self._file is None:
            self._file = os.memfd_create("octavo-experts")
        return self._file

    def add(self, core: CoreHandle) -> None:
        self._cores.append(core)

    def remove(self, core: CoreHandle, rank: int) -> None:
        """It has ended: so do the others that were started with it."""
        if core not in self._cores:
            return
        self._cores.remove(core)
        others, self._cores = self._cores, []
        for other in others:
            other.kill(
                f"data-parallel rank {rank} of {self._size}, which has some of the experts, ended"
            )
        if self._file is not None:
            os.close(self._file)
            self._file = None
