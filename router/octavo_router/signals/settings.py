"""How engines are listened to: deadlines, pauses, and what the router shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.protocol.stream import SILENCE_S
from octavo_router.http.fetch import FetchTarget
from octavo_router.http.tls import ClientTls

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import EndpointSpec


@dataclass(frozen=True, slots=True)
class SignalSettings:
    """Times in seconds."""

    api_key: str = ""  # sent to engines as a bearer token; empty: none
    tls: ClientTls = field(default_factory=ClientTls)  # for https endpoints
    connect_s: float = 1.0
    answer_s: float = 5.0
    silence_s: float = SILENCE_S
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    poll_s: float = 1.0  # between polls of a plain server
    idle_polls: int = 10  # pauses between polls of one that has nothing to do
    models_s: float = 10.0  # between looks at what a plain server serves
    num_failed_polls: int = 3  # after which a plain server is down

    def headers(self, spec: EndpointSpec) -> dict[str, str]:
        key = spec.key or ("" if spec.is_foreign else self.api_key)
        return {"authorization": f"Bearer {key}"} if key else {}

    def target(self, spec: EndpointSpec) -> FetchTarget:
        address = spec.address
        if not address.tls:
            return FetchTarget(address.host, address.port)
        return FetchTarget(address.host, address.port, self.tls.context, address.tls_name)


def backoff_s(num_failures: int, settings: SignalSettings, chance: float) -> float:
    """Doubling, with half of it left to chance, so that routers do not come back in step."""
    full = min(settings.backoff_max_s, settings.backoff_min_s * 2.0 ** min(num_failures, 16))
    return full * (0.5 + 0.5 * chance)
