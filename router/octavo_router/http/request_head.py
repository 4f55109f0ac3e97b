"""Parsing the head of a request, strictly: what two parsers could read differently is refused.

Everything that proxies were ever talked into is refused with 400 and the connection closed, because
after it the two sides may disagree where the next request begins.

A head is parsed line by line, and lines repeat from request to request: the common ones are known
by their bytes, and cost one look-up.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from octavo_router.errors import Rejected
from octavo_router.http.fields import ADMIN_KEY_HEADER, CONTROLS, TOKEN, is_internal, list_items

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_router.config.settings import LimitsConfig

# what a header line is to us
FORWARD, DROP, SPECIAL = 0, 1, 2

_SPECIAL: Final = frozenset(
    (
        b"host", b"content-length", b"transfer-encoding", b"connection", b"expect",
        b"content-encoding", b"x-request-id", b"authorization", b"x-api-key",
    )
)  # fmt: skip
# Of this hop alone. An offer to speak another protocol is passed over, as HTTP allows.
_HOP_BY_HOP: Final = frozenset(
    (
        b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"upgrade", b"http2-settings",
        b"origin", b"access-control-request-method", b"access-control-request-headers",
    )
)  # fmt: skip
_SECRET: Final = frozenset(  # not kept
    (b"authorization", b"cookie", b"x-api-key", b"api-key", ADMIN_KEY_HEADER.encode())
)
_HOST_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.:-[]"
_ID_BYTES: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-"
IDEMPOTENCY_KEY: Final = b"idempotency-key"
_UNIQUE: Final = frozenset((b"traceparent", b"x-request-id", IDEMPOTENCY_KEY))
_MAX_KNOWN_LINES: Final = 1024
_MAX_KNOWN_BYTES: Final = 256  # of a line
_MAX_KNOWN_HEADS: Final = 1024  # a client's mostly differ in their length alone
_MAX_HEAD_BYTES: Final = 1024

Field = tuple[int, bytes, bytes]  # what it is to us, name in lower case, value


class RequestHead:
    """One parsed head. Never changed, so that a connection may use it again for the same bytes."""

    __slots__ = (
        "answer_lines", "authorization", "content_length", "credentials", "expects_continue",
        "facts", "fields", "forward", "host", "is_chunked", "is_http10", "keep_alive",
        "max_body_bytes", "method", "path", "query", "request_id", "target", "verb",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = ""
        self.verb = b""  # the method, as sent, and a blank
        self.target = b""  # as sent, without what is before the path
        self.host = ""  # whom it is for, with the port; of the target, where that says it
        self.path = ""
        self.query = ""
        self.is_http10 = False
        self.keep_alive = True
        self.fields: list[tuple[bytes, bytes]] = []  # names in lower case
        self.forward = b""  # the lines for an upstream, each with its CRLF
        self.authorization = b""  # its lines for an upstream, each with its CRLF
        self.credentials = ""  # as authorization or x-api-key says
        self.answer_lines = b""  # that every answer to it has, each with its CRLF
        self.content_length = 0
        self.max_body_bytes = 0
        self.is_chunked = False
        self.expects_continue = False
        self.request_id = ""  # the client's, where it is safe to repeat
        self.facts: Any = None  # whatever the service made of it

    def with_lines(self, lines: bytes) -> RequestHead:
        """The same, with more for an upstream: lines with their CRLF."""
        head = copy(self)
        head.forward += lines
        return head


class HeadParser:
    """Parses heads, and remembers those and the lines that it saw."""

    def __init__(self, limits: LimitsConfig, rules: HeadRules | None = None) -> None:
        self._limits = limits
        self._rules = rules or HeadRules()
        self._known: dict[bytes, Field] = {}
        self._heads: dict[bytes, RequestHead] = {}  # whole ones, without secrets

    def parse(self, data: bytes) -> RequestHead:
        """`data` is all before the empty line. Raises Rejected, always with close."""
        head = self._heads.get(data)
        if head is None:
            head = self._parse(data)
            if len(data) <= _MAX_HEAD_BYTES and _is_shared(head):
                if len(self._heads) >= _MAX_KNOWN_HEADS:
                    self._heads.clear()
                self._heads[data] = head
        return head

    def _parse(self, data: bytes) -> RequestHead:
        lines = data.split(b"\r\n")
        num_breaks = len(lines) - 1
        if data.count(b"\n") != num_breaks or data.count(b"\r") != num_breaks:
            raise _bad("a line does not end in CRLF")
        if len(data.translate(None, CONTROLS)) + 2 * num_breaks != len(data):
            raise _bad("the head has control characters")
        if num_breaks > self._limits.max_headers:
            limit = self._limits.max_headers
            raise _refused(431, "headers_too_large", f"there are more than {limit} header fields")
        head = RequestHead()
        self._request_line(head, lines[0])
        try:
            self._fields(head, lines)
        except Rejected as error:
            error.path = head.path  # whose clients want errors in words of their own
            error.answer_lines = head.answer_lines
            raise
        return head

    def _fields(self, head: RequestHead, lines: list[bytes]) -> None:
        known, forward, fields = self._known, [], head.fields
        special: list[tuple[bytes, bytes, bytes]] = []
        for line in lines[1:]:
            field = known.get(line) or self._field(line)
            kind, name, value = field
            fields.append((name, value))
            if kind == FORWARD:
                forward.append(line)
            elif kind == SPECIAL:
                special.append((name, value, line))
        rules = self._rules
        if rules.answer_lines is not None:
            head.answer_lines = rules.answer_lines(fields)
        _settle(head, special, forward)
        forward.append(b"")
        head.forward = b"\r\n".join(forward)
        if rules.allows_host is not None and not rules.allows_host(head.host):
            raise _refused(
                403, "host_not_allowed",
                "The Host is not one of this router's: name it in server.allowed_hosts.",
            )  # fmt: skip
        limits = self._limits
        is_upload = head.path in rules.uploads
        head.max_body_bytes = limits.max_upload_bytes if is_upload else limits.max_body_bytes
        if head.content_length > head.max_body_bytes:
            raise too_large(head.max_body_bytes)

    def _request_line(self, head: RequestHead, line: bytes) -> None:
        method, _, rest = line.partition(b" ")
        target, _, version = rest.rpartition(b" ")
        if version == b"HTTP/1.0":
            head.is_http10, head.keep_alive = True, False
        elif version != b"HTTP/1.1":
            if version.startswith(b"HTTP/") and len(version) == 8:
                raise _refused(505, "http_version", "only HTTP/1.1 and HTTP/1.0 are supported")
            raise _bad("the request line is malformed")
        if not method or method.translate(None, TOKEN):
            raise _bad("the method is malformed")
        if len(target) > self._limits.max_target_bytes:
            limit = self._limits.max_target_bytes
            raise _refused(414, "url_too_long", f"the path is longer than {limit} bytes")
        head.method = method.decode()
        head.verb = method + b" "
        if head.method in ("CONNECT", "TRACE"):
            raise _refused(405, "method_not_allowed", f"{head.method} is not allowed here")
        if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
            target = _path_of(head, target)
        if b" " in target or b"\t" in target or b"#" in target or not target.isascii():
            raise _bad("the target has characters that must be percent-encoded")
        head.target = target
        path, _, query = target.partition(b"?")
        head.path, head.query = path.decode(), query.decode()

    def _field(self, line: bytes) -> Field:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.translate(None, TOKEN):
            raise _bad("a header field is malformed")
        name = name.lower()
        if name in _SPECIAL:
            # The leading space may not vary for transfer-encoding: keep it as it came.
            kind, value = SPECIAL, value[1:] if value[:1] == b" " else value
            if name != b"transfer-encoding":
                value = value.strip(b" \t")
        else:
            value = value.strip(b" \t")
            kind = DROP if name in _HOP_BY_HOP or is_internal(name) else FORWARD
        field = (kind, name, value)
        if len(line) <= _MAX_KNOWN_BYTES and name not in _SECRET:
            if len(self._known) >= _MAX_KNOWN_LINES:
                self._known.clear()
            self._known[line] = field
        return field


class HeadRules(NamedTuple):
    """What a listener asks of heads beyond HTTP."""

    allows_host: Callable[[str], bool] | None = None
    answer_lines: Callable[[Sequence[tuple[bytes, bytes]]], bytes] | None = None
    uploads: frozenset[str] = frozenset()  # paths whose bodies are files, and may be larger


def _path_of(head: RequestHead, target: bytes) -> bytes:
    """Of a target with scheme and host, as clients send it that take us for their proxy.

    That host counts, and the Host field does not.
    """
    scheme, _, rest = target.partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        raise _bad("the target must be a path")
    end = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    authority, path = rest[:end], rest[end:]
    if not authority or authority.translate(None, _HOST_BYTES):
        raise _bad("the target's host is malformed")
    head.host = authority.decode()
    return path if path.startswith(b"/") else b"/" + path


def _is_shared(head: RequestHead) -> bool:
    """Others may send the very same, and it holds no secret."""
    return not any(name in _SECRET or name in _UNIQUE for name, _ in head.fields)


def _settle(
    head: RequestHead, special: list[tuple[bytes, bytes, bytes]], forward: list[bytes]
) -> None:
    """The fields that mean something to this hop. Each may come once."""
    seen: set[bytes] = set()
    for name, value, line in special:
        if name in seen and name != b"connection":
            raise _bad(f"there are two {name.decode()} fields")
        seen.add(name)
        if name == b"host":
            if value.translate(None, _HOST_BYTES):
                raise _bad("the host is malformed")
            head.host = head.host or value.decode()
        elif name == b"content-length":
            head.content_length = _length(value)
        elif name == b"connection":
            _connection(head, value, forward)
        elif name == b"authorization" or name == b"x-api-key":
            head.authorization += line + b"\r\n"
            head.credentials = head.credentials or value.decode("latin-1")
        elif name == b"x-request-id":
            if _is_safe_id(value):
                head.request_id = value.decode()
        elif name == b"transfer-encoding":
            if value != b"chunked":
                raise _bad("the transfer-encoding must be chunked")
            head.is_chunked = True
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise _refused(417, "expectation_failed", "only 100-continue can be expected")
            head.expects_continue = not head.is_http10
        elif value.lower() != b"identity":
            raise _refused(415, "unsupported_media_type", "compressed bodies are not accepted")
    if head.is_chunked and (b"content-length" in seen or head.is_http10):
        raise _bad("the body has two lengths")
    if b"host" not in seen and not head.is_http10:
        raise _bad("the host is missing")


def _is_safe_id(value: bytes) -> bool:
    """Some connectors of vLLM read addresses of engines out of ids: `___prefill_addr_HOST:PORT`."""
    return 0 < len(value) <= 128 and not value.translate(None, _ID_BYTES) and b"___" not in value


def _connection(head: RequestHead, value: bytes, forward: list[bytes]) -> None:
    for item in list_items(value):
        if item == b"close":
            head.keep_alive = False
        elif item == b"keep-alive":
            head.keep_alive = head.keep_alive or head.is_http10
        elif item in _SPECIAL:
            raise _bad(f"connection: {item.decode('latin-1')} is not supported here")
        else:  # names a field that is meant for this hop alone
            prefix = item + b":"
            forward[:] = [line for line in forward if not line.lower().startswith(prefix)]


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise _bad("the content-length is not a number")
    return int(value)


def too_large(limit: int) -> Rejected:
    return _refused(413, "body_too_large", f"the body is larger than {limit} bytes")


def _bad(problem: str) -> Rejected:
    return _refused(400, "invalid_http", f"The request is not valid HTTP: {problem}.")


def _refused(status: int, code: str, message: str) -> Rejected:
    return Rejected(status, code, message, close=True)
