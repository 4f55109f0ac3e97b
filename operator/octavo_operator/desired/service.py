"""The Services: one address for people, one record per pod for routers and Prometheus."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import ENGINE_PORT
from octavo_engine.protocol.kubernetes import ROUTING_ANNOTATION
from octavo_operator.desired.metadata import child
from octavo_operator.desired.probes import PORT_NAME
from octavo_operator.objects import labels, names
from octavo_operator.objects.quantities import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_operator.spec import AdapterSpec, LLMDeployment


def service(
    deployment: LLMDeployment,
    *,
    weights: Mapping[str, int],
    scaled_to_zero: bool,
    by_side: bool = False,
    adapters: Sequence[AdapterSpec] = (),
) -> dict[str, Any]:
    """`by_side`: its pods change sides, and each has the label that says where it is."""
    annotation = routing_annotation(
        deployment, weights=weights, scaled_to_zero=scaled_to_zero, adapters=adapters
    )
    head = child(
        deployment,
        "v1",
        "Service",
        names.service(deployment.name),
        annotations={ROUTING_ANNOTATION: annotation},
    )
    selected = labels.answering if by_side else labels.engines
    return {**head, "spec": {"selector": selected(deployment.name), "ports": [_port()]}}


def headless_service(deployment: LLMDeployment) -> dict[str, Any]:
    name = names.headless_service(deployment.name)
    head = child(deployment, "v1", "Service", name, extra_labels=labels.HEADLESS)
    spec = {
        "clusterIP": "None",
        # Who is not ready yet is visible: a router connects early, the gate waits for it.
        "publishNotReadyAddresses": True,
        "selector": labels.pods(deployment.name)
        if deployment.group is None
        else labels.engines(deployment.name),  # workers answer nobody
        "ports": [_port()],
    }
    return {**head, "spec": spec}


def routing_annotation(
    deployment: LLMDeployment,
    *,
    weights: Mapping[str, int],
    scaled_to_zero: bool,
    adapters: Sequence[AdapterSpec] = (),
) -> str:
    """How a router shall serve it: JSON, the same text for the same meaning."""
    routing: dict[str, Any] = {
        "names": list(deployment.model.names),
        "policy": "prefill-decode" if deployment.prefill is not None else deployment.routing.policy,
        "holdSeconds": plain(deployment.routing.hold_s),
        "port": ENGINE_PORT,
        "scaledToZero": scaled_to_zero,
    }
    if weights:
        routing["weights"] = dict(weights)
    room = deployment.room_for_adapters
    if adapters and room is not None:
        routing |= {"adapters": routed_adapters(adapters), "adapterSlots": room.slots}
    return json.dumps(routing, sort_keys=True)


def routed_adapters(adapters: Sequence[AdapterSpec]) -> list[dict[str, Any]]:
    """As routers are given them."""
    return [_routed_adapter(one) for one in adapters]


def _routed_adapter(adapter: AdapterSpec) -> dict[str, Any]:
    routed: dict[str, Any] = {"name": adapter.name, "uri": adapter.lora_path}
    if adapter.is_everywhere:
        routed["pinned"] = True
    if adapter.canary is not None:
        routed["canary"] = {"of": adapter.canary.of, "percent": adapter.canary.percent}
    return routed


def _port() -> dict[str, Any]:
    return {"name": PORT_NAME, "port": ENGINE_PORT, "targetPort": PORT_NAME, "protocol": "TCP"}
