"""The console put together: its stream, its files, and where they are found."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from octavo_router.console import pages
from octavo_router.console.deployments import Deployments
from octavo_router.console.live import Live, Sources
from octavo_router.discovery.build import make_account

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.registry import Registry
    from octavo_router.flow.admission import AdmissionGate
    from octavo_router.http.messages import Handler
    from octavo_router.metrics import RouterMetrics
    from octavo_router.residency.api import ResidencyIndex
    from octavo_router.routing.models import Models

STREAM_PATH = "/octavo/v1/console"


def make_console(
    config: RouterConfig,
    registry: Registry,
    models: Models,
    metrics: RouterMetrics,
    index: ResidencyIndex,
    gate: AdmissionGate,
    environment: Mapping[str, str],
) -> tuple[Live, dict[tuple[str, str], Handler]]:
    """Raises ConfigInvalid where Kubernetes is requested and cannot be reached."""
    kubernetes = config.discovery.kubernetes
    deployments: Deployments | None = None
    if kubernetes.enabled:
        account = make_account(kubernetes, environment)
        deployments = Deployments(account, kubernetes.namespaces)
    live = Live(
        Sources(
            registry=registry,
            models=models,
            metrics=metrics,
            index=index,
            demand=gate.demand,
            authenticate=gate.authenticate,
            asks_for_keys=lambda: gate.tenants.table.is_required,
            deployments=deployments,
            replica=config.server.replica or socket.gethostname(),
        )
    )
    return live, {**pages.routes(), ("GET", STREAM_PATH): live}
