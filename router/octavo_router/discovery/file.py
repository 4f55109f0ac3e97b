"""Endpoints from a YAML or JSON file, read again whenever it was replaced.

A file that cannot be used changes nothing: what it said before stands, and the log says why. It is
looked at every `look_s` seconds; ConfigMaps and editors replace files atomically, which a look at
name, size, time and inode notices.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from octavo_router.discovery.upstreams import ConfiguredUpstreams
from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_router.config.settings import UpstreamConfig
    from octavo_router.discovery.source import Publish
    from octavo_router.discovery.upstreams import Resolver
    from octavo_router.metrics import DiscoveryCounts

    # Raises ConfigInvalid.
    Parse = Callable[[str], Sequence[UpstreamConfig]]

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20

Signature = tuple[int, int, int]


class UpstreamsFile:
    """A source. `parse` turns what the file holds into upstreams."""

    def __init__(
        self,
        path: str,
        parse: Parse,
        resolver: Resolver,
        *,
        counts: DiscoveryCounts,
        interval_s: float = 5.0,
        look_s: float = 1.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = "file"
        self.problem = ""  # why the file as it is now is not used
        self._path = Path(path)
        self._parse = parse
        self._counts = counts
        self._look_s = look_s
        self._seen: Signature | None = None
        self._has_read = False
        self._upstreams = ConfiguredUpstreams(
            "file", (), resolver, counts=counts, interval_s=interval_s, environment=environment
        )

    async def run(self, publish: Publish) -> None:
        await self._look()
        while not self._has_read:
            await asyncio.sleep(self._look_s)
            await self._look()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._upstreams.run(publish))
            while True:
                await asyncio.sleep(self._look_s)
                await self._look()

    async def _look(self) -> None:
        try:
            signature, text = await asyncio.to_thread(self._read)
            if text is None:
                self._note_unchanged()
                return
            self._seen = signature
            self._upstreams.replace(self._parse(text.decode()))
        except (OSError, UnicodeDecodeError, ConfigInvalid) as error:
            self._complain(str(error))
            return
        self.problem = ""
        self._has_read = True
        self._note_unchanged()
        logger.info("Read upstreams", extra={"path": str(self._path)})

    def _note_unchanged(self) -> None:
        """What is wrong stays wrong until somebody corrects it: an alert must not end before."""
        if self.problem:
            self._counts.errors += 1
        elif not self._upstreams.has_names:  # else DNS is what reports, or does not
            self._counts.heard_at = asyncio.get_running_loop().time()

    def _read(self) -> tuple[Signature, bytes | None]:
        """In a thread: a file may lie on a network. No text when nothing has changed."""
        with self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if signature == self._seen:
                return signature, None
            if stat.st_size > MAX_FILE_BYTES:
                raise ConfigInvalid(str(self._path), f"is larger than {MAX_FILE_BYTES} bytes")
            return signature, file.read()

    def _complain(self, problem: str) -> None:
        self._counts.errors += 1
        if problem != self.problem:
            self.problem = problem
            logger.error("Kept the upstreams known before", extra={"reason": problem})
