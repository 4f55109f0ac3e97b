"""Files of a batch behind http(s) URLs: fetched before, sent by PUT once all is answered."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = 60.0  # of a connection that says nothing
_SCHEMES = ("http://", "https://")


def is_remote(path: str) -> bool:
    return path.lower().startswith(_SCHEMES)


@contextmanager
def local_input(path: str) -> Iterator[str]:
    """A file with what is at the URL, gone afterwards; other paths as they are. Raises
    ConfigError."""
    if not is_remote(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="octavo-batch-", suffix=".jsonl") as file:
        try:
            with urllib.request.urlopen(path, timeout=_TIMEOUT_S) as answer:
                shutil.copyfileobj(answer, file)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"--input-file {_shown(path)}: {_say(error)}") from None
        file.flush()
        yield file.name


@contextmanager
def local_output(path: str) -> Iterator[str]:
    """A file that is sent to the URL at the end; other paths as they are. Raises ConfigError.

    What was answered is never lost: a file that could not be sent, or is only half of what was
    wanted, stays where the message says.
    """
    if not is_remote(path):
        yield path
        return
    handle, name = tempfile.mkstemp(prefix="octavo-batch-", suffix=".jsonl")
    os.close(handle)
    try:
        yield name
    except BaseException:
        if os.path.getsize(name) == 0:
            os.unlink(name)
            raise
        print(f"{_shown(path)}: nothing was sent; the answers so far: {name}", file=sys.stderr)
        raise
    try:
        with open(name, "rb") as file:
            _put(path, file, os.path.getsize(name))
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"--output-file {_shown(path)}: {_say(error)}; the answers are in {name}"
        ) from None
    os.unlink(name)


def _put(url: str, file: IO[bytes], size: int) -> None:
    headers = {"content-type": "application/jsonl", "content-length": str(size)}
    request = urllib.request.Request(url, data=file, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
        pass


def _shown(url: str) -> str:
    """Without what follows the question mark: in a signed URL that is the right to use it."""
    return url.partition("?")[0]


def _say(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()  # it holds the answer's connection
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"cannot be reached: {error.reason}"
    return f"{error}" or type(error).__name__
