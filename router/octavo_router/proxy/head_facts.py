"""What the service makes of a head, once for each distinct one: a client mostly repeats its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from octavo_common.pages import CHAT_FILES
from octavo_engine.protocol.endpoints import CONTINUE_HEADER, EXPLAIN_HEADER, TIMEOUT_HEADER
from octavo_router.errors import Rejected, no_route
from octavo_router.http.cors import Cors, is_preflight
from octavo_router.http.fields import TRUSTED
from octavo_router.http.request_head import IDEMPOTENCY_KEY
from octavo_router.proxy.paths import PROXIED, ProxiedPath, is_one_engines, kept_path

if TYPE_CHECKING:
    from octavo_router.config.settings import RouterConfig
    from octavo_router.http.messages import Handler
    from octavo_router.http.request_head import RequestHead

_CONTINUE: Final = CONTINUE_HEADER.encode()
_EXPLAIN: Final = EXPLAIN_HEADER.encode()
_TIMEOUT: Final = TIMEOUT_HEADER.encode()
_MAX_KEY_BYTES: Final = 255
_ONE_ENGINES: Final = (
    "Files and batches are kept by one engine, and the router cannot tell which: ask an engine "
    "that was started with --files-dir itself, or answer the file with octavo run-batch."
)

# Probes and scrapers send no key. What these tell holds no prompt, no answer and no key.
PUBLIC: Final = frozenset(
    (
        "/", "/health", "/healthz", "/livez", "/ready", "/readyz", "/metrics", "/version",
        "/octavo/v1/state", "/console/console.css", "/console/console.js", "/console/draw.js",
        *(f"/console/{name}" for name in CHAT_FILES),
    )
)  # fmt: skip


ADMIN: Final = "/debug/"  # flow.admin asks there, for other keys


@dataclass(slots=True)
class HeadFacts:
    """Of a request that may go on: to an engine, or to a handler."""

    reader: FactReader  # who has newer settings reads the head again
    path: ProxiedPath | None = None
    handler: Handler | None = None
    needs_key: bool = True
    route: str = "other"  # from a closed set: a label
    tenant_hint: str = ""
    session: str = ""
    explain: bool = False
    traceparent: str = ""
    kept_id: str = ""  # of the answer that a path is about
    timeout_s: float = 0.0  # that the client gives the whole request; 0: any
    idempotency_key: str = ""
    continues: int | None = None  # bytes of a stream before the request: proxy.continuation
    trusted_lines: bytes = b""  # for an engine, each with its CRLF, if the key is trusted


class FactReader:
    """Knows the routes and the configured headers."""

    def __init__(self, config: RouterConfig, routes: dict[tuple[str, str], Handler]) -> None:
        self._routes = routes
        self._tenant_header = config.flow.fairness_header.lower().encode()
        self._session_headers = [name.lower().encode() for name in config.routing.session_headers]
        self._session_cookie = config.routing.session_cookie.encode()
        self._cors = Cors(config.server) if config.server.allowed_origins else None
        self._keeps_answers = config.flow.idempotency_s > 0.0

    def read(self, head: RequestHead) -> HeadFacts:
        """Raises Rejected: no such route, a method or a body that it does not take."""
        if self._cors is not None and is_preflight(head.method, head.fields):
            handler = self._cors.preflight
            return HeadFacts(self, handler=handler, needs_key=False, route="preflight")
        path, kept_id = PROXIED.get(head.path), ""
        if path is None:
            path, kept_id = kept_path(head.path)
        if path is None:
            return self._own(head)
        if head.method not in path.methods:
            methods = " and ".join(path.methods)
            raise Rejected(405, "method_not_allowed", f"{head.path} takes {methods} only.")
        facts = HeadFacts(self, path=path, route=path.path, kept_id=kept_id)
        sessions: dict[bytes, bytes] = {}
        for name, value in head.fields:
            if name == b"content-type":
                if path.is_json and value[:16].lower() != b"application/json":
                    raise Rejected(
                        415, "unsupported_media_type", "The content-type must be application/json."
                    )
            elif name == self._tenant_header:
                facts.tenant_hint = value.decode("latin-1")
            elif name == _EXPLAIN:
                facts.explain = value not in (b"", b"0", b"false")
            elif name == _TIMEOUT:
                facts.timeout_s = _seconds(value)
            elif name == _CONTINUE:
                facts.continues = _length(value)
            elif name == IDEMPOTENCY_KEY and path.is_json and self._keeps_answers:
                facts.idempotency_key = _key(value)
            elif name in TRUSTED:
                facts.trusted_lines += b"%b: %b\r\n" % (name, value)
            elif name == b"traceparent":
                facts.traceparent = value[:128].decode("latin-1")
            elif name == b"cookie" and self._session_cookie:
                sessions.setdefault(b"cookie", _cookie(value, self._session_cookie))
            elif name in self._session_headers:
                sessions.setdefault(name, value)
        for name in (*self._session_headers, b"cookie"):
            if session := sessions.get(name):
                facts.session = session[:256].decode("latin-1")
                break
        return facts

    def _own(self, head: RequestHead) -> HeadFacts:
        if is_one_engines(head.path):
            raise Rejected(501, "not_implemented", _ONE_ENGINES)
        handler, route = own_route(self._routes, head)
        is_public = head.path in PUBLIC or head.path.startswith(ADMIN)
        return HeadFacts(self, handler=handler, route=route, needs_key=not is_public)


Routes = dict[tuple[str, str], "Handler"]


def own_route(routes: Routes, head: RequestHead) -> tuple[Handler, str]:
    """The handler, and the route that a label may name. Raises Rejected."""
    method = "GET" if head.method == "HEAD" else head.method
    handler, route = _find(routes, method, head.path)
    if handler is not None:
        return handler, route
    if any(_find(routes, other, head.path)[0] for other in ("GET", "POST")):
        raise Rejected(405, "method_not_allowed", f"{head.path} does not take {head.method}.")
    raise no_route(head.method, head.path)


def _find(routes: Routes, method: str, path: str) -> tuple[Handler | None, str]:
    """By the whole path, else by the longest registered one that ends in `/*`."""
    handler = routes.get((method, path))
    if handler is not None:
        return handler, path
    at = path.rfind("/")
    while at >= 0:
        route = path[:at] + "/*"
        handler = routes.get((method, route))
        if handler is not None:
            return handler, route
        at = path.rfind("/", 0, at)
    return None, ""


def _seconds(value: bytes) -> float:
    """Raises Rejected, with the words of the engine, which reads the same header."""
    if not (value.isdigit() and len(value) <= 12 and int(value) > 0):
        raise Rejected(
            400,
            "invalid_header",
            f"{TIMEOUT_HEADER} must be a whole number of milliseconds above 0",
            param=TIMEOUT_HEADER,
        )
    return int(value) / 1000.0


def _length(value: bytes) -> int:
    """Raises Rejected."""
    if not (value.isdigit() and len(value) <= 12):
        raise Rejected(
            400,
            "invalid_header",
            f"{CONTINUE_HEADER} must be a whole number of bytes",
            param=CONTINUE_HEADER,
        )
    return int(value)


def _key(value: bytes) -> str:
    """Raises Rejected."""
    if not 0 < len(value) <= _MAX_KEY_BYTES or not value.isascii():
        raise Rejected(
            400,
            "invalid_header",
            f"idempotency-key must be 1 to {_MAX_KEY_BYTES} characters of ASCII",
            param="idempotency-key",
        )
    return value.decode()


def _cookie(value: bytes, wanted: bytes) -> bytes:
    for pair in value.split(b";"):
        name, _, content = pair.strip().partition(b"=")
        if name == wanted:
            return content
    return b""
