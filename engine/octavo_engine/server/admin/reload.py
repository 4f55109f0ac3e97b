"""Files that may change while the server runs, key files and certificates: seen, read, taken."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo_common.file_watch import FileWatch
from octavo_engine.errors import ConfigError
from octavo_engine.server.http.auth import Guard, KeyRing, parse_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo_engine.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

LOOK_INTERVAL_S = 2.0
MAX_KEY_FILE_BYTES = 4 * 2**20


class Reloadable(Protocol):
    """Something that is made of files."""

    @property
    def paths(self) -> Sequence[str]: ...
    def reload(self) -> None:
        """Take what the files say now. Raises ConfigError, and then nothing has changed."""


class KeyFiles:
    """The guard's rings, from settings and files together.

    A file that cannot be parsed changes nothing. One that is gone takes its keys with it: what
    cannot be read admits no key.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.paths = [p for p in (settings.api_key_file, settings.admin_api_key_file) if p]
        self.guard = Guard(*self._rings(is_start=True))

    def reload(self) -> None:
        keys, admin_keys = self._rings()
        self.guard.keys, self.guard.admin_keys = keys, admin_keys
        logger.info("Loaded the new keys", extra={"keys": len(keys), "admin_keys": len(admin_keys)})

    def _rings(self, *, is_start: bool = False) -> tuple[KeyRing, KeyRing]:
        settings = self._settings
        keys, path = settings.api_keys, settings.api_key_file
        admin_keys, admin_path = settings.admin_api_keys, settings.admin_api_key_file
        return (
            _ring(keys, path, "--api-key-file", is_start=is_start),
            _ring(admin_keys, admin_path, "--admin-api-key-file", is_start=is_start),
        )


def _ring(keys: Iterable[str], path: str, flag: str, *, is_start: bool) -> KeyRing:
    if not path:
        return KeyRing(keys)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        if is_start:
            raise ConfigError(f"{flag} {path}: {error.strerror}") from None
        logger.error(
            "Cannot read a key file; its keys are rejected until it can be read",
            extra={"file": path},
        )
        return KeyRing(keys, is_required=True)
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{flag} {path} is larger than {MAX_KEY_FILE_BYTES} bytes")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: byte {error.start} is not ASCII") from None
    return KeyRing((*keys, *parse_keys(text, f"{flag} {path}")), is_required=True)


class Reloader:
    """Looks at the files every other second, and at once on SIGHUP."""

    def __init__(self, parts: Iterable[Reloadable]) -> None:
        self._parts = [
            (part, FileWatch(part.paths, refusal=ConfigError, on_refusal=_log_refusal))
            for part in parts
            if part.paths
        ]
        self._now = asyncio.Event()

    def look_now(self) -> None:
        """Reads everything again, changed or not."""
        self._now.set()

    async def run(self) -> None:
        while True:
            is_forced = True
            try:
                # Without files there is nothing to look at, and an idle process stays asleep.
                async with asyncio.timeout(LOOK_INTERVAL_S if self._parts else None):
                    await self._now.wait()
            except TimeoutError:
                is_forced = False
            self._now.clear()
            self.look(is_forced=is_forced)

    def look(self, *, is_forced: bool = False) -> None:
        for part, watch in self._parts:
            watch.take(part.reload, force=is_forced)


def _log_refusal(error: Exception) -> None:
    """Half written, most likely: the next look sees it whole."""
    logger.error("Kept what was before: %s", error)
