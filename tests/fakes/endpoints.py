"""Endpoints, a residency index and requests for routing tests: small, exact and without sockets."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.stream import Load
from octavo_router.config.settings import RouterConfig
from octavo_router.endpoints.endpoint import Address, Endpoint, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.routing.build import build_dispatcher
from octavo_router.routing.request import RouteRequest
from tests.fakes.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.routing.dispatcher import Dispatcher, Lease
    from octavo_router.routing.health import EndpointHealth

CHUNK_TOKENS = 16  # tokens in one route key's chunk of a prompt


class FakeIndex:
    """Holds whole prefixes; what it says is exact."""

    def __init__(self) -> None:
        self.held: dict[int, dict[bytes, int]] = {}
        self._next = 0

    def add_slot(self) -> int:
        self._next += 1
        self.held[self._next] = {}
        return self._next

    def drop_slot(self, slot: int) -> None:
        del self.held[slot]

    def hold(self, slot: int, keys: bytes, tokens_per_key: float = CHUNK_TOKENS) -> None:
        for i in range(len(keys) // 8):
            self.held[slot][keys[8 * i : 8 * i + 8]] = int((i + 1) * tokens_per_key)

    def assume(self, slot: int, keys: bytes, tokens_per_key: float) -> None:
        self.hold(slot, keys, tokens_per_key)

    def match(self, keys: bytes, slots: list[int]) -> list[int]:
        return [self._match(self.held[slot], keys) for slot in slots]

    @staticmethod
    def _match(held: dict[bytes, int], keys: bytes) -> int:
        tokens = 0
        for i in range(0, len(keys), 8):
            found = held.get(keys[i : i + 8])
            if found is None:
                break
            tokens = found
        return tokens


def state_of(endpoint: Endpoint) -> str:
    """Its state now; type checkers think that they know it."""
    return endpoint.state


def make_spec(number: int, *, pool: str = "pool", **fields: Any) -> EndpointSpec:
    values: dict[str, Any] = {
        "id": f"pod-{number}",
        "address": Address(f"10.0.0.{number + 1}", 8000),
        "names": ("model",),
    }
    return EndpointSpec(pool=pool, **(values | fields))


def make_endpoint(number: int = 0, **fields: Any) -> Endpoint:
    """One by itself, ready and idle."""
    endpoint = Endpoint(make_spec(number), state="ready", reported_state="ready", names=("model",))
    for name, value in fields.items():
        setattr(endpoint, name, value)
    return endpoint


class World:
    """A registry with ready endpoints, an index, a clock that is moved by hand, a dispatcher."""

    def __init__(
        self, num_endpoints: int = 4, *, config: RouterConfig | None = None, seed: int = 1
    ) -> None:
        self.clock = ManualClock()
        self.index = FakeIndex()
        self.registry = Registry(self.index)
        self.config = config or RouterConfig()
        self.dispatcher: Dispatcher = build_dispatcher(
            self.config, self.registry, self.index, clock=self.clock, rng=Random(seed)
        )
        self.add(num_endpoints)

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self.registry.endpoints.values())

    def add(self, count: int, *, kind: str = "octavo", **fields: Any) -> list[Endpoint]:
        """More of them, ready at once."""
        before = [endpoint.spec for endpoint in self.endpoints]
        fields = {"kind": kind, **fields}
        specs = [make_spec(len(before) + i, **fields) for i in range(count)]
        added = self.registry.replace("test", [*before, *specs]).added
        for endpoint in added:
            endpoint.max_num_seqs = 128
            self.registry.report(endpoint, "ready")
        return added

    def place(self, request: RouteRequest, **options: Any) -> Lease:
        """Where somebody can take it."""
        lease = self.dispatcher.place(request, **options)
        assert lease is not None, "nobody could take it"
        return lease

    @property
    def health(self) -> EndpointHealth:
        assert self.dispatcher.health is not None
        return self.dispatcher.health

    def tell(self, endpoint: Endpoint, **load: Any) -> None:
        """The engine reports."""
        endpoint.load = Load(**load)
        endpoint.load_at = self.clock()

    def hold(self, endpoint: Endpoint, keys: bytes) -> None:
        self.index.hold(endpoint.slot, keys)


@lru_cache(maxsize=4096)
def make_keys(*parts: tuple[str, int]) -> bytes:
    """Route keys of a prompt made of parts: (what it says, its chunks). Equal starts share keys."""
    keys = bytearray()
    key = bytes(8)
    for text, count in parts:
        for i in range(count):
            key = blake2b(key + f"{text} {i}".encode(), digest_size=8).digest()
            keys += key
    return bytes(keys)


def make_request(*parts: tuple[str, int], **fields: Any) -> RouteRequest:
    """A request whose prompt has these parts; see make_keys."""
    keys = make_keys(*parts)
    num_chunks = len(keys) // 8
    values: dict[str, Any] = {
        "model": "model",
        "pool": "pool",
        "keys": keys,
        "prompt_bytes": 64 * num_chunks,
        "prompt_tokens": CHUNK_TOKENS * num_chunks or 1,
        "max_tokens": 64,
    }
    return RouteRequest(**(values | fields))


def spread(endpoints: Sequence[Endpoint]) -> float:
    """The most in flight anywhere over the mean."""
    counts = [endpoint.in_flight for endpoint in endpoints]
    return max(counts) / (sum(counts) / len(counts))
