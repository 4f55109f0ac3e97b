"""Whatever a client can be refused for, in the shape of errors that the clients of its path read.

RouterError
├── ConfigInvalid      the router's own configuration; never reaches a client
├── Unreachable        an engine or a source of endpoints did not answer as agreed
└── Refused            status, type, code, message, param, Retry-After, reason header
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final

from octavo_common.faults import join_faults

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_LOADED: Final = "adapter_not_loaded"  # a code
_MESSAGES: Final = "/v1/messages"
# Where Anthropic has another word: the engine's own table, see its error_shapes.
_ANTHROPIC_TYPES: Final = {"server_error": "api_error"}
_ANTHROPIC_STATUSES: Final = {
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class RouterError(Exception):
    """Base of all errors of the router."""


class ConfigInvalid(RouterError):
    """The configuration cannot be used; names each field and says what to write instead."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.faults: tuple[ConfigInvalid, ...] = (self,)

    @classmethod
    def of(cls, faults: Sequence[ConfigInvalid]) -> ConfigInvalid:
        """All of them as one; `field` and `problem` are the first's."""
        single = tuple(each for fault in faults for each in fault.faults)
        first = single[0]
        if len(single) == 1:
            return first
        whole = cls(first.field, first.problem)
        whole.faults = single
        whole.args = (join_faults([str(each) for each in single]),)
        return whole


class Unreachable(RouterError):
    """What the router asks on its own behalf failed: a stream, a poll, a watch. Says why."""

    def __init__(self, reason: str, *, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.is_refused = is_refused  # nobody listens there


class Rejected(RouterError):
    """A request that gets an error for an answer. Bodies come from here, never from str(error)."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type_: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type_ or _type_of(status)
        self.param = param
        self.retry_after_s = retry_after_s
        self.close = close  # the connection cannot be used any more
        self.path = ""  # where it is known of a head that cannot be taken
        self.answer_lines = b""  # the same

    def body(self, path: str = "", request_id: str = "") -> bytes:
        """As clients of this path read it: OpenAI's object or Anthropic's."""
        if is_anthropic(path):
            words = {"type": self._anthropic_type(), "message": self.message}
            whole = {"type": "error", "error": words, "request_id": request_id}
            return json.dumps(whole, ensure_ascii=False).encode()
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    def fields(self, path: str = "", request_id: str = "") -> list[tuple[str, str]]:
        """The header fields that go with the body: what clients look for outside of it."""
        fields = [("x-error-code", self.code)]
        if self.retry_after_s is not None:
            fields.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
        if is_anthropic(path) and request_id:
            fields.append(("request-id", request_id))
        if self.status == 401:
            fields.append(("www-authenticate", "Bearer"))
        return fields

    def _anthropic_type(self) -> str:
        return _ANTHROPIC_STATUSES.get(self.status) or _ANTHROPIC_TYPES.get(self.type, self.type)


def no_route(method: str, path: str) -> Rejected:
    """As engines say it, and nearly as OpenAI does."""
    return Rejected(404, "route_not_found", f"Invalid URL ({method} {path[:200]})")


def is_anthropic(path: str) -> bool:
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def _type_of(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404:
            return "not_found_error"
        case 408 | 504:
            return "timeout_error"
        case 429:
            return "rate_limit_error"
        case _ if status < 500:
            return "invalid_request_error"
        case 501:
            return "not_implemented_error"
        case 503:
            return "overloaded_error"
        case _:
            return "server_error"
