"""The few fields that the router reads of pods, Services and EndpointSlices."""

from __future__ import annotations

import msgspec


class Struct(msgspec.Struct, rename="camel"):
    """Unknown fields are skipped; absent ones are empty, as the API omits what is empty."""


class Meta(Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class KubernetesObject(Struct):
    metadata: Meta


class PodCondition(Struct):
    type: str = ""
    status: str = ""


class PodStatus(Struct):
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[PodCondition] = []

    def is_true(self, condition: str) -> bool:
        return any(c.type == condition and c.status == "True" for c in self.conditions)


class Pod(KubernetesObject):
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class ServicePort(Struct):
    port: int = 0
    name: str | None = None


class ServiceSpec(Struct):
    ports: list[ServicePort] = []


class KubernetesService(KubernetesObject):
    spec: ServiceSpec = msgspec.field(default_factory=ServiceSpec)


class EndpointConditions(Struct):
    ready: bool | None = None  # None counts as true, says the API
    terminating: bool | None = None


class TargetRef(Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class SliceEndpoint(Struct):
    addresses: list[str] = []
    conditions: EndpointConditions = msgspec.field(default_factory=EndpointConditions)
    target_ref: TargetRef | None = None
    zone: str | None = None


class SlicePort(Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(KubernetesObject):
    endpoints: list[SliceEndpoint] | None = None  # null when there are none
    ports: list[SlicePort] | None = None
