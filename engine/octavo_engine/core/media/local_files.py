"""Pictures that requests name by file: URLs, below one folder that the operator allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo_engine.core.media.budget import ByteBudget

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not hold us up


class LocalPictures:
    """Links and `..` are resolved before a path is compared with the folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).resolve()

    def read(self, url: str, param: str, budget: ByteBudget) -> bytes:
        """Raises InvalidRequest, in the same words for every path outside the folder."""
        path = self._path(url, param)
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError as error:
            raise InvalidRequest(
                f"{param}: the file cannot be read: {error.strerror}; name one that is there",
                param=param,
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidRequest(f"{param} is not a file; name one", param=param)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(budget.left + 1)
        finally:
            os.close(descriptor)
        budget.take(len(data), param)
        return data

    def _path(self, url: str, param: str) -> Path:
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict"))
            is_here = parts.netloc in ("", "localhost") and path.is_absolute()
            if not is_here or parts.query or parts.fragment:
                raise ValueError
            resolved = path.resolve()
            if resolved.is_symlink():  # a loop of links, as Python 3.13 has it
                raise ValueError
        except (ValueError, OSError, RuntimeError):  # and as older ones do
            raise InvalidRequest(
                f"{param} must look like file:///folder/picture.png", param=param
            ) from None
        if not resolved.is_relative_to(self._folder):
            raise InvalidRequest(
                f"{param}: this server reads files below one folder only, and this is not in it; "
                "send the file itself, as a data: URL",
                param=param,
            )
        return resolved
