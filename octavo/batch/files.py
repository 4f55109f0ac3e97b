"""The two files of a batch: the input as lines, the output that grows by whole lines."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from octavo_engine.errors import DISK_FULL, ConfigError
from octavo_engine.server.openai.batches.lines import FinishedLine, done_so_far

if TYPE_CHECKING:
    from collections.abc import Iterator

STANDARD = "-"


@contextmanager
def opened_input(path: str) -> Iterator[IO[bytes]]:
    """Raises ConfigError."""
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    if "://" in path:
        raise ConfigError(f"--input-file {path}: only files, http(s) URLs and - are read")
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"--input-file {path}: {error.strerror}") from None
    with file:
        yield file


def count_lines(path: str) -> int | None:
    """How many requests there are about; None where that cannot be known before."""
    if path == STANDARD or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def earlier(path: str, *, resume: bool, overwrite: bool) -> FinishedLine:
    """What the output holds already. Raises ConfigError where that would be lost."""
    if path == STANDARD:
        if resume:
            raise ConfigError("--resume needs an --output-file to go on with")
        return FinishedLine()
    if not os.path.exists(path) or os.path.getsize(path) == 0 or overwrite:
        return FinishedLine()
    if not resume:
        raise ConfigError(
            f"--output-file {path} has answers already; --resume goes on with it, --overwrite "
            "begins anew"
        )
    try:
        return done_so_far(Path(path))
    except ValueError as error:
        raise ConfigError(f"--output-file {path}: {error}") from None


@contextmanager
def opened_output(path: str, *, resume: bool) -> Iterator[IO[bytes]]:
    """Raises ConfigError."""
    if path == STANDARD:
        yield sys.stdout.buffer
        return
    try:
        file = open(path, "ab" if resume else "wb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ConfigError(f"--output-file {path}: {error.strerror}") from None
    try:
        with file:
            yield file
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise ConfigError(
            f"--output-file {path}: {error.strerror}; free some space, and go on with --resume"
        ) from None
