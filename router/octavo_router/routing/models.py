"""Models by name: which pool serves a name, under which name its engines know it, who gets copies.

A name means, first that applies: what the configuration says of it (an alias, weighted backends);
a model that discovered endpoints serve; an adapter that they have, or could load. Weights are kept
by hashing: a session always falls to the same backend, a request without one to the backend that
its id hashes to, the same on every router. An adapter's requests follow the weights of its pool's
model.

A name that engines tell belongs to one namespace: that of the oldest pool whose engines tell it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from octavo_router.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_router.config.settings import BackendConfig, PoolConfig, ServedModelConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry

YOUNGEST = "~"  # after every date
MAX_NAMED = 10  # models that a refusal lists
UNHEARD_RETRY_S = 1.0


class Copy(NamedTuple):
    """Where a mirrored request goes too."""

    pool: str
    revision: str


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """What a model name means for one request."""

    pool: str
    revision: str = ""
    adapter: str = ""
    upstream_model: str = ""  # the name that engines must be given; "" to leave it as it is
    copies: tuple[Copy, ...] = ()
    is_canary: bool = False  # the adapter gets a share of another's requests
    is_trial: bool = False  # it does, or another gets a share of its own
    is_known: bool = True  # False: whether the model exists, engines will tell that wait is for


@dataclass(frozen=True, slots=True)
class Card:
    """A line of /v1/models."""

    name: str
    root: str  # whose weights answer
    parent: str | None  # of an adapter
    max_model_len: int  # the least that its engines take; 0 while unknown
    vocab_size: int = 0  # the least that its engines have; 0 while unknown

    def to_json(self, created: int) -> dict[str, object]:
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "octavo",
            "root": self.root,
            "parent": self.parent,
            "max_model_len": self.max_model_len or None,
            "vocab_size": self.vocab_size or None,
        }

    def to_anthropic(self, created_at: str) -> dict[str, object]:
        """As Anthropic's API lists a model."""
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": created_at,
            "lifecycle": "active",
            "max_input_tokens": self.max_model_len or None,
            "max_tokens": self.max_model_len or None,
        }


class Models:
    """See the module. Cheap for names without weights: one dictionary look-up."""

    __slots__ = (
        "_adapter_contents", "_adapters", "_canaries", "_claims", "_config", "_parents", "_plain",
        "_pools", "_registry", "_revisions", "_served", "_version",
    )  # fmt: skip

    def __init__(
        self,
        registry: Registry,
        config: Sequence[ServedModelConfig] = (),
        pools: Sequence[PoolConfig] = (),
    ) -> None:
        self._registry = registry
        self._pools = pools
        self._adapter_contents: dict[str, str] = {}
        self._config = {model.name: model for model in config}
        self._claims: Mapping[str, tuple[str, str]] = {}
        self._version = -1
        self._plain: dict[str, ModelRoute] = {}
        self._served: dict[str, dict[str, int]] = {}  # by name: endpoints in each pool
        self._adapters: dict[str, dict[str, int]] = {}
        self._canaries: dict[str, tuple[str, float]] = {}  # by adapter: which, and its percentage
        self._parents: dict[str, str] = {}
        self._revisions = _revisions_of(config)  # by pool

    def replace(
        self,
        config: Sequence[ServedModelConfig],
        claims: Mapping[str, tuple[str, str]] | None = None,
        pools: Sequence[PoolConfig] = (),
    ) -> None:
        """New settings. `claims`: since when each pool asks for its names, and its namespace."""
        self._pools = pools
        self._claims = claims or {}
        self._config = {model.name: model for model in config}
        self._revisions = _revisions_of(config)
        self._version = -1

    def resolve(
        self, name: str, *, request_id: str = "", session: str = "", is_fixed: bool = False
    ) -> ModelRoute:
        """What `name` means. Raises Rejected: 404, or 400 where no name could mean several.
        `is_fixed`: engines get this name, so no canary can take its place."""
        if self._version != self._registry.version:
            self._learn()
        route = self._plain.get(name)
        if route is not None:
            return route
        if not name:
            name = self._only_name()
        target = self._target(name)
        model = self._config.get(target)
        if model is None or not (model.backends or model.mirrors):
            if target in self._canaries and not is_fixed:
                return self._shared(name, target, session or request_id)
            route = self._discovered(name, target, session or request_id)
            is_shared = target in self._canaries or bool(route.revision)
            if len(self._pools_of(target)) == 1 and not is_shared:
                self._plain[name] = route
            return route
        point = _point(target, session or request_id)
        copies = tuple(
            Copy(mirror.pool, mirror.revision)
            for number, mirror in enumerate(model.mirrors)
            if _point(f"{target}\0mirror {number}", request_id) * 100.0 < mirror.percent
        )
        if not model.backends:
            key = session or request_id
            find = self._discovered if is_fixed else self._shared
            return dataclasses.replace(find(name, target, key), copies=copies)
        backend = self._choose(model.backends, point)
        upstream_model = self._name_in(backend.pool, target)
        return ModelRoute(
            backend.pool,
            backend.revision,
            "",
            "" if upstream_model == name else upstream_model,
            copies,
        )

    @property
    def adapter_contents(self) -> dict[str, str]:
        """Names that mean an adapter, and its content, which is part of what a prefix is: the
        digest that engines report, or its name while none has."""
        if self._version != self._registry.version:
            self._learn()
        return self._adapter_contents

    def cards(self) -> list[Card]:
        """All names that can be requested, of all pools, each once."""
        if self._version != self._registry.version:
            self._learn()
        names = {*self._served, *self._adapters, *self._config}
        for model in self._config.values():
            names.update(model.adapters)
        hidden = {model.name for model in self._config.values() if model.hidden}
        return [self._card(name) for name in sorted(names - hidden)]

    def pools_of(self, name: str) -> list[str]:
        """Every pool that could get a request for this name."""
        target = self._target(name)
        model = self._config.get(target)
        if model is not None and model.backends:
            return sorted({backend.pool for backend in model.backends})
        if self._version != self._registry.version:
            self._learn()
        return sorted(self._pools_of(target))

    # below here: what is known

    def _learn(self) -> None:
        self._version = self._registry.version
        self._plain.clear()
        self._served.clear()
        self._adapters.clear()
        self._parents.clear()
        for endpoint in self._registry.endpoints.values():
            for name in endpoint.names:
                if name not in endpoint.adapters:
                    _count(self._served, name, endpoint.pool)
            for name in endpoint.adapters:
                _count(self._adapters, name, endpoint.pool)
                base = next((n for n in endpoint.names if n not in endpoint.adapters), "")
                self._parents.setdefault(name, base)
        for table in (self._served, self._adapters):
            for name, found in table.items():
                if len(found) > 1:
                    table[name] = self._owned(found)
        for model in self._config.values():
            pools = [backend.pool for backend in model.backends]
            pools = pools or list(self._served.get(self._target(model.name), ()))
            for name in model.adapters:
                self._parents.setdefault(name, model.name)
                for pool in pools:
                    self._adapters.setdefault(name, {}).setdefault(pool, 0)
        self._learn_placed()
        self._learn_contents()
        for model in self._config.values():
            target = self._target(model.name)
            if target in self._adapter_contents:
                self._adapter_contents[model.name] = self._adapter_contents[target]

    def _learn_placed(self) -> None:
        """Adapters that this router loads: they belong to their pool, wherever they lie now."""
        found: dict[str, dict[str, int]] = {}
        for pool in self._pools:
            bases = [name for name, pools in self._served.items() if pool.name in pools]
            bases += [
                model.name
                for model in self._config.values()
                if any(backend.pool == pool.name for backend in model.backends)
            ]
            for adapter in pool.adapters:
                found.setdefault(adapter.name, {})[pool.name] = 0
                if bases:
                    self._parents[adapter.name] = bases[0]
        for name, pools in found.items():
            self._adapters[name] = self._owned(pools) if len(pools) > 1 else pools
        self._canaries.clear()
        for pool in self._pools:
            self._learn_canaries(pool)

    def _learn_canaries(self, pool: PoolConfig) -> None:
        """Both names must be this pool's: a canary takes no other owner's requests. One that no
        engine has gets none, so that a load that fails fails nobody."""
        own = {adapter.name for adapter in pool.adapters} - self._served.keys()
        own = {name for name in own if pool.name in self._adapters[name]}
        for adapter in pool.adapters:
            if adapter.canary_of not in own or adapter.name not in own:
                continue
            endpoints = self._registry.routable(pool.name)
            if any(adapter.name in endpoint.adapters for endpoint in endpoints):
                self._canaries[adapter.canary_of] = adapter.name, adapter.canary_percent

    def _learn_contents(self) -> None:
        """Of each adapter what most engines have: one that has another content then has none of its
        prefixes. What is loaded nowhere now keeps its content, as blocks of it are still cached."""
        before, counts = self._adapter_contents, dict[str, Counter[str]]()
        for endpoint in self._registry.endpoints.values():
            for name in endpoint.adapters & endpoint.adapter_digests.keys():
                counts.setdefault(name, Counter())[endpoint.adapter_digests[name]] += 1
        self._adapter_contents = {}
        for name in self._adapters.keys() - self._served.keys():
            found = counts.get(name)
            # Of equally many the same one on all routers.
            self._adapter_contents[name] = (
                before.get(name, name)
                if found is None
                else max(found, key=lambda digest: (found[digest], digest))
            )

    def _owned(self, pools: dict[str, int]) -> dict[str, int]:
        """Those of the namespace that owns the name, and those that are in none."""
        claims = {pool: self._claim_of(pool) for pool in pools}
        oldest = min((claim for claim in claims.values() if claim[1]), default=("", ""))
        return {pool: n for pool, n in pools.items() if claims[pool][1] in ("", oldest[1])}

    def _claim_of(self, pool: str) -> tuple[str, str]:
        if (claim := self._claims.get(pool)) is not None:
            return claim
        # Pods that no Service stands for have claimed nothing yet.
        labels = (dict(endpoint.spec.labels) for endpoint in self._registry.pool(pool))
        namespace = next((found["namespace"] for found in labels if "namespace" in found), "")
        return (YOUNGEST, namespace)

    def _target(self, name: str) -> str:
        while (model := self._config.get(name)) is not None and model.alias_of:
            name = model.alias_of
        return name

    def _only_name(self) -> str:
        names = [card.name for card in self.cards() if card.parent is None]
        if len(names) == 1:
            return names[0]
        raise Rejected(
            400,
            "missing_model",
            f"model is required. {_there_are(names)}",
            param="model",
        )

    def _pools_of(self, target: str) -> dict[str, int]:
        return self._served.get(target) or self._adapters.get(target) or {}

    def _shared(self, name: str, target: str, key: str) -> ModelRoute:
        """By what engines serve; of an adapter with a canary, one of the two."""
        canary = self._canaries.get(target)
        if canary is None:
            return self._discovered(name, target, key)
        is_canary = _point(f"{target}\0canary", key) * 100.0 < canary[1]
        route = self._discovered(name, canary[0] if is_canary else target, key)
        return dataclasses.replace(route, is_canary=is_canary, is_trial=True)

    def _discovered(self, name: str, target: str, key: str) -> ModelRoute:
        pools = self._pools_of(target)
        if not pools:
            is_configured = name in self._config
            pool = self._unheard_pool(is_configured=is_configured)
            if not pool:
                raise self._not_found(name, target)
            upstream_model = "" if target == name else target
            return ModelRoute(pool, upstream_model=upstream_model, is_known=is_configured)
        # Several pools may serve a name while one replaces another: the one with most engines
        # ready, then most engines, then by name.
        pool = min(
            pools, key=lambda pool: (-len(self._registry.routable(pool)), -pools[pool], pool)
        )
        upstream_model = "" if target == name else target
        if target in self._served:
            return ModelRoute(pool, upstream_model=upstream_model)
        revisions = self._revisions.get(pool)
        revision = self._choose(revisions, _point(target, key)).revision if revisions else ""
        return ModelRoute(pool, revision, target, upstream_model)

    def _unheard_pool(self, *, is_configured: bool) -> str:
        """Where a name may turn up, so that its requests wait there; "" where it cannot.

        Only what the configuration names waits while other models are being served: a slip of the
        pen is reported at once, although some engine may never report.
        """
        if self._served and not is_configured:
            return ""
        unheard = {
            endpoint.pool
            for endpoint in self._registry.endpoints.values()
            if not endpoint.names and endpoint.state in ("connecting", "down")
        }
        if len(unheard) > 1:
            raise Rejected(
                503,
                "no_endpoints",
                "The engines that may serve this model have not reported yet.",
                retry_after_s=UNHEARD_RETRY_S,
            )
        return unheard.pop() if unheard else ""

    def _not_found(self, name: str, target: str) -> Rejected:
        there_are = _there_are([card.name for card in self.cards() if self.pools_of(card.name)])
        problem = "does not exist" if name not in self._config else "is served by no engine"
        if target != name:
            problem = f"stands for `{target[:200]}`, which no engine serves"
        message = f"The model `{name[:200]}` {problem}. {there_are}"
        return Rejected(404, "model_not_found", message, param="model")

    def _choose(self, backends: Sequence[BackendConfig], point: float) -> BackendConfig:
        """By weight among those that have an engine ready; among all where nobody has."""
        weighted = [backend for backend in backends if backend.weight > 0.0]
        first = _at(weighted, point)
        if self._registry.routable(first.pool, first.revision):
            return first
        able = [
            backend
            for backend in weighted
            if self._registry.routable(backend.pool, backend.revision)
        ]
        return _at(able, point) if able else first

    def _name_in(self, pool: str, name: str) -> str:
        """Under which name the pool's engines know the model."""
        names: set[str] = set()
        for endpoint in self._registry.pool(pool):
            if name in endpoint.names:
                return name
            names.update(endpoint.names[:1])
        return names.pop() if len(names) == 1 else name

    def _card(self, name: str) -> Card:
        target = self._target(name)
        parent = self._parents.get(target) if target not in self._served else None
        endpoints: list[Endpoint] = []
        for pool in self.pools_of(name):
            endpoints += self._registry.pool(pool)
        lengths = [endpoint.max_model_len for endpoint in endpoints if endpoint.max_model_len]
        sizes = [endpoint.vocab_size for endpoint in endpoints if endpoint.vocab_size]
        return Card(name, target, parent, min(lengths, default=0), min(sizes, default=0))


def _revisions_of(config: Sequence[ServedModelConfig]) -> dict[str, list[BackendConfig]]:
    """What the weights of a pool's model say of its revisions, for the pool's adapters: a revision
    on trial gets its share of their requests and no more."""
    found: dict[str, list[BackendConfig]] = {}
    for model in config:
        own: dict[str, list[BackendConfig]] = {}
        for backend in model.backends:
            own.setdefault(backend.pool, []).append(backend)
        for pool, backends in own.items():
            if all(one.revision for one in backends) and any(one.weight > 0.0 for one in backends):
                found.setdefault(pool, backends)
    return found


def _count(table: dict[str, dict[str, int]], name: str, pool: str) -> None:
    pools = table.setdefault(name, {})
    pools[pool] = pools.get(pool, 0) + 1


def _point(what: str, key: str) -> float:
    """A place in [0, 1) that belongs to the key."""
    text = f"{what}\0{key}".encode("utf-8", "surrogatepass")
    digest = blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _at(backends: Sequence[BackendConfig], point: float) -> BackendConfig:
    mark = point * sum(backend.weight for backend in backends)
    for backend in backends:
        mark -= backend.weight
        if mark < 0.0:
            return backend
    return backends[-1]


def _there_are(names: Sequence[str]) -> str:
    if not names:
        return "No model is being served yet."
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return "There are: " + ", ".join(f"`{name}`" for name in names[:MAX_NAMED]) + more + "."
