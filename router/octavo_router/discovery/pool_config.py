"""What discovered pools want, in the configuration's own words, so that routing knows one kind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo_router.config.settings import BackendConfig, PoolConfig, ServedModelConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from octavo_router.config.settings import RouterConfig
    from octavo_router.discovery.source import Claim, PoolRoute


def discovered_models(
    routes: Mapping[str, PoolRoute], configured: Sequence[ServedModelConfig] = ()
) -> tuple[ServedModelConfig, ...]:
    """The configured models, then the names that pools claim. A configured name is left alone.

    A name belongs to the namespace with the oldest claim. Its pools that claim the same name share
    it evenly, each by its own revisions' weights.
    """
    taken = {model.name for model in configured}
    owners = owners_of(routes)
    backends: dict[str, list[BackendConfig]] = {}
    for _, route in sorted(routes.items()):
        for name in dict.fromkeys(route.names):
            if name not in taken and route.claim.namespace in ("", owners.get(name, "")):
                backends.setdefault(name, []).extend(_backends(route))
    found = (ServedModelConfig(name=name, backends=tuple(each)) for name, each in backends.items())
    return (*configured, *found)


def owners_of(routes: Mapping[str, PoolRoute]) -> dict[str, str]:
    """The namespace of each name that pools claim."""
    claims: dict[str, list[Claim]] = {}
    for route in routes.values():
        for name in _names(route) if route.claim.namespace else ():
            claims.setdefault(name, []).append(route.claim)
    return {name: min(each).namespace for name, each in claims.items()}


def foreign_claims(routes: Mapping[str, PoolRoute]) -> list[tuple[str, str, str]]:
    """Claims that come to nothing: the pool, the name, and the namespace that it belongs to."""
    owners = owners_of(routes)
    return [
        (pool, name, owners[name])
        for pool, route in sorted(routes.items())
        for name in _names(route)
        if route.claim.namespace not in ("", owners.get(name, ""))
    ]


def discovered_pools(
    routes: Mapping[str, PoolRoute], config: RouterConfig, policies: Collection[str]
) -> tuple[PoolConfig, ...]:
    """The configured pools, then those that name a policy which this router has, or adapters. A
    name of an adapter belongs to one namespace, as that of a model does."""
    owners = owners_of(routes)
    pools = {pool.name: pool for pool in config.routing.pools}
    for name, route in sorted(routes.items()):
        policy = route.policy if route.policy in policies else ""
        adapters = tuple(
            adapter
            for adapter in route.adapters
            if route.claim.namespace in ("", owners.get(adapter.name, ""))
        )
        known = pools.get(name)
        if known is None and (policy or adapters):
            pools[name] = PoolConfig(
                name=name, policy=policy, adapters=adapters, adapter_slots=route.adapter_slots
            )
        elif known is not None and adapters and not known.adapters:
            pools[name] = replace(known, adapters=adapters, adapter_slots=route.adapter_slots)
    return tuple(pools.values())


def _names(route: PoolRoute) -> tuple[str, ...]:
    return (*route.names, *(adapter.name for adapter in route.adapters))


def _backends(route: PoolRoute) -> list[BackendConfig]:
    total = sum(route.weights.values())
    if total <= 0:
        return [BackendConfig(pool=route.pool)]
    return [
        BackendConfig(pool=route.pool, revision=revision, weight=weight / total)
        for revision, weight in sorted(route.weights.items())
    ]
