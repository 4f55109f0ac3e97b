"""The forms of errors: OpenAI's on most paths, Anthropic's on those of its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo_engine.server.http.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.errors import RequestError

MESSAGES_PATH = "/v1/messages"
_VERSION = b"anthropic-version"
# Where Anthropic has another word for what our own table says.
_ANTHROPIC_TYPES = {"server_error": "api_error", "not_implemented_error": "api_error"}
_ANTHROPIC_STATUSES = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class ErrorShape(Protocol):
    """One form. Statuses are the same in all."""

    @property
    def also_request_id(self) -> tuple[bytes, ...]:
        """Further headers that its clients look for the request's id in."""

    def body(self, error: RequestError, request_id: str) -> bytes: ...
    def last_words(self, error: RequestError) -> bytes:
        """The end of a stream that had begun."""


class OpenAiShape:
    also_request_id: tuple[bytes, ...] = ()

    def body(self, error: RequestError, request_id: str) -> bytes:
        return error_body(error)

    def last_words(self, error: RequestError) -> bytes:
        return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


class AnthropicShape:
    also_request_id: tuple[bytes, ...] = (b"request-id",)

    def body(self, error: RequestError, request_id: str) -> bytes:
        return msgspec.json.encode(_anthropic(error) | {"request_id": request_id})

    def last_words(self, error: RequestError) -> bytes:
        body = _anthropic(error)
        body["error"] = body["error"] | {"code": error.code}  # routers go by it
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


_OPENAI, _ANTHROPIC = OpenAiShape(), AnthropicShape()


def shape_of(scope: dict[str, object] | object) -> ErrorShape:
    """By the headers and the path of an ASGI scope: also where no route was found."""
    assert isinstance(scope, dict)
    if speaks_anthropic(scope):
        return _ANTHROPIC
    path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
    if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"):
        return _ANTHROPIC
    return _OPENAI


def speaks_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether the client says so itself, whatever the path."""
    headers = scope.get("headers")
    return isinstance(headers, list) and any(name == _VERSION for name, _ in headers)


def anthropic_type(error: RequestError) -> str:
    by_status = _ANTHROPIC_STATUSES.get(error.status)
    return by_status or _ANTHROPIC_TYPES.get(error.type, error.type)


def _anthropic(error: RequestError) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": anthropic_type(error), "message": error.message},
    }
