"""What the gateway says about endpoints: which may be chosen, which one served, what went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from octavo_router.epp.messages import read_metadata
from octavo_router.epp.structs import read_entry, read_struct
from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.epp.messages import Pair

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
NAMESPACE: Final = "envoy.lb"
SERVED: Final = "x-gateway-destination-endpoint-served"


def read_subset(metadata: bytes) -> tuple[str, ...] | None:
    """The endpoints that may be chosen: host:port, or a host; None: any. Raises ProtobufError."""
    if not metadata:
        return None
    hint = read_metadata(metadata, SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint:
        return None
    return tuple(_items(hint[SUBSET]))


def read_served(metadata: bytes, headers: Iterable[Pair]) -> str:
    """The endpoint that answered; "" if the gateway does not say. Raises ProtobufError."""
    found = (read_metadata(metadata, NAMESPACE) or {}).get(SERVED) if metadata else None
    if isinstance(found, str) and found:
        return found.strip()
    name = SERVED.encode()
    for key, value in headers:
        if key == name:
            return value.decode("latin-1").strip()
    return ""


def read_failure(attributes: bytes) -> AttemptResult | None:
    """What kept the gateway from an answer, where it made one itself and gives its reasons.

    It does with `response_attributes: [response.code_details]`. None: the answer is an engine's, as
    far as is known. Raises ProtobufError.
    """
    if not attributes:
        return None
    details = read_struct(read_entry(attributes)[1]).get("response.code_details")
    if not isinstance(details, str) or details in ("", "via_upstream"):
        return None
    if "timeout" in details:
        return AttemptResult.TIMEOUT
    if "connection_failure" in details or "no_healthy" in details:
        return AttemptResult.CONNECT_FAILED
    # Whatever else has nothing to do with engines: a limit, a filter, a client.
    return AttemptResult.BROKEN if details.startswith("upstream") else AttemptResult.CLIENT_GONE


def within(subset: Sequence[str], endpoints: Iterable[Endpoint]) -> tuple[str, ...]:
    """Of these endpoints, those that the hint allows, as host:port."""
    allowed = frozenset(subset)
    return tuple(
        address.authority
        for address in (endpoint.spec.address for endpoint in endpoints)
        if address.authority in allowed or address.host in allowed
    )


def _items(value: Any) -> list[str]:
    """A list of text, or text with commas."""
    parts = value if isinstance(value, list) else [value]
    texts = [part for part in parts if isinstance(part, str)]
    return [item for text in texts for part in text.split(",") if (item := part.strip())]
