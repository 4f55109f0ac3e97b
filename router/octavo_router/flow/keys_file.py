"""Reads the keys' file again when it changed. The one part of flow that touches the world."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo_router.config.load import parse_part
from octavo_router.config.settings import FlowConfig, KeyConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.flow.keys import KeyTable, make_table

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_FILE_BYTES = 4 * 2**20


class KeysFile:
    """The keys of settings and file together. Ask `refresh` every second or two.

    A file that cannot be parsed changes nothing: the keys before stay. A file that is gone lets
    nobody in but the settings' own keys: a store that is down fails closed.
    """

    def __init__(self, config: FlowConfig, environment: Mapping[str, str]) -> None:
        self._config = config
        self._environment = environment
        self._seen: object = None

    def load(self) -> KeyTable:
        """The table now. Raises ConfigInvalid for a file that cannot be read."""
        self._seen = self._state()
        keys = self._config.keys
        if not self._config.keys_file:
            return self._table(keys)
        try:
            data = Path(self._config.keys_file).read_bytes()
        except OSError as error:
            raise ConfigInvalid(
                "flow.keys_file", f"{self._config.keys_file}: {error.strerror}"
            ) from error
        if len(data) > MAX_FILE_BYTES:
            raise ConfigInvalid("flow.keys_file", f"is larger than {MAX_FILE_BYTES} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ConfigInvalid("flow.keys_file", f"byte {error.start} is not UTF-8") from error
        found: tuple[KeyConfig, ...] = parse_part(text, "keys", KeyConfig)
        return self._table((*keys, *found), is_required=True)

    def refresh(self) -> KeyTable | None:
        """A new table if the file changed; raises ConfigInvalid once for each bad content."""
        state = self._state()
        if not self._config.keys_file or state == self._seen:
            return None
        if state is None:
            self._seen = None
            return self._table(self._config.keys, is_required=True)
        return self.load()

    def _table(self, keys: tuple[KeyConfig, ...], *, is_required: bool = False) -> KeyTable:
        return make_table(
            keys,
            self._environment,
            is_required=is_required,
            salts_caches=self._config.cache_scope == "tenant",
        )

    def _state(self) -> object:
        """Differs when the file does; None: there is none."""
        if not self._config.keys_file:
            return None
        try:
            stat = Path(self._config.keys_file).stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
