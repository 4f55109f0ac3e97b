"""The routing annotation of a Service: how its pool shall be served. Bad ones change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec

from octavo_engine.protocol.kubernetes import DEPLOYMENT_LABEL, ROUTING_ANNOTATION
from octavo_router.config.check import canary_problem
from octavo_router.config.settings import AdapterConfig
from octavo_router.discovery.source import Claim, PoolRoute

if TYPE_CHECKING:
    from octavo_router.discovery.kubernetes.objects import KubernetesService


class RoutedCanary(msgspec.Struct, frozen=True):
    """A share of the requests for another adapter."""

    of: str
    percent: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 10.0


class RoutedAdapter(msgspec.Struct, frozen=True):
    """One of the adapters that a pool's engines shall have."""

    name: str
    uri: str
    pinned: bool = False
    canary: RoutedCanary | None = None

    def to_config(self) -> AdapterConfig:
        config = AdapterConfig(name=self.name, uri=self.uri, pinned=self.pinned)
        if self.canary is None:
            return config
        return replace(config, canary_of=self.canary.of, canary_percent=self.canary.percent)


class RoutingAnnotation(msgspec.Struct, frozen=True, rename="camel"):
    """The annotation's JSON, as protocol.kubernetes describes it."""

    names: list[str] = []
    policy: str = ""
    weights: dict[str, float] = {}
    hold_seconds: float | None = None
    port: int | str | None = None  # of the engines: number, or name of an EndpointSlice's port
    scaled_to_zero: bool = False
    kv_events_port: int | None = None  # of plain servers that publish KV events over ZMQ
    kv_replay_port: int | None = None
    # The Service whose pool these engines compute prompts for; that one says all the rest.
    prefill_for: str = ""
    adapters: list[RoutedAdapter] = []  # that routers load on its engines, and unload
    adapter_slots: Annotated[int, msgspec.Meta(ge=1)] = 16  # of them, on one engine at most


class RoutingInvalid(ValueError):
    """The annotation cannot be read; says why."""


def routing_of(service: KubernetesService) -> RoutingAnnotation | None:
    """None: this Service is none of ours. Raises RoutingInvalid."""
    text = service.metadata.annotations.get(ROUTING_ANNOTATION)
    if text is None:
        return None
    try:
        routing = msgspec.json.decode(text, type=RoutingAnnotation)
    except (ValueError, RecursionError) as error:
        raise RoutingInvalid(str(error)) from None
    if routing.prefill_for and (routing.names or routing.policy or routing.weights):
        raise RoutingInvalid("with prefillFor, names, policy and weights are the other Service's")
    if any(not weight >= 0 for weight in routing.weights.values()):
        raise RoutingInvalid("weights must not be negative")
    if problem := canary_problem([adapter.to_config() for adapter in routing.adapters]):
        raise RoutingInvalid(f"adapters: {problem}")
    return routing


def pool_of(service: KubernetesService, routing: RoutingAnnotation) -> str:
    """namespace/name of the LLMDeployment; of the Service itself when it has none."""
    meta = service.metadata
    if routing.prefill_for:
        return f"{meta.namespace}/{routing.prefill_for}"
    return f"{meta.namespace}/{meta.labels.get(DEPLOYMENT_LABEL, meta.name)}"


def pool_route(service: KubernetesService, routing: RoutingAnnotation) -> PoolRoute:
    return PoolRoute(
        pool=pool_of(service, routing),
        names=tuple(routing.names),
        policy=routing.policy,
        weights=routing.weights,
        hold_s=routing.hold_seconds,
        is_scaled_to_zero=routing.scaled_to_zero,
        claim=Claim(service.metadata.creation_timestamp, service.metadata.namespace),
        adapters=tuple(adapter.to_config() for adapter in routing.adapters),
        adapter_slots=routing.adapter_slots,
    )
