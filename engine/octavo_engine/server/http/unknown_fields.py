"""Fields of a body that its endpoint does not know: named in a header, or refused."""

from __future__ import annotations

import logging
import re
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger("octavo.server")

_MOST_NAMED = 8
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # others are not repeated in a header

# Documented by OpenAI and Anthropic, for their own bookkeeping: no answer depends on them.
_NO_EFFECT = frozenset(
    (
        "cache_control", "inference_geo", "metadata", "prediction", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "user", "user_profile_id", "workspace_id",
    )
)  # fmt: skip


@cache
def accepted_fields(type_: Any) -> frozenset[str] | None:
    """Names as clients write them; None of a type that is no struct."""
    if not isinstance(type_, type) or not issubclass(type_, msgspec.Struct):
        return None
    return _NO_EFFECT.union(field.encode_name for field in msgspec.structs.fields(type_))


def unknown_fields(fields: Any, type_: Any) -> list[str]:
    """In the order in which they were sent."""
    accepted = accepted_fields(type_)
    if accepted is None or not isinstance(fields, dict) or fields.keys() <= accepted:
        return []
    return [name for name in fields if name not in accepted]


def describe(unknown: Iterable[str], type_: Any) -> str:
    """For a header: `max_token (did you mean max_tokens?), foo`."""
    plain = [name for name in unknown if _PLAIN_NAME.fullmatch(name)]
    known = sorted(accepted_fields(type_) or ())
    words = []
    for name in plain[:_MOST_NAMED]:
        near = get_close_matches(name, known, 1, 0.75)
        words.append(f"{name} (did you mean {near[0]}?)" if near else name)
    left = len(plain) - len(words)
    if left:
        words.append(f"and {left} more")
    return ", ".join(words) or "a field with an unusual name"


def note_unknown(fields: Any, type_: Any, *, is_strict: bool) -> str:
    """The header's value; "" where all fields are known. Raises InvalidRequest if `is_strict`."""
    unknown = unknown_fields(fields, type_)
    if not unknown:
        return ""
    text = describe(unknown, type_)
    if is_strict:
        raise InvalidRequest(
            f"the body has a field that is not supported: {text}",
            param=unknown[0] if _PLAIN_NAME.fullmatch(unknown[0]) else None,
            code="unknown_field",
        )
    logger.debug("Ignored unknown fields", extra={"fields": text})
    return text
