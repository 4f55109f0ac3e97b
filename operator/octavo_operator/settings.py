"""The operator's settings: one frozen tree, validated whole, read once at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.protocol.endpoints import ROUTER_PORT
from octavo_operator.errors import SettingsInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

# Optional kinds, as "group/version/Kind": what the cluster serves beyond Kubernetes itself.
POD_MONITOR = "monitoring.coreos.com/v1/PodMonitor"
SERVICE_MONITOR = "monitoring.coreos.com/v1/ServiceMonitor"
SCALED_OBJECT = "keda.sh/v1alpha1/ScaledObject"
OPTIONAL_KINDS = frozenset((POD_MONITOR, SERVICE_MONITOR, SCALED_OBJECT))


ENGINE_USER = 65532  # of distroless images: the non-root user
_PEER = frozenset(("podSelector", "namespaceSelector", "ipBlock"))
_SECRET = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_SECRET_KEY = re.compile(r"[A-Za-z0-9._-]{1,253}")
_CLIENT_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What engine pods run where the spec names no image."""

    # NOTE: no defaults. A name without a registry is a public one's, and anyone may own it there.
    cpu: str = ""
    cuda: str = ""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()  # names; of pods whose podTemplate names none

    def __post_init__(self) -> None:
        for name in self.pull_secrets:
            if len(name) > 253 or not _SECRET.fullmatch(name):
                raise SettingsInvalid(f"images.pull_secrets must be names of Secrets; got {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """How the routers are found: their pods, and the URL that clients use."""

    namespace: str = "octavo-system"
    service: str = "octavo-router"
    url: str = ""  # what status.endpoint shows; default: the Service within the cluster
    scheme: Literal["http", "https"] = "http"
    token: str = field(default="", repr=False)  # what their state endpoint requires
    tls_ca: str = ""  # file with the authority of their certificates; default: the system's

    def __post_init__(self) -> None:
        for name in ("namespace", "service"):
            if not getattr(self, name):
                raise SettingsInvalid(f"router.{name} must not be empty")
        if self.scheme not in ("http", "https"):
            raise SettingsInvalid(f"router.scheme must be http or https; got {self.scheme}")
        if self.tls_ca and self.scheme != "https":
            raise SettingsInvalid("router.tls_ca needs router.scheme https")
        if not (self.token.isascii() and self.token.isprintable()) or " " in self.token:
            raise SettingsInvalid("router.token must be printable ASCII without spaces")

    @property
    def endpoint(self) -> str:
        return self.url or f"{self.scheme}://{self.service}.{self.namespace}.svc:{ROUTER_PORT}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """The operator's settings, and the optional kinds that the cluster serves."""

    field_manager: str = "octavo-operator"
    namespaces: tuple[str, ...] = ()  # empty: all
    images: Images = field(default_factory=Images)
    router: RouterSettings = field(default_factory=RouterSettings)
    capabilities: frozenset[str] = frozenset()  # of OPTIONAL_KINDS, those the cluster serves
    readiness_gate: bool = True  # pods wait for octavo.dev/Routable; off where no router runs
    network_policy: bool = True  # restrict traffic to engines to routers and monitoring
    engine_clients: tuple[Mapping[str, Any], ...] = ()  # others that may, as NetworkPolicyPeers
    engine_user: int | None = ENGINE_USER  # and group, of engine pods; None: the cluster's choice
    # Secrets in the namespace of each LLMDeployment: with certificate and key, and with an API key.
    engine_tls_secret: str = ""  # "": engines serve HTTP
    # Of clients' certificates, by the authority in that Secret, which engines then require.
    engine_client_names: tuple[str, ...] = ()
    engine_key_secret: str = ""  # "": as the spec's variables say
    engine_key_name: str = "key"
    monitoring_namespace: str = "monitoring"  # whose pods may scrape engines
    monitor_labels: Mapping[str, str] = field(default_factory=dict)  # that Prometheus selects by
    max_rollouts: int = 10  # LLMDeployments that roll out at once; 0: no limit
    pre_stop_s: int = 5  # a dying pod serves on while routers learn of it

    def __post_init__(self) -> None:
        unknown = sorted(self.capabilities - OPTIONAL_KINDS)
        if unknown:
            raise SettingsInvalid(f"capabilities has {unknown[0]}, which is never used")
        if not all(peer and peer.keys() <= _PEER for peer in self.engine_clients):
            raise SettingsInvalid(
                f"engine_clients must be peers of a NetworkPolicy, with {', '.join(sorted(_PEER))}"
            )
        for flag, name in (
            ("engine_tls_secret", self.engine_tls_secret),
            ("engine_key_secret", self.engine_key_secret),
        ):
            if name and (len(name) > 253 or not _SECRET.fullmatch(name)):
                raise SettingsInvalid(f"{flag} must be the name of a Secret; got {name}")
        if self.engine_client_names and not self.engine_tls_secret:
            raise SettingsInvalid("engine_client_names needs engine_tls_secret")
        for name in self.engine_client_names:
            if not _CLIENT_NAME.fullmatch(name):
                raise SettingsInvalid(f"engine_client_names must be DNS names or URIs; got {name}")
        if not _SECRET_KEY.fullmatch(self.engine_key_name):
            raise SettingsInvalid(
                f"engine_key_name must be a key of a Secret; got {self.engine_key_name}"
            )
        if not 0 <= self.pre_stop_s <= 15:
            raise SettingsInvalid(f"pre_stop_s must be from 0 to 15; got {self.pre_stop_s}")
