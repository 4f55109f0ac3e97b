"""A file as read-only bytes: mapped, so that a tensor costs memory only when it is touched."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def map_file(path: Path) -> NDArray[np.uint8]:
    """The whole file as a read-only view; the mapping lives as long as any slice of it."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelError(f"{path} is empty: was the download cut off?") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return np.frombuffer(mapped, dtype=np.uint8)
