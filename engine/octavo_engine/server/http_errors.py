"""The closed catalogue of what an error looks like to a client: the OpenAI object, everywhere.

400 invalid_request_error  invalid_request, invalid_json, not_supported, invalid_http,
                           context_length_exceeded
401 authentication_error   invalid_api_key
404 not_found_error        model_not_found, route_not_found
405 invalid_request_error  method_not_allowed
408 timeout_error          body_timeout
413 invalid_request_error  body_too_large
415 invalid_request_error  unsupported_media_type
421 invalid_request_error  wrong_pod (its address belonged to another pod before)
431 invalid_request_error  headers_too_large
500 server_error           model_error (NaN in logits), internal_error (our own faults)
503 overloaded_error       queue_full
503 server_error           loading, draining, engine_stalled, engine_dead, server_shutdown
                           (the drain's deadline passed; inside a stream a router goes on elsewhere)
504 timeout_error          deadline_exceeded

Status, type, codes. All of 503 carry Retry-After.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from octavo_engine.errors import RequestError

OUR_FAULT = "The server failed to answer this request. The fault is the server's; see its log."

_ROUTING = {404: ("not_found_error", "route_not_found"), 405: (None, "method_not_allowed")}


class HttpError(RequestError):
    """A request refused for its form or by the state of the server, before any model sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)
        self.status = status
        self.type = type
        self.headers = headers


def not_supported(field: str, hint: str = "") -> RequestError:
    """A documented field that would change the answer and that we cannot honour yet."""
    text = f"{field} is not supported yet" + (f"; {hint}" if hint else "")
    return RequestError(text, param=field, code="not_supported")


def unavailable(code: str, message: str, *, retry_after_s: int) -> HttpError:
    return HttpError(503, message, code=code, type="server_error", retry_after_s=retry_after_s)


def internal_error() -> HttpError:
    """For every exception that nobody meant: the client learns nothing of its text."""
    return HttpError(500, OUR_FAULT, code="internal_error", type="server_error")


def from_routing(status: int) -> HttpError:
    """What the router of paths itself refuses."""
    type_, code = _ROUTING.get(status, (None, "invalid_request"))
    phrase = HTTPStatus(status).phrase
    message = "This path does not exist here." if status == 404 else f"{phrase}."
    return HttpError(status, message, code=code, type=type_ or "invalid_request_error")


def error_body(error: RequestError) -> bytes:
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Retry-After wherever waiting helps, and what the error itself brings."""
    headers = list(getattr(error, "headers", ()))
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status == 503:
        retry_after_s = 1
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    return headers
