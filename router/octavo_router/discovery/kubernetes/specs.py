"""Pods, Services and EndpointSlices into endpoints and pools. Pure but for what was seen before.

An engine of an LLMDeployment is a pod with its labels. Its *containers'* readiness counts: the
pod's own waits for the routers to have it. For any other Service with the routing annotation, the
EndpointSlices say who serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.protocol.endpoints import ENGINE_PORT
from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    PREFILL_COMPONENT,
    PROMPTS_SIDE,
    REVISION_LABEL,
    SIDE_LABEL,
    TLS_NAME_ANNOTATION,
)
from octavo_router.discovery.kubernetes.routing import (
    RoutingAnnotation,
    RoutingInvalid,
    pool_of,
    pool_route,
    routing_of,
)
from octavo_router.discovery.source import Found, PoolRoute
from octavo_router.endpoints.endpoint import Address, EndpointSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from octavo_router.discovery.kubernetes.objects import (
        EndpointSlice,
        KubernetesService,
        Pod,
        SliceEndpoint,
        SlicePort,
    )
    from octavo_router.discovery.kubernetes.readiness_damping import Steadiness

SERVICE_LABEL = "kubernetes.io/service-name"  # on an EndpointSlice
ZONE_LABEL = "topology.kubernetes.io/zone"  # on pods, from Kubernetes 1.35 on


class Problem(NamedTuple):
    """What somebody has to put right; reported once by the caller."""

    where: str
    what: str


class Served(NamedTuple):
    """A Service that wants to be routed."""

    service: KubernetesService
    routing: RoutingAnnotation

    @property
    def has_pods(self) -> bool:
        """Its engines are the pods of an LLMDeployment."""
        return DEPLOYMENT_LABEL in self.service.metadata.labels


def served(services: Iterable[KubernetesService]) -> tuple[list[Served], list[Problem]]:
    """The Services with a routing annotation, and those whose annotation cannot be read."""
    found, problems = [], []
    for service in services:
        try:
            routing = routing_of(service)
        except RoutingInvalid as error:
            meta = service.metadata
            problems.append(Problem(f"Service {meta.namespace}/{meta.name}", str(error)))
            continue
        if routing is not None:
            found.append(Served(service, routing))
    return found, problems


def find(
    wanted: Iterable[Served],
    pods: Iterable[Pod],
    slices: Iterable[EndpointSlice],
    *,
    steadiness: Steadiness,
    now: float,
    zones: Mapping[str, str] | None = None,
) -> Found:
    """Everything there is, in a stable order. `zones` by pod UID, of pods that do not say it."""
    steadiness.begin()
    routes: dict[str, PoolRoute] = {}
    ports: dict[str, int] = {}
    plain: dict[tuple[str, str], Served] = {}
    for each in wanted:
        meta = each.service.metadata
        pool = pool_of(each.service, each.routing)
        if not each.routing.prefill_for:
            routes.setdefault(pool, pool_route(each.service, each.routing))
        if not each.has_pods:
            plain[meta.namespace, meta.name] = each
        elif isinstance(each.routing.port, int):
            ports.setdefault(pool, each.routing.port)
    specs: dict[str, EndpointSpec] = {}
    for spec in (*_from_pods(pods, ports, zones or {}), *_from_slices(slices, plain)):
        known = specs.get(spec.id)
        # In two slices at once while it moves between them: the livelier word counts.
        if known is None or (spec.is_ready and not known.is_ready):
            specs[spec.id] = spec
    settled = [_settled(spec, steadiness, now) for _, spec in sorted(specs.items())]
    steadiness.keep(set(specs))
    return Found(tuple(settled), tuple(route for _, route in sorted(routes.items())))


def zones_of(slices: Iterable[EndpointSlice]) -> Iterator[tuple[str, str]]:
    """The zone of each pod, by UID."""
    for slice_ in slices:
        for endpoint in slice_.endpoints or []:
            target = endpoint.target_ref
            if endpoint.zone and target is not None and target.kind == "Pod":
                yield target.uid, endpoint.zone


def _settled(spec: EndpointSpec, steadiness: Steadiness, now: float) -> EndpointSpec:
    from dataclasses import replace

    is_ready = steadiness.settle(spec.id, is_ready=spec.is_ready, now=now)
    return spec if is_ready == spec.is_ready else replace(spec, is_ready=is_ready)


def _from_pods(
    pods: Iterable[Pod], ports: dict[str, int], zones: Mapping[str, str]
) -> Iterator[EndpointSpec]:
    for pod in pods:
        meta, status = pod.metadata, pod.status
        deployment = meta.labels.get(DEPLOYMENT_LABEL)
        if deployment is None or not status.pod_ip or status.phase in ("Succeeded", "Failed"):
            continue
        pool = f"{meta.namespace}/{deployment}"
        tls_name = meta.annotations.get(TLS_NAME_ANNOTATION, "")
        component = meta.labels.get(COMPONENT_LABEL)
        side = meta.labels.get(SIDE_LABEL, "")
        is_prefill = side == PROMPTS_SIDE if side else component == PREFILL_COMPONENT
        yield EndpointSpec(
            id=meta.uid,
            address=Address(
                status.pod_ip, ports.get(pool, ENGINE_PORT), bool(tls_name), tls_name=tls_name
            ),
            pool=pool,
            revision=meta.labels.get(REVISION_LABEL, ""),
            kind="octavo",
            role="prefill" if is_prefill else "both",
            is_moved=bool(side),
            pod_uid=meta.uid,
            labels=(("namespace", meta.namespace), ("pod", meta.name)),
            is_terminating=meta.deletion_timestamp is not None,
            is_ready=status.phase == "Running" and status.is_true("ContainersReady"),
            zone=meta.labels.get(ZONE_LABEL) or zones.get(meta.uid, ""),
        )


def _from_slices(
    slices: Iterable[EndpointSlice], plain: dict[tuple[str, str], Served]
) -> Iterator[EndpointSpec]:
    for slice_ in slices:
        meta = slice_.metadata
        each = plain.get((meta.namespace, meta.labels.get(SERVICE_LABEL, "")))
        if each is None:
            continue
        port = _port(each.routing, slice_.ports or [])
        if port is None:
            continue
        for endpoint in slice_.endpoints or []:
            if endpoint.addresses:
                yield _from_endpoint(endpoint, port, each)


def _from_endpoint(endpoint: SliceEndpoint, port: int, each: Served) -> EndpointSpec:
    address = Address(endpoint.addresses[0], port)
    pool = pool_of(each.service, each.routing)
    target = endpoint.target_ref
    uid = target.uid if target is not None and target.kind == "Pod" else ""
    namespace = each.service.metadata.namespace
    return EndpointSpec(
        id=uid or f"{pool}/{address.authority}",
        address=address,
        pool=pool,
        role="prefill" if each.routing.prefill_for else "both",
        pod_uid=uid,
        labels=(
            ("namespace", namespace),
            ("pod", target.name if uid and target else ""),
            *_kv_labels(each.routing, address),
        ),
        is_terminating=endpoint.conditions.terminating is True,
        is_ready=endpoint.conditions.ready is not False,
        zone=endpoint.zone or "",
    )


def _kv_labels(routing: RoutingAnnotation, address: Address) -> Iterator[tuple[str, str]]:
    for name, port in (
        ("kv-events", routing.kv_events_port),
        ("kv-replay", routing.kv_replay_port),
    ):
        if port is not None:
            yield name, f"tcp://{address._replace(port=port).authority}"


def _port(routing: RoutingAnnotation, ports: list[SlicePort]) -> int | None:
    """The one that the annotation means; else the only one, the one named http, the first."""
    if isinstance(routing.port, int):
        return routing.port
    wanted = routing.port or "http"
    named = [port.port for port in ports if port.name == wanted]
    if named:
        return named[0]
    return None if routing.port or not ports else ports[0].port
