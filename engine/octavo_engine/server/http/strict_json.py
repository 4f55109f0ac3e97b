"""JSON from strangers: Unicode, finite numbers, no key twice, bounded depth, then a typed Struct.

The standard decoder is used where it has hooks (duplicate keys, NaN); msgspec checks types and
says where they are wrong.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from octavo_engine.errors import RequestError

T = TypeVar("T")

_PLAIN = msgspec.json.Decoder(dict[str, Any])

_PLACE = re.compile(r" - at `(key in )?\$\.?(.*)`$")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(body: bytes, type_: type[T], *, max_depth: int) -> T:
    """The body as `type_`. Raises RequestError (400) that names the field to blame."""
    return convert(parse(body, max_depth=max_depth), type_)


def parse(body: bytes, *, max_depth: int) -> Any:
    """The body as dicts and lists. Raises RequestError (400)."""
    value = _quickly(body, max_depth)
    return _strictly(body, max_depth) if value is None else value


def _quickly(body: bytes, max_depth: int) -> dict[str, Any] | None:
    """A body of one plain object, in a third of the time: a million token ids are such a body.
    None where anything is to be said against it, or more is to be known."""
    if body.count(b"{") != 1 or body.count(b"[") >= max_depth:
        return None
    try:
        value = _PLAIN.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Each key has a colon behind it: no more of them than keys, no key twice.
    return value if body.count(b":") == len(value) else None


def _strictly(body: bytes, max_depth: int) -> Any:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not valid UTF-8 (at byte {error.start})") from None
    if not text.strip(" \t\r\n"):
        raise _bad("the body is empty; send a JSON object")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not valid JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise _bad(f"the body is nested deeper than {max_depth} levels") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise _bad(f"the body holds a number that is too long ({len(str(error))})") from None
    # Counting brackets is quick and settles it for nearly every body.
    if body.count(b"[") + body.count(b"{") > max_depth and _is_deeper(value, max_depth):
        raise _bad(f"the body is nested deeper than {max_depth} levels")
    # UTF-8 cannot spell a lone surrogate and JSON's escapes can: no later step could encode it.
    if _SURROGATE_ESCAPE.search(body) is not None:
        _check_unicode(value)
    return value


def convert(value: Any, type_: type[T]) -> T:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error))
        raise RequestError(message, param=param) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = _encodable(key)
                raise RequestError(f"{name} is given twice", param=name, code="invalid_json")
            seen.add(key)
    for key, value in pairs:
        if value.__class__ is float and not math.isfinite(value):  # NaN, Infinity, 1e999
            name = _encodable(key)
            raise RequestError(f"{name} must be a finite number", param=name, code="invalid_json")
    return result


def _encodable(key: str) -> str:
    """The key as an error may name it: half of a surrogate pair as its escape."""
    return key.encode("utf-8", "backslashreplace").decode()


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _check_unicode(value: Any) -> None:
    """Raises RequestError for a text with half of a surrogate pair. The depth is bounded."""
    pending: list[tuple[Any, str]] = [(value, "")]
    while pending:
        item, place = pending.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                raise _half_a_pair(f"{place or 'the body'} has", place or None)
        elif isinstance(item, dict):
            for key, child in item.items():
                if _SURROGATE.search(key):
                    raise _half_a_pair(f"a key of {place or 'the body'} has", place or None)
                pending.append((child, f"{place}.{key}" if place else key))
        elif isinstance(item, list):
            pending += [(child, f"{place}[{index}]") for index, child in enumerate(item)]


def _half_a_pair(subject: str, param: str | None) -> RequestError:
    return RequestError(
        f"{subject} half of a surrogate pair (such as \\ud83d alone), which is not a character; "
        "send both halves or neither",
        param=param,
        code="invalid_json",
    )


def _is_deeper(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth + 1):
        inner: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            inner += [child for child in children if isinstance(child, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _explain(message: str) -> tuple[str, str | None]:
    """msgspec's message as a sentence that begins with the field, and that field."""
    match = _PLACE.search(message)
    param = (match.group(2) or None) if match else None
    text = message[: match.start()] if match else message
    text = text.replace("`", "").replace("Expected", "expected").replace("Object", "the object")
    if missing := re.match(r"the object missing required field (\w+)$", text):
        field = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return f"{field} is required", field
    return (f"{param}: {text}" if param else f"the body: {text}"), param


def _bad(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")
