"""The way to each endpoint: its connections and the lines that heads to it have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.http.tls import ClientTls
from octavo_router.http.upstream_pool import UpstreamPool
from octavo_router.proxy.heads import EndpointLines

if TYPE_CHECKING:
    import asyncio

    from octavo_router.config.settings import TimeoutsConfig
    from octavo_router.endpoints.endpoint import Address, Endpoint
    from octavo_router.endpoints.registry import Change
    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.http.network import Network


class Upstream:
    """One endpoint as the proxy reaches it."""

    __slots__ = ("address", "lines", "num_losses", "pool", "quiet_until")

    def __init__(self, address: Address, pool: UpstreamPool, lines: EndpointLines) -> None:
        self.address = address
        self.pool = pool
        self.lines = lines
        self.num_losses = 0  # not said yet
        self.quiet_until = 0.0


class Upstreams:
    """One for each endpoint that was sent something. Subscribe `changed` to the registry."""

    def __init__(
        self,
        timeouts: TimeoutsConfig,
        deadlines: DeadlineTick,
        loop: asyncio.AbstractEventLoop,
        *,
        network: Network | None = None,
        tls: ClientTls | None = None,
        engine_key: str = "",
        passes_keys: bool = True,
    ) -> None:
        self._timeouts = timeouts
        self._engine_key = engine_key
        self._passes_keys = passes_keys  # the client's own, where engines ask for none of ours
        self._deadlines = deadlines
        self._loop = loop
        self._network = network
        self._tls = tls or ClientTls()
        self._by_id: dict[str, Upstream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_connections(self) -> int:
        """To those that are known now."""
        return sum(upstream.pool.num_open for upstream in self._by_id.values())

    def of(self, endpoint: Endpoint) -> Upstream:
        spec = endpoint.spec
        upstream = self._by_id.get(spec.id)
        if upstream is not None and upstream.address is spec.address:
            return upstream
        return self._make(endpoint)

    def known(self, endpoint: Endpoint) -> Upstream | None:
        """Unless it has gone or moved: then no way is made to where it was."""
        upstream = self._by_id.get(endpoint.spec.id)
        return upstream if upstream and upstream.address is endpoint.spec.address else None

    def changed(self, change: Change) -> None:
        if change.kind in ("removed", "updated"):
            self._forget(change.endpoint.spec.id)  # made again, if needed, with what holds now

    def reconfigure(self, timeouts: TimeoutsConfig, *, passes_keys: bool) -> None:
        """Connections and requests from now on go by these."""
        self._timeouts = timeouts
        self._passes_keys = passes_keys  # false once clients show keys of ours
        for upstream in self._by_id.values():
            upstream.lines.hides_authorization = upstream.lines.is_keyed or not passes_keys
            upstream.pool.idle_s = timeouts.upstream_idle_s
            upstream.pool.connect_timeout_s = timeouts.connect_s

    def renew_tls(self) -> None:
        """There is a new context; connections from now on use it."""
        for upstream in self._by_id.values():
            if upstream.address.tls:
                upstream.pool.replace_tls(self._tls.context)

    def close(self) -> None:
        for id_ in tuple(self._by_id):
            self._forget(id_)

    def _make(self, endpoint: Endpoint) -> Upstream:
        spec = endpoint.spec
        self._forget(spec.id)
        address = spec.address
        pool = UpstreamPool(
            address.host,
            address.port,
            deadlines=self._deadlines,
            loop=self._loop,
            network=self._network,
            ssl_context=self._tls.context if address.tls else None,
            server_name=address.tls_name,
            idle_s=self._timeouts.upstream_idle_s,
            connect_timeout_s=self._timeouts.connect_s,
        )
        lines = EndpointLines(endpoint, engine_key=self._engine_key, passes_keys=self._passes_keys)
        upstream = Upstream(address, pool, lines)
        self._by_id[spec.id] = upstream
        return upstream

    def _forget(self, id_: str) -> None:
        upstream = self._by_id.pop(id_, None)
        if upstream is not None:
            upstream.pool.close()
