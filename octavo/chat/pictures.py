"""Picture files of a chat in the terminal, as the parts of a message that servers take."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from octavo_engine.errors import ConfigError

# How files of each type begin; a WebP file has its size between the two.
_BEGINNINGS = (
    ("image/png", b"\x89PNG\r\n\x1a\n", b""),
    ("image/jpeg", b"\xff\xd8\xff", b""),
    ("image/gif", b"GIF8", b""),
    ("image/bmp", b"BM", b""),
    ("image/webp", b"RIFF", b"WEBP"),
)


def picture_part(name: str) -> dict[str, Any]:
    """The file as an `image_url` part with a data: URL. Raises ConfigError."""
    file = Path(name).expanduser()
    if file.exists() and not file.is_file():
        raise ConfigError(f"{name} is not a file; name a picture")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    kind = media_type(data)
    if kind is None:
        raise ConfigError(f"{name} is not a picture; expected PNG, JPEG, WebP, GIF or BMP")
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def media_type(data: bytes) -> str | None:
    """Of a picture, by its first bytes, whatever the file's name ends in."""
    for kind, start, after_size in _BEGINNINGS:
        if data.startswith(start) and data[8:].startswith(after_size):
            return kind
    return None
