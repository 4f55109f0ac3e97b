"""What distinguishes one model's weights from another's of the same shape, read from a small part
of them.

A fine-tuned model has its parent's names, shapes and sizes, so only its bytes differ. Hashing all
of them would take longer than loading; two sets of weights that differ do so nearly everywhere, so
pieces from all over the files are enough. The same files give the same answer on any machine.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf_parts import part_paths

if TYPE_CHECKING:
    from pathlib import Path

PIECES = 1024  # in all files together: a few tenths of a second where nothing is in memory yet
PIECE_BYTES = 4096
LEAST_PIECES = 16  # of each file
_WEIGHTS = (".safetensors", ".gguf")


def fingerprint(path: Path) -> str:
    """Of a file with the other parts of its model, or of the weights in a folder; names do not
    count. Raises ModelError."""
    files = part_paths(path) if path.is_file() else sorted(filter(_is_weights, path.iterdir()))
    digest = hashlib.blake2b(digest_size=16)
    try:
        sizes = [file.stat().st_size for file in files]
        for file, size in zip(files, sizes, strict=True):
            digest.update(size.to_bytes(8, "little"))
            _add(digest, file, size, max(LEAST_PIECES, PIECES * size // max(sum(sizes), 1)))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path, size: int, count: int) -> None:
    """Pieces at equal distances, the first and the last bytes among them."""
    last = max(size - PIECE_BYTES, 0)
    places = sorted({last * number // (count - 1) for number in range(count)})
    with path.open("rb", buffering=0) as file:
        for place in places:
            digest.update(os.pread(file.fileno(), PIECE_BYTES, place))


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS and path.is_file()
