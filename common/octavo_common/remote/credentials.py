"""Where credentials come from: the environment, or files of the Secret that is mounted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "OCTAVO_CREDENTIALS"  # a folder with a file for each key of the Secret


class Credentials:
    """By name; the environment wins."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._folder = Path(environ[VARIABLE]) if environ.get(VARIABLE) else None

    def get(self, *names: str) -> str:
        """The first that is set, or ''."""
        for name in names:
            if value := self.environ.get(name, "").strip():
                return value
        for name in names:
            if (path := self.file(name)) is not None:
                return path.read_text(encoding="utf-8").strip()
        return ""

    def file(self, name: str) -> Path | None:
        """A key of the Secret, as a file."""
        if self._folder is None:
            return None
        path = self._folder / name
        return path if path.is_file() else None

    def json_files(self) -> list[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.glob("*.json") if path.is_file())
