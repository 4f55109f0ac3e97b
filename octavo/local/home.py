"""$OCTAVO_HOME: where the platform keeps its state, logs and weights, and who runs it now."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "OCTAVO_HOME"
_LOGS_KEPT = 50
# `status` and `down` hold the lock for an instant while they look who has it.
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.1


@dataclass(frozen=True, slots=True)
class HomeOwner:
    """Who runs the platform of this home."""

    pid: int
    url: str

    @property
    def text(self) -> str:
        return f"octavo up (process {self.pid}) serves at {self.url}"


@dataclass(frozen=True, slots=True)
class Home:
    """Paths. `make` creates the folders."""

    path: Path

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Home:
        named = environ.get(VARIABLE)
        return cls(Path(named).expanduser().absolute() if named else Path.home() / ".octavo")

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def run(self) -> Path:
        """Files for the running processes; emptied at each start."""
        return self.path / "run"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def make(self) -> None:
        """Raises ConfigError."""
        try:
            for folder in (self.path, self.logs, self.run, self.models):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(self, error) from None

    def tidy(self) -> None:
        """Only with the lock held. Raises ConfigError."""
        try:
            for old in self.run.iterdir():
                old.unlink(missing_ok=True)
            logs = sorted(self.logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
            for log in logs[:-_LOGS_KEPT]:
                log.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self, error) from None

    def owner(self) -> HomeOwner | None:
        try:
            with self.lock_file.open("r") as file:
                if _try_lock(file):
                    return None
                return _read_owner(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(self, error) from None


def _unusable(home: Home, error: OSError) -> ConfigError:
    return ConfigError(
        f"{VARIABLE} ({home.path}) cannot be used: {error.strerror or error}; "
        f"set {VARIABLE} to a folder that you may write to, with room on its disk"
    )


class HomeLock:
    """Held while the platform runs; freed by the kernel when the process ends, however it does."""

    def __init__(self, home: Home, url: str) -> None:
        self._home = home
        self._url = url
        self._file: IO[str] | None = None

    def __enter__(self) -> HomeLock:
        """Raises ConfigError that names its owner, or why it cannot be taken."""
        try:
            file = self._home.lock_file.open("a+")
        except OSError as error:
            raise _unusable(self._home, error) from None
        for _ in range(_LOCK_TRIES):
            if _try_lock(file):
                break
            time.sleep(_LOCK_PAUSE_S)
        else:
            owner = _read_owner(file)
            file.close()
            raise ConfigError(
                f"{owner.text}; edit its file, end it with octavo down, "
                f"or set {VARIABLE} for a second platform"
            )
        try:
            file.truncate(0)
            json.dump({"pid": os.getpid(), "url": self._url}, file)
            file.flush()
        except OSError as error:
            with suppress(OSError):  # what could not be written is tried once more
                file.close()
            raise _unusable(self._home, error) from None
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def write_whole(path: Path, text: str) -> None:
    """Readers see the old text or the new one, never half of it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise ConfigError(f"{file.name} cannot be locked: {error.strerror}") from None
    return True


def _read_owner(file: IO[str]) -> HomeOwner:
    file.seek(0)
    try:
        fields = json.load(file)
        return HomeOwner(int(fields["pid"]), str(fields["url"]))
    except (ValueError, KeyError, TypeError, RecursionError):  # it has only just begun
        return HomeOwner(0, "an address that is not known yet")
