"""Endpoints from configuration: URLs, whose names are looked up again and again, never by requests.

A name with one engine behind it stays one endpoint (its id is the URL) whatever it resolves to.
`is_dns` makes an endpoint of every address; so does a name of SRV records, which tell ports too.
When a look-up fails, the last answer stands. https engines keep their names: certificates do.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, NamedTuple

from octavo_router.discovery.addresses import SRV_PREFIX, address_of, is_ip, key_of
from octavo_router.discovery.source import Found
from octavo_router.endpoints.endpoint import Address, EndpointSpec, Kind, Role
from octavo_router.errors import ConfigInvalid, Unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from octavo_router.config.settings import UpstreamConfig
    from octavo_router.discovery.source import Publish
    from octavo_router.metrics import DiscoveryCounts

    class Resolver(Protocol):
        async def addresses(self, host: str) -> list[str]:
            """IP addresses, the preferred first. Raises Unreachable."""

        async def services(self, name: str) -> list[tuple[str, int]]:
            """(address, port) of each SRV record. Raises Unreachable."""


logger = logging.getLogger(__name__)

_KINDS: dict[str, Kind | None] = {"": None, "octavo": "octavo", "openai": "openai"}
_ROLES: dict[str, Role] = {"both": "both", "prefill": "prefill", "decode": "decode"}


class _Upstream(NamedTuple):
    config: UpstreamConfig
    address: Address
    key: str

    @property
    def needs_lookup(self) -> bool:
        return not is_ip(self.address.host) and not self.address.tls


class ConfiguredUpstreams:
    """A source. `replace` gives it another list while it runs."""

    def __init__(
        self,
        name: str,
        upstreams: Sequence[UpstreamConfig],
        resolver: Resolver,
        *,
        counts: DiscoveryCounts,
        interval_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._environment = environment or {}
        self._resolver = resolver
        self._counts = counts
        self._interval_s = interval_s
        self._answers: dict[Address, list[Address]] = {}  # the last good one of each name
        self._changed = asyncio.Event()
        self._upstreams = _parse(upstreams, self._environment)

    @property
    def has_names(self) -> bool:
        """Whether any of them is looked up in DNS."""
        return any(upstream.needs_lookup for upstream in self._upstreams)

    def replace(self, upstreams: Sequence[UpstreamConfig]) -> None:
        """Raises ConfigInvalid, and then nothing has changed."""
        self._upstreams = _parse(upstreams, self._environment)
        self._changed.set()

    async def run(self, publish: Publish) -> None:
        while True:
            self._changed.clear()
            upstreams = self._upstreams
            lookups = [upstream for upstream in upstreams if upstream.needs_lookup]
            await asyncio.gather(*map(self._look_up, lookups))
            if not self._changed.is_set():
                publish(Found(tuple(self._specs(upstreams))))
            if not lookups:
                await self._changed.wait()
                continue
            try:
                async with asyncio.timeout(self._interval_s * (0.8 + 0.4 * random.random())):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _look_up(self, upstream: _Upstream) -> None:
        address = upstream.address
        host, port, prefix = address.host, address.port, address.prefix
        try:
            if host.startswith(SRV_PREFIX):
                pairs = await self._resolver.services(host)
            else:
                pairs = [(ip, port) for ip in await self._resolver.addresses(host)]
        except Unreachable as error:
            self._counts.errors += 1
            if address not in self._answers:
                logger.warning("Found no address", extra={"host": host, "reason": str(error)})
            return
        self._counts.heard_at = asyncio.get_running_loop().time()
        self._answers[address] = [Address(*pair, prefix=prefix) for pair in pairs]

    def _specs(self, upstreams: Sequence[_Upstream]) -> list[EndpointSpec]:
        specs: dict[str, EndpointSpec] = {}
        for upstream in upstreams:
            config, address, key = upstream
            found = self._answers.get(address, []) if upstream.needs_lookup else [address]
            if config.is_dns or address.host.startswith(SRV_PREFIX):
                for each in sorted(found):
                    specs.setdefault(each.url, _spec(config, each, each.url, key))
            elif found:
                specs.setdefault(address.url, _spec(config, found[0], address.url, key))
        return list(specs.values())


def _parse(upstreams: Sequence[UpstreamConfig], environment: Mapping[str, str]) -> list[_Upstream]:
    parsed: dict[Address, _Upstream] = {}
    for number, config in enumerate(upstreams):
        address = address_of(config)
        if address in parsed:
            raise ConfigInvalid("discovery.upstreams", f"{address.url} is given twice")
        key = key_of(config, environment, field=f"discovery.upstreams[{number}]")
        parsed[address] = _Upstream(config, address, key)
    return list(parsed.values())


def _spec(config: UpstreamConfig, address: Address, id_: str, key: str) -> EndpointSpec:
    return EndpointSpec(
        id=id_,
        address=address,
        pool=config.pool,
        names=tuple(config.names),
        revision=config.revision,
        kind=_KINDS[config.kind],
        role=_ROLES[config.role],
        key=key,
        is_foreign=config.is_foreign,
        zone=config.zone,
        labels=tuple(label for label in _labels(config) if label[1]),
    )


def _labels(config: UpstreamConfig) -> tuple[tuple[str, str], ...]:
    return (
        ("replica", config.replica),
        ("kv-events", config.kv_events),
        ("kv-replay", config.kv_replay),
    )
