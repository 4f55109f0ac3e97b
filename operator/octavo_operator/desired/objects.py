"""All objects of one LLMDeployment, in an order of which every prefix is safe to have applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo_operator.desired.autoscaler import autoscalers
from octavo_operator.desired.config_map import config_map
from octavo_operator.desired.deployment import engine_deployment
from octavo_operator.desired.disruption_budget import disruption_budget
from octavo_operator.desired.monitoring import monitors
from octavo_operator.desired.network_policy import network_policy
from octavo_operator.desired.revision import revision_of
from octavo_operator.desired.service import headless_service, service
from octavo_operator.desired.service_account import service_account
from octavo_operator.desired.volume_claim import volume_claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import AdapterSpec, LLMDeployment


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the moment adds to the spec: how large the revision is, and who gets requests."""

    replicas: int | None = None  # of this revision; None: the spec's, or unset
    weights: Mapping[str, int] = field(default_factory=dict)  # percent by revision; empty: no split
    by_side: bool = False  # pods' labels say which of them answer
    scaled_to_zero: bool = False  # routers hold requests instead of refusing them
    # That routers load on its engines: the spec's and those of LLMAdapters; None: the spec's.
    adapters: tuple[AdapterSpec, ...] | None = None


def desired_objects(
    deployment: LLMDeployment,
    settings: OperatorSettings,
    traffic: Traffic | None = None,
    *,
    revision: str = "",
) -> list[dict[str, Any]]:
    """Everything that should exist for the spec's own revision, called `revision` where it has been
    adopted under another name.

    Without `traffic.replicas` the Deployment has the spec's, or none where an autoscaler decides.
    Raises SpecInvalid if no image is set.
    """
    traffic = traffic or Traffic()
    revision = revision or revision_of(deployment, settings)
    replicas = traffic.replicas
    if replicas is None and (deployment.autoscaling is None or deployment.suspend):
        replicas = deployment.wanted_replicas
    objects: list[dict[str, Any]] = []
    if "serviceAccountName" not in deployment.pod_template.get("spec", {}):
        objects.append(service_account(deployment))
    objects.append(config_map(deployment, revision))
    if deployment.prefill is not None:
        objects.append(config_map(deployment.prefill_side(), revision))
    if deployment.model.is_fetched and deployment.cache.has_own_claim:
        objects.append(volume_claim(deployment))
    objects += [
        service(
            deployment,
            weights=traffic.weights,
            scaled_to_zero=traffic.scaled_to_zero,
            by_side=traffic.by_side,
            adapters=deployment.adapters if traffic.adapters is None else traffic.adapters,
        ),
        headless_service(deployment),
    ]
    if settings.network_policy:
        objects.append(network_policy(deployment, settings))
    objects.append(disruption_budget(deployment))
    objects += monitors(deployment, settings)
    if deployment.prefill is not None:
        number: int | None = deployment.prefill.replicas
        if deployment.suspend:
            number = 0
        elif deployment.prefill.autoscaling is not None:
            number = None
        objects.append(
            engine_deployment(deployment, settings, revision, replicas=number, is_prefill=True)
        )
    objects.append(engine_deployment(deployment, settings, revision, replicas=replicas))
    return objects + autoscalers(deployment, settings)
