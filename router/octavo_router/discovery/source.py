"""What a source of endpoints reports, and the interface of every source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from octavo_router.config.settings import AdapterConfig
    from octavo_router.endpoints.endpoint import EndpointSpec


class Claim(NamedTuple):
    """Who asks for model names, and since when: the older claim is the smaller one. Names belong to
    one namespace; pools that have none, from lists and files, may share the names of any."""

    created: str = ""  # RFC 3339, in UTC
    namespace: str = ""


UNCLAIMED = Claim()


@dataclass(frozen=True, slots=True)
class PoolRoute:
    """How a pool's owner wants it served. From Kubernetes: the routing annotation of a Service."""

    pool: str
    names: tuple[str, ...] = ()  # models; empty: whatever the engines say
    policy: str = ""  # empty: the router's own
    weights: Mapping[str, float] = field(default_factory=dict)  # by revision; empty: any
    hold_s: float | None = None  # how long requests may wait for a first engine; None: as usual
    is_scaled_to_zero: bool = False  # no engine is expected: hold, do not refuse
    claim: Claim = UNCLAIMED  # whose names these are
    adapters: tuple[AdapterConfig, ...] = ()  # that its engines shall have
    adapter_slots: int = 16  # of them, on one engine


@dataclass(frozen=True, slots=True)
class Found:
    """All that one source knows at a time. What is not in it is gone."""

    specs: tuple[EndpointSpec, ...] = ()
    pools: tuple[PoolRoute, ...] = ()


Publish: TypeAlias = Callable[[Found], None]


class EndpointSource(Protocol):
    """Runs until cancelled; publishes when something changed, and once at the start."""

    @property
    def name(self) -> str: ...  # a label: unique among the sources of a router

    async def run(self, publish: Publish) -> None:
        """Failures that pass are its own affair; what it knew before stays published."""
