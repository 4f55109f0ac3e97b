"""The router's settings: one frozen tree, validated whole. load.py fills it.

Every field carries its unit and a sentence; the command line, the errors and the reference in
docs/router.md are made from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo_router.config.check import POLICIES as POLICIES
from octavo_router.config.check import check
from octavo_router.config.sections import AdapterConfig as AdapterConfig
from octavo_router.config.sections import BackendConfig as BackendConfig
from octavo_router.config.sections import DiscoveryConfig as DiscoveryConfig
from octavo_router.config.sections import EppConfig as EppConfig
from octavo_router.config.sections import FlowConfig as FlowConfig
from octavo_router.config.sections import HealthConfig as HealthConfig
from octavo_router.config.sections import KeyConfig as KeyConfig
from octavo_router.config.sections import KubernetesConfig as KubernetesConfig
from octavo_router.config.sections import LimitsConfig as LimitsConfig
from octavo_router.config.sections import MirrorConfig as MirrorConfig
from octavo_router.config.sections import PoolConfig as PoolConfig
from octavo_router.config.sections import ProfileConfig as ProfileConfig
from octavo_router.config.sections import RetryConfig as RetryConfig
from octavo_router.config.sections import RoutingConfig as RoutingConfig
from octavo_router.config.sections import ServedModelConfig as ServedModelConfig
from octavo_router.config.sections import ServerConfig as ServerConfig
from octavo_router.config.sections import TimeoutsConfig as TimeoutsConfig
from octavo_router.config.sections import TracingConfig as TracingConfig
from octavo_router.config.sections import UpstreamConfig as UpstreamConfig
from octavo_router.config.sections import WeightedConfig as WeightedConfig
from octavo_router.config.sections import setting as setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Every setting of `octavo router`."""

    server: ServerConfig = field(default_factory=ServerConfig)  # Listening, logging, ending.
    limits: LimitsConfig = field(default_factory=LimitsConfig)  # Bounds of the client side.
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)  # Deadlines.
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)  # Where engines are found.
    routing: RoutingConfig = field(default_factory=RoutingConfig)  # How an endpoint is chosen.
    models: tuple[ServedModelConfig, ...] = setting((), "Aliases, canaries, mirrors.")
    flow: FlowConfig = field(default_factory=FlowConfig)  # Keys, limits, queues.
    retry: RetryConfig = field(default_factory=RetryConfig)  # Repeating failed attempts.
    health: HealthConfig = field(default_factory=HealthConfig)  # Ejection and re-admission.
    epp: EppConfig = field(default_factory=EppConfig)  # Endpoint picker.
    tracing: TracingConfig = field(default_factory=TracingConfig)  # Traces.

    def __post_init__(self) -> None:
        check(self)
