"""How much a JSON body holds, counted in its bytes before any of it is built: two million empty
objects are a small body and seconds of work."""

from __future__ import annotations

from octavo_engine.errors import RequestError

_QUICK_BYTES = 1 << 16
_QUICK_OBJECTS = 1000
_STRUCTURE = b'"[{,'
_ALL_ELSE = bytes(byte for byte in range(256) if byte not in _STRUCTURE)


def check_size(body: bytes, *, max_objects: int, max_values: int) -> None:
    """Raises RequestError (400). Says nothing of a body that is no JSON."""
    # What stands in strings counts too, as long as that is little enough.
    if _num_objects(body) <= max_objects and body.count(b",") < max_values:
        return
    # A run of backslashes begins outside of any escape, so two of them are one.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_ELSE)
    # Each text is a value or a key; a container has one value more than it has commas.
    if marks.count(b'"') <= 4 * (max_values + max_objects):
        marks = b"".join(marks.split(b'"')[::2])
        if _num_objects(marks) > max_objects:
            raise _too_many(f"{max_objects} objects and lists", "--max-json-objects")
        if marks.count(b",") < max_values:
            return
    raise _too_many(f"{max_values} values", "--max-json-values")


def is_quick(body: bytes) -> bool:
    """Whether parsing takes a few milliseconds at most."""
    return len(body) <= _QUICK_BYTES and _num_objects(body) <= _QUICK_OBJECTS


def _num_objects(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _too_many(what: str, flag: str) -> RequestError:
    return RequestError(f"the body holds more than {what} ({flag})", code="invalid_json")
