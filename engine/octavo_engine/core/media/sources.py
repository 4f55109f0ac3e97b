"""Where pictures come from: the parts of a message that hold one, and their data URLs."""

from __future__ import annotations

import base64
import binascii
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.vision_config import MediaKind

PICTURE_PART = "image_url"
SOUND_PARTS = ("input_audio", "audio_url")
MEDIA_PARTS: Mapping[str, MediaKind] = MappingProxyType(
    {PICTURE_PART: "image", **dict.fromkeys(SOUND_PARTS, "audio")}
)
_NAMES = {"image": ("pictures", "picture", "image/png"), "audio": ("sounds", "sound", "audio/wav")}
DETAILS = ("auto", "low", "high", "original")  # accepted; a model has one way to look
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[^,;]*)*),", re.ASCII)


def read_data_url(url: str, param: str, kind: MediaKind = "image") -> bytes:
    """The bytes of a base64 data URL of a picture or a sound. Raises RequestError that names
    `param`."""
    if not url.startswith("data:"):
        raise unfetched(url.partition(":")[0], param, kind=kind)
    met = _DATA.match(url[:200])
    if met is None or not met[2].endswith(";base64"):
        raise InvalidRequest(
            f"{param} must look like data:{_NAMES[kind][2]};base64,...", param=param
        )
    if met[1] is not None and not met[1].startswith(f"{kind}/"):
        raise InvalidRequest(
            f"{param} has the type {met[1][:50]}; it must be {kind}/*", param=param
        )
    return read_base64(url[met.end() :], param)


def read_base64(text: str, param: str) -> bytes:
    """Raises InvalidRequest."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{param} is not valid base64", param=param) from None


def unfetched(
    scheme: str, param: str, flag: str = "", *, kind: MediaKind = "image"
) -> RequestError:
    """`flag`: with which an operator allows it."""
    nouns, noun, example = _NAMES[kind]
    allows = f", or start the server with {flag}" if flag else ""
    return RequestError(
        f"{param}: {nouns} are not fetched from {scheme[:20]!r} URLs; send the {noun} itself, as "
        f"data:{example};base64,...{allows}",
        param=param,
        code="not_supported",
    )


def picture_url(field: str, value: Any) -> str:
    """What the `image_url` or the `audio_url` of a part holds, as an object or as the URL
    alone. Raises InvalidRequest."""
    if isinstance(value, dict):
        detail = value.get("detail")
        if detail is not None and detail not in DETAILS:
            raise InvalidRequest(
                f"{field}.detail must be one of {', '.join(DETAILS)}", param=f"{field}.detail"
            )
        value = value.get("url")
        field = f"{field}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is required", param=field)
    return value


def sound_data(field: str, value: Any) -> bytes:
    """What the `input_audio` of a part holds. Its `format` is only a claim: the file says itself
    what it is. Raises InvalidRequest."""
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, str):
        raise InvalidRequest(f"{field}.data is required", param=f"{field}.data")
    if data.startswith("data:"):
        return read_data_url(data, f"{field}.data", "audio")
    return read_base64(data, f"{field}.data")
