"""The sources that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.config.load import parse_part
from octavo_router.config.settings import UpstreamConfig
from octavo_router.discovery.file import UpstreamsFile
from octavo_router.discovery.resolver import SystemResolver
from octavo_router.discovery.upstreams import ConfiguredUpstreams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_router.config.settings import DiscoveryConfig, KubernetesConfig
    from octavo_router.discovery.kubernetes.account import ServiceAccount
    from octavo_router.discovery.source import EndpointSource
    from octavo_router.discovery.upstreams import Resolver
    from octavo_router.metrics import RouterMetrics

STATIC = "static"


def make_sources(
    config: DiscoveryConfig,
    metrics: RouterMetrics,
    environment: Mapping[str, str],
    *,
    resolver: Resolver | None = None,
) -> list[EndpointSource]:
    """Raises ConfigInvalid. The static list is always among them, so that a reload can fill it."""
    resolver = resolver or SystemResolver()
    sources: list[EndpointSource] = [
        ConfiguredUpstreams(
            STATIC,
            config.upstreams,
            resolver,
            counts=metrics.discovery(STATIC),
            interval_s=config.dns_interval_s,
            environment=environment,
        )
    ]
    if config.file:
        sources.append(
            UpstreamsFile(
                config.file,
                lambda text: parse_part(text, "upstreams", UpstreamConfig),
                resolver,
                counts=metrics.discovery("file"),
                interval_s=config.dns_interval_s,
                look_s=config.file_interval_s,
                environment=environment,
            )
        )
    if config.kubernetes.enabled:
        from octavo_router.discovery.kubernetes.source import KubernetesSource

        sources.append(
            KubernetesSource(
                make_account(config.kubernetes, environment),
                config.kubernetes.namespaces,
                label_selector=config.kubernetes.label_selector,
                counts=metrics.discovery("kubernetes"),
                reads_zones=bool(config.zone),
            )
        )
    return sources


def make_account(config: KubernetesConfig, environment: Mapping[str, str]) -> ServiceAccount:
    """How the API server is reached. Raises ConfigInvalid."""
    from octavo_router.discovery.kubernetes.account import at_url, in_cluster

    if config.api:
        return at_url(config.api, token_file=config.token_file, ca_file=config.ca_file)
    return in_cluster(environment)
