"""Documents of LLMDeployments: files that are read again when they change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo.local.documents import MAX_FILE_BYTES, list_files
from octavo_common.file_watch import stamp_of
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_common.file_watch import Stamp

    Signature = tuple[tuple[str, Stamp], ...]


class DocumentWatch:
    """Looks by name, size, time and inode, so that editors which replace files are noticed."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._seen: Signature | None = None
        self._pending: Signature | None = None

    def read(self) -> dict[str, str] | None:
        """What all files hold, or None where nothing has changed. Raises ConfigError.

        NOTE: a change counts when a second look finds the same: some programs empty a file before
        they write it, and an empty file asks for nothing at all.
        """
        files = list_files(self._paths)
        try:
            signature = tuple((str(path), stamp_of(os.stat(path))) for path in files)
            if signature == self._seen:
                return None
            if self._seen is not None and signature != self._pending:
                self._pending = signature
                return None
            texts = {}
            for path in files:
                with path.open("rb") as file:
                    content = file.read(MAX_FILE_BYTES + 1)
                if len(content) > MAX_FILE_BYTES:
                    raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
                texts[str(path)] = content.decode()
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text") from None
        self._seen = signature
        return texts
