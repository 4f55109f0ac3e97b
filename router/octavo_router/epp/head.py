"""What the picker reads from a request's headers, and which of them must not reach an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from octavo_engine.protocol.endpoints import EXPLAIN_HEADER, REQUEST_ID_HEADER
from octavo_router.errors import no_route
from octavo_router.http.fields import ADMIN_KEY_HEADER, is_internal
from octavo_router.proxy.paths import PROXIED, ProxiedPath

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_router.config.settings import RouterConfig
    from octavo_router.epp.messages import Pair

DESTINATION: Final = "x-gateway-destination-endpoint"
# What llm-d's sidecar beside an answering engine goes by: who computes the prompt.
PREFILLER: Final = b"x-prefiller-host-port"

_EXPLAIN: Final = EXPLAIN_HEADER.encode()
_ADMIN_KEY: Final = ADMIN_KEY_HEADER.encode()
_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
_MODEL: Final = b"x-gateway-model-name"
_SET_BY_GATEWAY: Final = (b"forwarded", b"x-real-ip")  # it is the hop that may say them
_MAX_TEXT: Final = 256


@dataclass(slots=True)
class PickerHead:
    """A request without its body."""

    method: str = ""
    path: str = ""  # without the query
    known_path: ProxiedPath | None = None
    is_json: bool = True  # as far as its content type says
    content_length: int | None = None
    authorization: str = ""
    tenant_hint: str = ""
    session: str = ""
    request_id: str = ""
    is_named_here: bool = False  # the gateway gave it no id
    model: str = ""  # named by a header, for requests whose body names none
    explain: bool = False
    admin_key: bytes = b""
    traceparent: str = ""
    unwanted: list[bytes] = field(default_factory=list)  # sent by a client, not trusted

    @property
    def route(self) -> str:
        """From a closed set: a label."""
        return self.known_path.path if self.known_path is not None else "other"

    @property
    def may_pass_through(self) -> bool:
        """Without a body that names a model."""
        return self.method in ("GET", "HEAD", "OPTIONS", "DELETE") or not self.is_json


class HeadReader:
    """Knows the configured headers."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._tenant_header = config.flow.fairness_header.lower().encode()
        self._session_headers = [name.lower().encode() for name in config.routing.session_headers]
        self._session_cookie = config.routing.session_cookie.encode()

    def read(self, pairs: Iterable[Pair]) -> PickerHead:
        """Raises Rejected for a path that only the router itself serves."""
        head = PickerHead()
        sessions: dict[bytes, bytes] = {}
        for name, value in pairs:
            if name == b":method":
                head.method = value.decode("latin-1")
            elif name == b":path":
                head.path = value.partition(b"?")[0].decode("latin-1")
            elif name == b"content-type":
                head.is_json = b"json" in value.lower()
            elif name == b"content-length":
                head.content_length = int(value) if value.isdigit() else None
            elif name in (b"authorization", b"x-api-key"):
                head.authorization = head.authorization or value.decode("latin-1")
            elif name == _REQUEST_ID:
                head.request_id = value[:128].decode("latin-1")
            elif name == b"traceparent":
                head.traceparent = value[:128].decode("latin-1")
            elif name == _MODEL:
                head.model = value[:_MAX_TEXT].decode("utf-8", "replace")
            elif name == _ADMIN_KEY:
                head.admin_key = value
            elif name == _EXPLAIN:
                head.explain = value not in (b"", b"0", b"false")
            elif name == b"cookie" and self._session_cookie:
                sessions.setdefault(name, _cookie(value, self._session_cookie))
            if name in self._session_headers:
                sessions.setdefault(name, value)
            if name == self._tenant_header:
                head.tenant_hint = value.decode("latin-1")
            if _is_unwanted(name):
                head.unwanted.append(name)
        for name in (*self._session_headers, b"cookie"):
            if session := sessions.get(name):
                head.session = session[:_MAX_TEXT].decode("latin-1")
                break
        head.known_path = PROXIED.get(head.path)
        if head.known_path is not None and not head.known_path.is_json:
            head.is_json = False
        if _is_private(head.path):
            raise no_route(head.method, head.path)
        return head


def _is_unwanted(name: bytes) -> bool:
    if name == PREFILLER:
        return True
    if not is_internal(name) or name in _SET_BY_GATEWAY or name.startswith(b"x-forwarded-"):
        return False
    # The picker writes this one itself, over whatever is there.
    return name not in (DESTINATION.encode(), _EXPLAIN)


def _cookie(header: bytes, wanted: bytes) -> bytes:
    pairs = (pair.strip().partition(b"=") for pair in header.split(b";"))
    return next((value for name, _, value in pairs if name == wanted), b"")


def _is_private(path: str) -> bool:
    """Between router and engine: how to drain it, what it holds. However it may be spelled."""
    parts: list[str] = []
    for part in unquote(unquote(path)).replace("\\", "/").split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return bool(parts) and parts[0].lower() == "octavo"
