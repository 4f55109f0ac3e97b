"""Reads a request's body in plain Python: the slow twin of csrc/router/scan.cpp."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from octavo_engine.protocol import route_keys
from octavo_router.residency.api import (
    CHAT,
    COMPLETION,
    MAX_BODY_BYTES,
    MAX_DEPTH,
    MAX_NUMBER_BYTES,
    MESSAGES,
    PRIVILEGED,
    PRIVILEGED_PREFIX,
    RESPONSES,
    ScanError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS: Final[dict[int, route_keys.Kind]] = {
    CHAT: "chat", COMPLETION: "completion", MESSAGES: "messages", RESPONSES: "responses",
}  # fmt: skip
_NEWER_MAX_TOKENS: Final = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}
_MAX_INT = 2**53  # beyond which JSON's readers disagree
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BLANK = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PyScan:
    """See residency.api.Scan."""

    model: str = ""
    model_start: int = 0
    model_end: int = 0
    stream: bool = False
    include_usage: bool = False
    max_tokens: int = 0
    num_answers: int = 1
    num_prompts: int = 0
    priority: int = 0
    user: str = ""
    cache_salt: str = ""
    session: str = ""
    prompt_bytes: int = 0
    num_prompt_ids: int = 0
    keys: bytes = b""
    is_privileged: bool = False


def scan(body: bytes, kind: int, adapters: dict[str, str] | None = None, /) -> PyScan:
    text, fields = _parse(body)
    model = _string(fields, "model")
    start, end = _model_place(text) if isinstance(fields.get("model"), str) else (0, 0)
    max_tokens = _int(fields, _NEWER_MAX_TOKENS.get(kind, "max_tokens"))
    if max_tokens is None:
        max_tokens = _int(fields, "max_tokens") or 0
    options = fields.get("stream_options")
    num_prompts, prompt_bytes, num_prompt_ids, keys = 0, 0, 0, b""
    if kind in _KINDS:
        adapter = (adapters or {}).get(model, "")
        reduced = route_keys.canonical(fields, kind=_KINDS[kind], adapter=adapter)
        if reduced is not None:
            keys = route_keys.pack_keys(route_keys.lookup_keys(reduced))
    if kind == COMPLETION:
        num_prompts, prompt_bytes, num_prompt_ids = _prompt_sizes(fields.get("prompt"))
    elif kind in _KINDS and reduced is not None:
        num_prompts, prompt_bytes = 1, len(reduced.data)
        for name, value in route_keys.root_fields(fields, _KINDS[kind]):
            if name in ("tools", "documents"):
                prompt_bytes += len(route_keys.pack_value(value))
    return PyScan(
        model=model,
        model_start=start,
        model_end=end,
        stream=fields.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=max(0, max_tokens),
        num_answers=max(1, _int(fields, "n") or 1),
        num_prompts=num_prompts,
        priority=_int(fields, "priority") or 0,
        user=_string(fields, "user"),
        cache_salt=_string(fields, "cache_salt"),
        session=_session(fields),
        prompt_bytes=prompt_bytes,
        num_prompt_ids=num_prompt_ids,
        keys=keys,
        is_privileged=any(
            name in PRIVILEGED or name.startswith(PRIVILEGED_PREFIX) for name in fields
        ),
    )


# ── fields ──


def _string(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _int(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int and -_MAX_INT < value < _MAX_INT else None


def _session(fields: dict[str, Any]) -> str:
    params = fields.get("session_params")
    nested = _string(params, "session_id") if isinstance(params, dict) else ""
    return _string(fields, "session_id") or nested or _string(fields, "prompt_cache_key")


def _prompt_sizes(prompt: Any) -> tuple[int, int, int]:
    """How many prompts, their bytes of text, their token ids."""
    if isinstance(prompt, str):
        return 1, len(prompt.encode()), 0
    if not isinstance(prompt, list) or not prompt:
        return 0, 0, 0
    if type(prompt[0]) is int:
        return 1, 0, len(prompt)
    num_bytes = sum(len(item.encode()) for item in prompt if isinstance(item, str))
    return len(prompt), num_bytes, sum(len(item) for item in prompt if isinstance(item, list))


def _model_place(text: str) -> tuple[int, int]:
    """Where the top level's `model` lies in the body, in bytes. The body is known to be an object
    that has one."""
    decode = json.JSONDecoder().raw_decode
    at = _skip_blank(text, text.index("{") + 1)
    while True:
        key, at = decode(text, at)
        start = _skip_blank(text, _skip_blank(text, at) + 1)
        _, end = decode(text, start)
        if key == "model":
            return len(text[:start].encode()), len(text[:end].encode())
        at = _skip_blank(text, _skip_blank(text, end) + 1)


def _skip_blank(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


# ── JSON ──


def _parse(body: bytes) -> tuple[str, dict[str, Any]]:
    if len(body) > MAX_BODY_BYTES:
        raise ScanError(f"the body is longer than {MAX_BODY_BYTES} bytes", 0)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        _fail("invalid UTF-8", error.start)
    if not body.strip(_BLANK):
        raise ScanError("the body is empty; send a JSON object", len(body))
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        _fail(error.msg, len(text[: error.pos].encode()))
    except RecursionError:
        _fail_depth()
    if not isinstance(value, dict):
        raise ScanError("the body must be a JSON object", len(body) - len(body.lstrip(_BLANK)))
    # Counting brackets is quick and settles it for nearly every body.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        _fail_depth()
    if place := _SURROGATE.search(body):
        for string in _strings(value):
            try:
                string.encode()
            except UnicodeEncodeError:
                _fail("half a surrogate pair in a string", place.start())
    return text, value


def _fail(problem: str, offset: int) -> NoReturn:
    message = f"the body is not valid JSON: {problem} (at byte {offset})"
    raise ScanError(message, offset) from None


def _fail_depth() -> NoReturn:
    raise ScanError(f"the body is nested deeper than {MAX_DEPTH} levels", 0) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ScanError(f"{key.encode(errors='replace').decode()} is given twice", 0)
            seen.add(key)
    return result


def _constant(name: str) -> NoReturn:
    raise ScanError(f"the body is not valid JSON: {name} is no number of JSON's", 0)


def _integer(digits: str) -> int:
    _check_length(digits)
    return int(digits)


def _float(digits: str) -> float:
    _check_length(digits)
    value = float(digits)
    if not math.isfinite(value):
        raise ScanError("the body holds a number that is too large", 0)
    return value


def _check_length(digits: str) -> None:
    if len(digits) > MAX_NUMBER_BYTES:
        raise ScanError(f"the body holds a number of more than {MAX_NUMBER_BYTES} digits", 0)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [child for item in level for child in _children(item) if _has_depth(child)]
    return depth


def _has_depth(value: Any) -> bool:
    return isinstance(value, dict | list)


def _children(value: Any) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
