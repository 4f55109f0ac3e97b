"""What must hold in a configuration beyond types; every error names field and remedy."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from octavo_router.config.plugins import installed_policies
from octavo_router.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from octavo_router.config.sections import (
        AdapterConfig,
        DiscoveryConfig,
        EppConfig,
        PoolConfig,
        ProfileConfig,
        RoutingConfig,
        ServedModelConfig,
        ServerConfig,
    )

# The names that a configuration may use; routing.build knows the policies.
POLICIES = (
    "prefix-load",
    "least-load",
    "round-robin",
    "random",
    "power-of-two",
    "consistent-hash",
    "session",
    "lora-affinity",
    "prefill-decode",
)
# The parts that profiles may name; routing.filters and routing.scorers hold them (a test compares).
FILTER_NAMES = ("not-saturated", "has-adapter", "max-waiting", "prefix-at-least")
SCORER_NAMES = (
    "queue",
    "running",
    "in-flight",
    "kv-usage",
    "prefix",
    "wait",
    "adapter",
    "zone",
    "session",
)


class CheckedSettings(Protocol):
    """The settings as a whole; `settings.RouterConfig`."""

    @property
    def server(self) -> ServerConfig: ...

    @property
    def discovery(self) -> DiscoveryConfig: ...

    @property
    def routing(self) -> RoutingConfig: ...

    @property
    def models(self) -> tuple[ServedModelConfig, ...]: ...

    @property
    def epp(self) -> EppConfig: ...


def check(config: CheckedSettings) -> None:
    """A configuration that exists is one that works. Raises ConfigInvalid with all faults."""
    faults = [
        *_check_values(config, ""),
        *_check_routing(config),
        *_check_models(config.models),
        *_check_server(config),
        *_check_upstreams(config),
    ]
    if faults:
        raise ConfigInvalid.of(faults)


def nearest(word: str, known: Collection[str]) -> str:
    """`; did you mean …?` where one is close, else what there is."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(sorted(known))}" if known else ""


def _check_values(part: Any, path: str) -> Iterator[ConfigInvalid]:
    """Bounds and choices of every field, all the way down."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        where = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from _check_values(value, where)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from _check_values(item, f"{where}[{number}]")
        else:
            yield from _check_value(value, where, field.metadata)


def _check_value(value: Any, where: str, rule: Any) -> Iterator[ConfigInvalid]:
    choices = rule.get("choices")
    if choices and value not in choices:
        names = ", ".join(repr(choice) for choice in choices)
        yield ConfigInvalid(where, f"must be one of {names}; got {value!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = rule.get("low"), rule.get("high")
    unit = f" {rule['unit']}" if rule.get("unit") else ""
    if value != value or value in (float("inf"), float("-inf")):
        yield ConfigInvalid(where, f"must be a finite number; got {value}")
    elif low is not None and value < low:
        yield ConfigInvalid(where, f"must be at least {low:g}{unit}; got {value:g}")
    elif high is not None and value > high:
        yield ConfigInvalid(where, f"must be at most {high:g}{unit}; got {value:g}")


def _check_routing(config: CheckedSettings) -> Iterator[ConfigInvalid]:
    routing = config.routing
    yield from _check_unique("routing.profiles", (profile.name for profile in routing.profiles))
    yield from _check_unique("routing.pools", (pool.name for pool in routing.pools))
    for number, pool in enumerate(routing.pools):
        yield from _check_adapters(pool, f"routing.pools[{number}].adapters")
    for number, profile in enumerate(routing.profiles):
        yield from _check_profile(profile, f"routing.profiles[{number}]")
    known = {*POLICIES, *(profile.name for profile in routing.profiles)}
    named = [("routing.policy", routing.policy)]
    named += [
        (f"routing.pools[{number}].policy", pool.policy)
        for number, pool in enumerate(routing.pools)
        if pool.policy
    ]
    named += [(f"routing.shadows[{n}]", name) for n, name in enumerate(routing.shadows)]
    for where, name in named:
        if name in known:
            continue
        known |= installed_policies().keys()
        if name not in known:
            yield ConfigInvalid(where, f"there is no policy {name!r}{nearest(name, known)}")


def _check_adapters(pool: PoolConfig, where: str) -> Iterator[ConfigInvalid]:
    yield from _check_unique(where, (adapter.name for adapter in pool.adapters))
    for number, adapter in enumerate(pool.adapters):
        if not adapter.uri:
            yield ConfigInvalid(f"{where}[{number}].uri", "must not be empty")
    num_pinned = sum(adapter.is_everywhere for adapter in pool.adapters)
    if num_pinned > pool.adapter_slots:
        yield ConfigInvalid(
            where,
            f"{num_pinned} are pinned or canaries, and adapter_slots is {pool.adapter_slots}",
        )
    if problem := canary_problem(pool.adapters):
        yield ConfigInvalid(where, problem)


def canary_problem(adapters: Sequence[AdapterConfig]) -> str:
    """What is wrong with the canaries among them, in words; "" for nothing."""
    plain = {adapter.name for adapter in adapters if not adapter.canary_of}
    of = [adapter.canary_of for adapter in adapters if adapter.canary_of]
    for name in of:
        if name not in plain:
            return (
                f"the adapter {name!r}, of which one is a canary, must be in the list and no canary"
            )
        if of.count(name) > 1:
            return f"the adapter {name!r} has {of.count(name)} canaries; it can have one"
    return ""


def _check_profile(profile: ProfileConfig, where: str) -> Iterator[ConfigInvalid]:
    if profile.name in POLICIES:
        yield ConfigInvalid(f"{where}.name", f"{profile.name!r} is a built-in policy's name")
    if not profile.scorers and profile.picker != "random":
        yield ConfigInvalid(f"{where}.scorers", f"picker {profile.picker!r} needs at least one")
    for kind, parts, known in (
        ("filters", profile.filters, FILTER_NAMES),
        ("scorers", profile.scorers, SCORER_NAMES),
    ):
        for number, part in enumerate(parts):
            if part.name not in known:
                yield ConfigInvalid(
                    f"{where}.{kind}[{number}].name",
                    f"there is no {kind[:-1]} {part.name!r}{nearest(part.name, known)}",
                )


def _check_models(models: tuple[ServedModelConfig, ...]) -> Iterator[ConfigInvalid]:
    yield from _check_unique("models", (model.name for model in models))
    by_name = {model.name: model for model in models}
    for number, model in enumerate(models):
        where = f"models[{number}]"
        if model.alias_of and model.backends:
            yield ConfigInvalid(where, "give alias_of or backends, not both")
        seen = {model.name}
        target = model.alias_of
        while target:
            if target in seen:
                yield ConfigInvalid(f"{where}.alias_of", f"{model.name!r} leads back to itself")
                break
            seen.add(target)
            target = by_name[target].alias_of if target in by_name else ""
        for place, backend in enumerate(model.backends):
            if not backend.pool:
                yield ConfigInvalid(f"{where}.backends[{place}].pool", "must not be empty")
        if model.backends and not any(backend.weight > 0.0 for backend in model.backends):
            yield ConfigInvalid(f"{where}.backends", "at least one weight must be above 0")
        for place, mirror in enumerate(model.mirrors):
            if not mirror.pool:
                yield ConfigInvalid(f"{where}.mirrors[{place}].pool", "must not be empty")


def _check_server(config: CheckedSettings) -> Iterator[ConfigInvalid]:
    server = config.server
    if bool(server.tls_cert) != bool(server.tls_key):
        missing = "tls_key" if server.tls_cert else "tls_cert"
        yield ConfigInvalid(f"server.{missing}", "certificate and key belong together; give both")
    epp = config.epp
    if bool(epp.tls_cert) != bool(epp.tls_key):
        missing = "tls_key" if epp.tls_cert else "tls_cert"
        yield ConfigInvalid(f"epp.{missing}", "certificate and key belong together; give both")
    if server.allow_credentials and ("*" in server.allowed_origins or not server.allowed_origins):
        yield ConfigInvalid("server.allow_credentials", "name the origins in allowed_origins")
    if server.admin_port and server.admin_port == server.port:
        yield ConfigInvalid("server.admin_port", f"{server.port} is the server's own port")
    if server.admin_port and config.epp.enabled and server.admin_port == config.epp.port:
        yield ConfigInvalid("server.admin_port", f"{server.admin_port} is the endpoint picker's")
    if config.epp.enabled and config.epp.port == server.port != 0:
        yield ConfigInvalid("epp.port", f"{server.port} is the server's own port")


def _check_upstreams(config: CheckedSettings) -> Iterator[ConfigInvalid]:
    yield from _check_unique(
        "discovery.upstreams", (f"{one.pool} {one.url}" for one in config.discovery.upstreams)
    )
    policies = {pool.name: pool.policy for pool in config.routing.pools if pool.policy}
    for number, upstream in enumerate(config.discovery.upstreams):
        where = f"discovery.upstreams[{number}]"
        if not upstream.url.startswith(("http://", "https://")):
            yield ConfigInvalid(
                f"{where}.url", f"must be http://HOST:PORT or https://…; got {upstream.url!r}"
            )
        policy = policies.get(upstream.pool, config.routing.policy)
        if upstream.role == "prefill" and policy != "prefill-decode":
            yield ConfigInvalid(
                f"{where}.role",
                f"an engine that only prefills is of use with the policy 'prefill-decode'; pool "
                f"{upstream.pool!r} has {policy!r}",
            )


def _check_unique(where: str, names: Iterable[str]) -> Iterator[ConfigInvalid]:
    counts = Counter(names)
    if counts.pop("", 0):
        yield ConfigInvalid(where, "every entry needs a name")
    for name, count in counts.items():
        if count > 1:
            times = "twice" if count == 2 else f"{count} times"
            yield ConfigInvalid(where, f"{name!r} is there {times}")
