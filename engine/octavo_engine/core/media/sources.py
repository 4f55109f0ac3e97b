"""Where pictures come from: the parts of a message that hold one, and their data URLs."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from octavo_engine.errors import InvalidRequest, RequestError

PICTURE_PART = "image_url"
DETAILS = ("auto", "low", "high", "original")  # accepted; a model has one way to look
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[^,;]*)*),", re.ASCII)


def read_data_url(url: str, param: str) -> bytes:
    """The bytes of a base64 data URL of a picture. Raises RequestError that names `param`."""
    if not url.startswith("data:"):
        raise unfetched(url.partition(":")[0], param)
    met = _DATA.match(url[:200])
    if met is None or not met[2].endswith(";base64"):
        raise InvalidRequest(f"{param} must look like data:image/png;base64,...", param=param)
    if met[1] is not None and not met[1].startswith("image/"):
        raise InvalidRequest(f"{param} has the type {met[1][:50]}; it must be image/*", param=param)
    try:
        return base64.b64decode(url[met.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{param} is not valid base64", param=param) from None


def unfetched(scheme: str, param: str, flag: str = "") -> RequestError:
    """`flag`: with which an operator allows it."""
    allows = f", or start the server with {flag}" if flag else ""
    return RequestError(
        f"{param}: pictures are not fetched from {scheme[:20]!r} URLs; send the picture itself, as "
        f"data:image/png;base64,...{allows}",
        param=param,
        code="not_supported",
    )


def picture_url(field: str, value: Any) -> str:
    """What the `image_url` of a part holds, as an object or as the URL alone. Raises
    InvalidRequest."""
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
