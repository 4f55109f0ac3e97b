"""What `octavo up` says of itself: for its own table, and in state.json for `octavo status`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    id: str
    revision: str
    state: str
    pid: int
    port: int
    in_flight: int
    restarts: int
    detail: str
    log: str


@dataclass(frozen=True, slots=True)
class AdapterRow:
    name: str
    phase: str
    replicas: tuple[str, ...]  # that have it loaded
    message: str
    trial: str = ""  # what becomes of its canary


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One LLMDeployment."""

    name: str
    model: str
    served_names: tuple[str, ...]
    revision: str
    wanted: int
    serving: int
    phase: str
    message: str
    replicas: tuple[ReplicaRow, ...]
    adapters: tuple[AdapterRow, ...] = ()


@dataclass(frozen=True, slots=True)
class PlatformSnapshot:
    """All of it, at one moment."""

    pid: int
    url: str
    router: str  # its state
    problem: str  # with the files
    pools: tuple[PoolRow, ...]

    @property
    def is_ready(self) -> bool:
        """All desired replicas serve."""
        return self.router == "ready" and all(
            pool.serving >= pool.wanted and pool.phase != "leaving" for pool in self.pools
        )

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "is_ready": self.is_ready}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PlatformSnapshot:
        """Raises ValueError."""
        try:
            fields: dict[str, Any] = json.loads(text)
            pools = tuple(
                PoolRow(
                    **{
                        **pool,
                        "served_names": tuple(pool["served_names"]),
                        "replicas": tuple(ReplicaRow(**row) for row in pool["replicas"]),
                        "adapters": tuple(
                            AdapterRow(**{**row, "replicas": tuple(row["replicas"])})
                            for row in pool["adapters"]
                        ),
                    }
                )
                for pool in fields["pools"]
            )
            return cls(fields["pid"], fields["url"], fields["router"], fields["problem"], pools)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not the state of octavo up: {error}") from None
