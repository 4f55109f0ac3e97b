"""Pictures among the messages of a caller in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo_engine.core.media.sources import PICTURE_PART, picture_url, read_data_url
from octavo_engine.errors import InvalidRequest
from octavo_engine.tokenization.messages import PICTURE

if TYPE_CHECKING:
    from collections.abc import Sequence

OPENED_PART = "image_pil"  # holds a PIL image, as vLLM's


def take_pictures(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages with a mark in place of each picture, and the pictures in order: bytes of files,
    and whatever `image_pil` parts hold. Raises RequestError that names the part."""
    pictures: list[Any] = []
    marked = [
        _marked(f"messages[{index}]", message, pictures) for index, message in enumerate(messages)
    ]
    return marked, pictures


def _marked(field: str, message: Mapping[str, Any], pictures: list[Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (PICTURE_PART, OPENED_PART):
            parts.append(part)
            continue
        name = f"{field}.content[{number}].{kind}"
        if kind == PICTURE_PART:
            pictures.append(read_data_url(picture_url(name, part.get(kind)), name))
        elif part.get(kind) is None:
            raise InvalidRequest(f"{name} is required", param=name)
        else:
            pictures.append(part[kind])
        parts.append(dict(PICTURE))
    return {**message, "content": parts}
