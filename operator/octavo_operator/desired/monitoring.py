"""PodMonitor, or ServiceMonitor where there is no such kind: engines are scraped by Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, DEPLOYMENT_LABEL, REVISION_LABEL
from octavo_operator.desired import engine_access
from octavo_operator.desired.metadata import child
from octavo_operator.desired.probes import PORT_NAME
from octavo_operator.objects import labels, names
from octavo_operator.settings import POD_MONITOR, SERVICE_MONITOR

if TYPE_CHECKING:
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment

_API = "monitoring.coreos.com/v1"
_SCRAPE = {"port": PORT_NAME, "path": "/metrics"}


def monitors(deployment: LLMDeployment, settings: OperatorSettings) -> list[dict[str, Any]]:
    """One at most: two would count everything twice."""
    name = names.monitor(deployment.name)
    endpoints = [{**_SCRAPE, **engine_access.scrape(deployment, settings)}]
    extra = settings.monitor_labels
    # Workers of groups have no metrics of their own.
    scraped = labels.pods if deployment.group is None else labels.engines
    selector = {"matchLabels": scraped(deployment.name)}
    targets = [DEPLOYMENT_LABEL, REVISION_LABEL]
    if deployment.prefill is not None:
        targets.append(COMPONENT_LABEL)
    if POD_MONITOR in settings.capabilities:
        head = child(deployment, _API, "PodMonitor", name, extra_labels=extra)
        spec: dict[str, Any] = {
            "selector": selector,
            "podTargetLabels": targets,
            "podMetricsEndpoints": endpoints,
        }
        return [{**head, "spec": spec}]
    if SERVICE_MONITOR in settings.capabilities:
        head = child(deployment, _API, "ServiceMonitor", name, extra_labels=extra)
        spec = {
            "selector": {"matchLabels": {**labels.engines(deployment.name), **labels.HEADLESS}},
            "podTargetLabels": targets,
            "endpoints": endpoints,
        }
        return [{**head, "spec": spec}]
    return []
