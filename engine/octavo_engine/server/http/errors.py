"""Every error a client can see, as one table, and its form: OpenAI's error object with a code.

docs/errors.md is made from the table. Messages are written where an error is raised, never taken
from an unexpected exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from octavo_engine.errors import DISK_FULL, RequestError

OUR_FAULT = "The server failed to answer this request. The fault is the server's; see its log."
NO_SPACE = "The server's disk is full; its operator has to free some space."

INVALID, SERVER, TIMEOUT = "invalid_request_error", "server_error", "timeout_error"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One kind of error, as clients can distinguish it."""

    status: int
    code: str
    type: str
    when: str
    param: str = ""  # what `param` names; empty: it is null
    retry_after: str = ""  # what Retry-After says; empty: it is not there


CATALOGUE = (
    ErrorRow(400, "invalid_request", INVALID,
             "A field is missing, of the wrong type, out of range, or contradicts another one.",
             param="the field"),
    ErrorRow(400, "invalid_json", INVALID,
             "The body is not valid UTF-8 JSON, is nested too deeply, repeats a key, contains an "
             "invalid number or half of a surrogate pair, or has more values than "
             "--max-json-values or --max-json-objects allow.",
             param="the key, where one is to blame"),
    ErrorRow(400, "invalid_header", INVALID, "A header that Octavo reads has an invalid value.",
             param="the header"),
    ErrorRow(400, "invalid_http", INVALID, "The bytes on the connection are not an HTTP request."),
    ErrorRow(400, "context_length_exceeded", INVALID,
             "The prompt does not fit the model's context; the message has both numbers.",
             param="prompt, messages or input"),
    ErrorRow(400, "not_supported", INVALID,
             "A documented field that would change the answer is not supported by this server.",
             param="the field"),
    ErrorRow(400, "unknown_field", INVALID,
             "The body has a field that this endpoint does not know, and --strict-fields is set.",
             param="the first such field"),
    ErrorRow(400, "wrong_task", INVALID,
             "The model does not support this task, such as generation with an embedding model.",
             param="model"),
    ErrorRow(400, "aborted", INVALID,
             "The request was ended by /abort_requests before it had an answer."),
    ErrorRow(400, "previous_response_not_found", INVALID,
             "No response of that id is stored here for this API key.",
             param="previous_response_id"),
    ErrorRow(400, "media_not_held", INVALID,
             "No picture or sound is held here under that uuid; send it again.",
             param="the part of the message"),
    ErrorRow(400, "grammar_timeout", INVALID,
             "The schema, regex or grammar takes too long to compile; make it smaller.",
             param="the field"),
    ErrorRow(401, "invalid_api_key", "authentication_error", "The API key is missing or wrong."),
    ErrorRow(403, "client_certificate_required", "permission_error",
             "The client showed no certificate, or one for none of the names in "
             "--ssl-client-names; only with --ssl-ca-certs."),
    ErrorRow(403, "admin_key_required", "permission_error",
             "The API key is right, but this route changes the server and needs an admin key."),
    ErrorRow(403, "page_refused", "permission_error",
             "The administrators' listener accepts no requests from pages in browsers."),
    ErrorRow(403, "adapters_fixed", "permission_error",
             "Adapters are loaded and unloaded only on a server with "
             "--allow-runtime-lora-updating."),
    ErrorRow(404, "adapter_not_found", "not_found_error",
             "There is no LoRA adapter of that name, or none at that path.",
             param="lora_name or lora_path"),
    ErrorRow(404, "model_not_found", "not_found_error", "No model of that name is served here.",
             param="model"),
    ErrorRow(404, "response_not_found", "not_found_error",
             "No response of that id is stored here for this API key: it was not kept, or no "
             "longer is, or is another server's.", param="response_id"),
    ErrorRow(404, "file_not_found", "not_found_error",
             "No file of that id is here for this API key: it was deleted, or is another server's.",
             param="file_id"),
    ErrorRow(404, "batch_not_found", "not_found_error",
             "No batch of that id is here for this API key, or it is another server's.",
             param="batch_id"),
    ErrorRow(404, "route_not_found", "not_found_error", "The path does not exist."),
    ErrorRow(405, "method_not_allowed", INVALID,
             "The path exists, the method does not; Allow lists those that do."),
    ErrorRow(408, "body_timeout", TIMEOUT, "The body did not arrive within --body-timeout."),
    ErrorRow(413, "body_too_large", INVALID,
             "The body is larger than --max-body-bytes, or the file than --max-file-bytes."),
    ErrorRow(413, "file_storage_full", INVALID,
             "With this file there would be more than --max-stored-file-bytes; delete some."),
    ErrorRow(414, "url_too_long", INVALID, "The URL is longer than --max-url-bytes."),
    ErrorRow(415, "unsupported_media_type", INVALID,
             "The body is compressed, or of another type than the route takes."),
    ErrorRow(421, "wrong_pod", INVALID,
             "The request is for another pod, which had this address before."),
    ErrorRow(431, "headers_too_large", INVALID,
             "There are more headers than --max-headers or --max-header-bytes allow."),
    ErrorRow(500, "internal_error", SERVER,
             "An internal server error; the server's log has the details."),
    ErrorRow(500, "model_error", SERVER,
             "The model computed NaN or infinity for this request; others are not affected."),
    ErrorRow(501, "not_implemented", "not_implemented_error",
             "The path is part of a supported API but is not implemented yet."),
    ErrorRow(503, "queue_full", "overloaded_error",
             "As many requests wait as --max-queue allows, or run as --max-concurrent-requests, or "
             "so many wait that this one would come too late for its deadline, --queue-timeout or "
             "clients as they were seen to leave.",
             retry_after="the time to work off what is too much, as measured; 1 to 60 s"),
    ErrorRow(503, "grammar_queue_full", "overloaded_error",
             "Too many grammars wait to be compiled, or the processes that try them out are ended "
             "from outside; requests without one are served.",
             retry_after="5 s"),
    ErrorRow(503, "loading", SERVER, "The model is loading.", retry_after="1 s"),
    ErrorRow(503, "draining", SERVER, "The server is shutting down and takes no new work.",
             retry_after="1 s"),
    ErrorRow(503, "sleeping", SERVER, "The server is sleeping; POST /wake_up to wake it.",
             retry_after="5 s"),
    ErrorRow(503, "server_shutdown", SERVER,
             "The server ended before this request was done.", retry_after="1 s"),
    ErrorRow(503, "engine_stalled", SERVER, "The engine is not making progress.",
             retry_after="5 s"),
    ErrorRow(503, "engine_dead", SERVER, "The engine is down and is being restarted.",
             retry_after="1 s or 5 s"),
    ErrorRow(504, "deadline_exceeded", TIMEOUT,
             "The request was not done within --request-timeout or x-octavo-timeout-ms."),
    ErrorRow(505, "http_version", INVALID,
             "The request line ends with another version than HTTP/1.1 or HTTP/1.0."),
    ErrorRow(507, "disk_full", SERVER,
             "The server's disk is full: the file, or the batch, could not be stored."),
)  # fmt: skip

ROWS = {row.code: row for row in CATALOGUE}
_ROUTING = {404: "route_not_found", 405: "method_not_allowed"}


class HttpError(RequestError):
    """A request refused for its form or by the state of the server, before any model sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)
        self.status = status
        self.type = ROWS[code].type
        self.headers = headers


def not_supported(field: str, hint: str = "", *, param: str | None = None) -> RequestError:
    """A documented field that would change the answer and that we cannot honour yet.

    `param` names it where `field` says more.
    """
    text = f"{field} is not supported yet" + (f"; {hint}" if hint else "")
    return RequestError(text, param=param or field, code="not_supported")


def rename(error: RequestError, param: str) -> None:
    """Another name for the field to blame, also where the message begins with it."""
    before = error.param
    if before is not None and error.message.startswith(before):
        error.message = param + error.message[len(before) :]
    error.param = param


def unavailable(code: str, message: str, *, retry_after_s: int) -> HttpError:
    return HttpError(503, message, code=code, retry_after_s=retry_after_s)


def internal_error() -> HttpError:
    """For every unexpected exception: the client learns nothing of its text."""
    return HttpError(500, OUR_FAULT, code="internal_error")


def machine_error(error: Exception) -> HttpError:
    """What a client learns of a fault of the server's machine: of paths nothing."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return HttpError(507, NO_SPACE, code="disk_full")
    return internal_error()


def from_routing(status: int, method: str, path: str) -> HttpError:
    """What the table of paths itself refuses, in the words that routers have for it too."""
    match status:
        case 404:
            message = f"Invalid URL ({method} {path[:200]})"
        case 405:
            message = f"{path[:200]} does not take {method}."
        case _:
            message = HTTPStatus(status).phrase + "."
    return HttpError(status, message, code=_ROUTING.get(status, "invalid_request"))


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
