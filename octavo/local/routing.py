"""The router's configuration and its list of engines. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from octavo_operator.desired.service import routed_adapters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.local.pool import Pool
    from octavo_operator.spec import AdapterSpec, LLMDeployment

# Clients of a laptop do not look the address up again: what comes after SIGTERM comes at once.
ACCEPT_WHILE_DRAINING_S = 0.3
WARM_LOOK_S = 0.05  # between looks at the list of engines, where one may be there at once


def router_config(
    pools: Sequence[Pool],
    *,
    host: str,
    port: int,
    upstreams_file: str,
    state_token: str,
    keys: Sequence[str] = (),
) -> str:
    """The router's file. JSON is YAML too. `keys` that engines ask for are requested here: towards
    engines the router has one of its own, and would let everybody in."""
    deployments = [pool.deployment for pool in pools]
    drain_s = max((d.rollout.drain_timeout_s for d in deployments), default=0.0)
    hold_s = max((d.routing.hold_s for d in deployments), default=0.0)
    config: dict[str, Any] = {
        "server": {
            "host": host,
            "port": port,
            "drain_timeout_s": drain_s,
            "accept_while_draining_s": ACCEPT_WHILE_DRAINING_S,
            "state_token": state_token,
            "replica": "local",
        },
        "discovery": {"file": upstreams_file},
        "routing": {"pools": [_pool(pool.deployment, pool.adapters) for pool in pools]},
        "models": _models(pools),
        "flow": {"hold_timeout_s": hold_s},
    }
    if any(pool.num_warm for pool in pools):
        config["discovery"]["file_interval_s"] = WARM_LOOK_S
    if keys:
        config["discovery"]["engine_key"] = keys[0]
        config["flow"]["keys"] = [
            {"tenant": f"key-{number}", "sha256": hashlib.sha256(key.encode()).hexdigest()}
            for number, key in enumerate(keys, start=1)
        ]
    return json.dumps(config, indent=1)


def upstreams(pools: Iterable[Pool]) -> str:
    """The list of engines."""
    listed = [
        {
            "url": replica.url,
            "pool": pool.name,
            "names": list(pool.deployment.model.names),
            "revision": replica.launch.revision,
            "replica": replica.id,
            "kind": "octavo",
        }
        for pool in pools
        for replica in pool.replicas
        if replica.is_listed
    ]
    return json.dumps({"upstreams": listed}, indent=1)


def _pool(deployment: LLMDeployment, adapters: Sequence[AdapterSpec]) -> dict[str, Any]:
    pool: dict[str, Any] = {"name": deployment.pool, "policy": deployment.routing.policy}
    if adapters and (room := deployment.room_for_adapters) is not None:
        pool |= {
            "adapters": [_adapter(one) for one in adapters],
            "adapter_slots": room.slots,
        }
    return pool


def _adapter(adapter: AdapterSpec) -> dict[str, Any]:
    """As the router's file has it."""
    (routed,) = routed_adapters([adapter])
    canary = routed.pop("canary", None)
    if canary is not None:
        routed |= {"canary_of": canary["of"], "canary_percent": float(canary["percent"])}
    return routed


def _models(pools: Sequence[Pool]) -> list[dict[str, Any]]:
    """A name is known also while no engine serves it yet: its requests are held. Not those of a
    suspended model: no engine will start."""
    backends: dict[str, list[dict[str, Any]]] = {}
    for pool in pools:
        if pool.deployment.suspend or pool.is_deleted:
            continue
        own: list[dict[str, Any]] = [
            {"pool": pool.name, "revision": revision, "weight": weight}
            for revision, weight in sorted(pool.weights.items())
        ] or [{"pool": pool.name}]
        for name in pool.deployment.model.names:
            backends.setdefault(name, []).extend(own)
    return [{"name": name, "backends": found} for name, found in backends.items()]
