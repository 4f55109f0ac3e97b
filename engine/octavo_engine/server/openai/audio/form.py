"""The multipart form of a transcription, read within limits and checked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.multipart import FormReader, PartBegan, boundary_of
from octavo_engine.speech.decode import MAX_FILE_BYTES
from octavo_engine.speech.languages import language_code

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

MAX_PROMPT_CHARS = 16_384
_MAX_FIELD_BYTES = 65_536
_MAX_PARTS = 64
_FORM_ROOM = 1 << 18  # of a body, beside the file itself


class AudioForm(msgspec.Struct, kw_only=True):
    """Of a transcription or translation."""

    file: bytes
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: AudioFormat | None = None
    temperature: float | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None


class AudioFields(NamedTuple):
    """A form that was checked."""

    file: bytes
    model: str | None
    language: str | None  # a code
    prompt: str
    response_format: AudioFormat
    temperature: float | None  # None: 0, and higher ones where that goes wrong
    stream: bool
    granularities: frozenset[str] = frozenset()  # of verbose_json; none: segments


async def read_form(exchange: Exchange) -> AudioFields:
    """Raises RequestError: 400, 408, 413 or 415."""
    reader = FormReader(boundary_of(exchange.header(b"content-type")))
    return check_fields(await _received(exchange, reader))


async def _received(exchange: Exchange, reader: FormReader) -> dict[str, list[bytes]]:
    parts: dict[str, list[bytes]] = {}
    name, content, count = "", bytearray(), 0
    async for chunk in exchange.chunks(MAX_FILE_BYTES + _FORM_ROOM):
        for item in reader.feed(chunk):
            if isinstance(item, PartBegan):
                if count:
                    parts.setdefault(name, []).append(bytes(content))
                count += 1
                if count > _MAX_PARTS:
                    raise InvalidRequest(f"the form has more than {_MAX_PARTS} parts")
                name, content = item.name.removesuffix("[]"), bytearray()
                continue
            content += item
            limit = MAX_FILE_BYTES if name == "file" else _MAX_FIELD_BYTES
            if len(content) > limit:
                raise _too_large(name[:64], limit)
    if not reader.is_whole:
        raise InvalidRequest("the body ends before the form does")
    if count:
        parts.setdefault(name, []).append(bytes(content))
    return parts


def _too_large(name: str, limit: int) -> HttpError:
    return HttpError(413, f"{name} is larger than {limit} bytes", code="body_too_large")


def check_fields(parts: dict[str, list[bytes]]) -> AudioFields:
    """Raises InvalidRequest that names the field."""
    if "file" not in parts:
        raise InvalidRequest("file is missing: the form must have a part with audio", param="file")
    for name, values in parts.items():
        if name != "timestamp_granularities" and len(values) > 1:
            raise InvalidRequest(f"{name[:64]} is given {len(values)} times", param=name[:64])
    fields = {name: _text(name, values[-1]) for name, values in parts.items() if name != "file"}
    response_format = fields.get("response_format") or "json"
    if response_format not in get_args(AudioFormat):
        raise InvalidRequest(
            f"response_format must be one of {', '.join(get_args(AudioFormat))}; "
            f"got {response_format[:64]!r}",
            param="response_format",
        )
    stream = _boolean("stream", fields.get("stream") or "false")
    if stream and response_format not in ("json", "text"):
        raise InvalidRequest(
            f"stream requires response_format json or text; got {response_format}", param="stream"
        )
    granularities = _granularities(parts.get("timestamp_granularities", []), response_format)
    prompt = fields.get("prompt") or ""
    if len(prompt) > MAX_PROMPT_CHARS:
        raise InvalidRequest(
            f"prompt must have at most {MAX_PROMPT_CHARS} characters; got {len(prompt)}",
            param="prompt",
        )
    return AudioFields(
        parts["file"][0],
        fields.get("model"),
        _language(fields.get("language") or ""),
        prompt,
        response_format,  # type: ignore[arg-type]  # one of them, as was checked
        _temperature(fields.get("temperature") or ""),
        stream,
        granularities,
    )


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name[:64]} is not valid UTF-8", param=name[:64]) from None


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false; got {value[:64]!r}", param=name)
    return value.lower() in ("true", "1")


def _language(given: str) -> str | None:
    if not given:
        return None
    code = language_code(given)
    if code is None:
        raise InvalidRequest(
            f"language must be an ISO 639-1 code such as en; got {given[:64]!r}", param="language"
        )
    return code


def _temperature(given: str) -> float | None:
    if not given:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise InvalidRequest(
            f"temperature must be a number between 0 and 1; got {given[:64]!r}",
            param="temperature",
        )
    return value or None


def _granularities(values: list[bytes], response_format: str) -> frozenset[str]:
    name = "timestamp_granularities"
    for value in values:
        if value not in (b"segment", b"word"):
            raise InvalidRequest(f"{name} must be segment or word; got {value[:64]!r}", param=name)
    if values and response_format != "verbose_json":
        raise InvalidRequest(f"{name} requires response_format verbose_json", param=name)
    return frozenset(value.decode() for value in values)
