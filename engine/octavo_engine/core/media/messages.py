"""Pictures and sounds among the messages of a caller in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo_engine.core.media.sources import MEDIA_PARTS, picture_url, read_data_url, sound_data
from octavo_engine.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.models.vision_config import MediaKind

OPENED_PART = "image_pil"  # holds a PIL image, as vLLM's


def take_pictures(
    messages: Sequence[Mapping[str, Any]], takes: MediaKind = "image"
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages with a mark in place of each picture or sound, and these in order: bytes of
    files, and whatever `image_pil` parts hold. `takes`: what the model does. Raises
    RequestError that names the part."""
    pictures: list[Any] = []
    marked = [
        _marked(f"messages[{index}]", message, pictures, takes)
        for index, message in enumerate(messages)
    ]
    return marked, pictures


def _marked(
    field: str, message: Mapping[str, Any], pictures: list[Any], takes: MediaKind
) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (*MEDIA_PARTS, OPENED_PART):
            parts.append(part)
            continue
        name = f"{field}.content[{number}].{kind}"
        medium = MEDIA_PARTS.get(kind, "image")
        if medium != takes:
            noun = "pictures" if medium == "image" else "sounds"
            raise RequestError(
                f"{name}: this model takes no {noun}", param=name, code="not_supported"
            )
        if kind == "input_audio":
            pictures.append(sound_data(name, part.get(kind)))
        elif kind in MEDIA_PARTS:
            pictures.append(read_data_url(picture_url(name, part.get(kind)), name, medium))
        elif part.get(kind) is None:
            raise InvalidRequest(f"{name} is required", param=name)
        else:
            pictures.append(part[kind])
        parts.append({"type": medium})
    return {**message, "content": parts}
