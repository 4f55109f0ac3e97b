"""The router's own routes: probes, metrics, models, version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import unquote

from octavo_router.errors import Rejected
from octavo_router.http.messages import Inbound, Reply

if TYPE_CHECKING:
    from octavo_router.flow.admin import AdminAccess
    from octavo_router.http.messages import Handler
    from octavo_router.metrics import RouterMetrics
    from octavo_router.routing.models import Card, Models

_MODELS = "/v1/models/"


def is_for_admins(path: str) -> bool:
    """Not on the usual listener, where administrators have one. The state has its own token."""
    return path == "/metrics" or path.startswith("/debug/")


class OwnRoutes:
    """Reads what it shows; changes nothing but `is_ready`."""

    def __init__(
        self, models: Models, metrics: RouterMetrics, admin: AdminAccess, *, started_at: float
    ) -> None:
        self._admin = admin
        self._models = models
        self._metrics = metrics
        self._created = int(started_at)
        self.not_ready = "starting"  # why new requests should not come here; "": they may
        self.is_full = False  # of memory: other replicas may have some

    def table(self) -> dict[tuple[str, str], Handler]:
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/metrics"): self.metrics,
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/models/*"): self.model,
            ("GET", "/version"): self.version,
        }
        for path in ("/health", "/healthz", "/livez"):
            routes["GET", path] = self.health
        for path in ("/ready", "/readyz"):
            routes["GET", path] = self.ready
        return routes

    def health(self, request: Inbound) -> Reply:
        """Whoever answers is alive: the loop turns."""
        return Reply.json({"status": "ok"})

    def ready(self, request: Inbound) -> Reply:
        if self.not_ready:
            return Reply.json({"status": self.not_ready}, status=503)
        if self.is_full:
            return Reply.json({"status": "out of memory"}, status=503)
        return Reply.json({"status": "ready"})

    def metrics(self, request: Inbound) -> Reply:
        self._admin.check_scrape(request)
        body, content_type = self._metrics.render(request.headers.get("accept") or "")
        return Reply(body=body, content_type=content_type)

    def models(self, request: Inbound) -> Reply:
        """In Anthropic's shape, all on one page, for clients that send anthropic-version."""
        cards = self._models.cards()
        data = [self._shown(card, request) for card in cards]
        if not _speaks_anthropic(request):
            return Reply.json({"object": "list", "data": data})
        first, last = (cards[0].name, cards[-1].name) if cards else (None, None)
        return Reply.json({"data": data, "has_more": False, "first_id": first, "last_id": last})

    def model(self, request: Inbound) -> Reply:
        name = unquote(request.path.removeprefix(_MODELS))
        for card in self._models.cards():
            if card.name == name:
                return Reply.json(self._shown(card, request))
        raise Rejected(
            404, "model_not_found", f"The model `{name[:200]}` does not exist.", param="model"
        )

    def version(self, request: Inbound) -> Reply:
        return Reply.json({"version": self._metrics.version})

    def _shown(self, card: Card, request: Inbound) -> dict[str, object]:
        if not _speaks_anthropic(request):
            return card.to_json(self._created)
        created = datetime.fromtimestamp(self._created, UTC)
        return card.to_anthropic(created.strftime("%Y-%m-%dT%H:%M:%SZ"))


def _speaks_anthropic(request: Inbound) -> bool:
    return bool(request.headers.get("anthropic-version"))
