"""What a request says of its KV blocks after its end, under the names that clients send already.

`cache_control` is Anthropic's, with two fields of ours in it, `prompt_cache_retention` OpenAI's and
`session_id` SGLang's.
"""

from __future__ import annotations

import re
from typing import Any, Final

from octavo_engine.errors import InvalidRequest
from octavo_engine.state.retention import DEFAULT_PRIORITY, MAX_PRIORITY, KVRetention

DEFAULT_TTL_S: Final = 300.0
MAX_SESSION_CHARS: Final = 256
_TTL = re.compile(r"(\d{1,6})([smh])", re.ASCII)
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_OPENAI: Final = {"in_memory": None, "in-memory": None, "24h": 86400.0}


def read_retention(request: Any, owner: str) -> KVRetention | None:
    """Of a body with these fields. None if it says nothing. Raises InvalidRequest."""
    session = getattr(request, "session_id", None) or ""
    if len(session) > MAX_SESSION_CHARS:
        raise InvalidRequest(
            f"session_id must have at most {MAX_SESSION_CHARS} characters", param="session_id"
        )
    control = getattr(request, "cache_control", None)
    ttl_s, priority = (None, DEFAULT_PRIORITY) if control is None else _read_control(control)
    if (given := getattr(request, "prompt_cache_retention", None)) is not None:
        if not isinstance(given, str) or given not in _OPENAI:
            raise InvalidRequest(
                "prompt_cache_retention must be in_memory or 24h", param="prompt_cache_retention"
            )
        openai_s = _OPENAI[given]
        ttl_s = ttl_s if openai_s is None else max(ttl_s or 0.0, openai_s)
    if ttl_s is None:
        return None
    if ttl_s == 0.0 and not session:
        raise InvalidRequest(
            "cache_control.ttl of 0 ends what a session retains; set session_id too",
            param="session_id",
        )
    return KVRetention(ttl_s, priority, session, owner)


def ttl_of(control: Any, at: str = "cache_control") -> float:
    """Seconds. Raises InvalidRequest."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise InvalidRequest(
            f'{at} must be an object of type "ephemeral", such as '
            '{"type": "ephemeral", "ttl": "5m"}',
            param=at,
        )
    ttl = control.get("ttl")
    if ttl is None:
        return DEFAULT_TTL_S
    met = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if met is None:
        raise InvalidRequest(
            f"{at}.ttl must be a number of seconds, minutes or hours, such as 90s, 5m or 1h",
            param=f"{at}.ttl",
        )
    return int(met[1]) * _UNITS[met[2]]


def _read_control(control: Any) -> tuple[float, int]:
    """TTL and priority."""
    ttl_s = ttl_of(control)
    priority = control.get("priority", DEFAULT_PRIORITY)
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"cache_control.priority must be a whole number from 0 to {MAX_PRIORITY}",
            param="cache_control.priority",
        )
    return ttl_s, priority
