"""The cache of watched objects, by the LLMDeployment that they belong to.

Bodies are kept as bytes: a thousand LLMDeployments with all their children are some tens of
megabytes this way, and several hundred as dicts. A reconcile decodes its own handful.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from octavo_engine.protocol.kubernetes import DEPLOYMENT_LABEL
from octavo_operator.decide.accepted_spec import accepted_of, served_names
from octavo_operator.decide.adapters import AdapterClaim, age_of
from octavo_operator.decide.observed import DeploymentKey, Observed
from octavo_operator.objects import kinds
from octavo_operator.objects.names import answers

if TYPE_CHECKING:
    from collections.abc import Collection

    from octavo_operator.cluster.api import Listing
    from octavo_operator.objects.kinds import Kind, Object

# What watches keep up to date.
WATCHED = (
    kinds.LLM_DEPLOYMENT,
    kinds.LLM_ADAPTER,
    kinds.SERVICE_ACCOUNT,
    kinds.CONFIG_MAP,
    kinds.VOLUME_CLAIM,
    kinds.SERVICE,
    kinds.NETWORK_POLICY,
    kinds.DISRUPTION_BUDGET,
    kinds.DEPLOYMENT,
    kinds.POD_AUTOSCALER,
    kinds.POD,
)
# Listed at start and at each resync, not watched: a cluster may gain and lose them at any time, and
# a watch on a kind that goes takes all others with it.
LISTED = tuple(kind for kind in kinds.OWNED if kind.is_optional)


class _Names(NamedTuple):
    """The served names of one LLMDeployment."""

    created: str  # RFC 3339
    wanted: tuple[str, ...]  # by its spec
    held: frozenset[str]  # by the spec that was accepted last

    @property
    def all(self) -> frozenset[str]:
        return self.held | set(self.wanted)

    def claim(self, name: str) -> tuple[bool, str]:
        """The lower the better."""
        return name not in self.held, self.created


class World:
    """Fed by watches and lists; read by reconciles. Confined to the event loop."""

    def __init__(self) -> None:
        self._bodies: dict[Kind, dict[tuple[str, str], bytes]] = {}
        self._versions: dict[tuple[Kind, str, str], tuple[str, int]] = {}  # uid, version
        self._children: dict[DeploymentKey, set[tuple[Kind, str]]] = {}
        self._decoder = msgspec.json.Decoder(dict)
        self._encoder = msgspec.json.Encoder()
        self._rolling: set[DeploymentKey] = set()  # with engines of more than one revision
        self._servers: dict[str, set[DeploymentKey]] = {}  # by served name, of all namespaces
        self._names: dict[DeploymentKey, _Names] = {}
        # LLMAdapters: by the LLMDeployment that they name, and by the name that clients use.
        self._adapters: dict[DeploymentKey, set[str]] = {}
        self._adapter_names: dict[str, set[tuple[str, str]]] = {}
        self.synced: set[Kind] = set()

    def keep(self, kind: Kind, body: Object) -> DeploymentKey | None:
        """Store an object. The LLMDeployment to reconcile; None if the object is not newer."""
        namespace, name = kinds.namespace_of(body), kinds.name_of(body)
        version = _version(body)
        known = self._versions.get((kind, namespace, name))
        if known and known[0] == kinds.uid_of(body) and known[1] >= version:
            return None
        key = self._key_of(kind, body)
        if key is None:
            return None
        if kind == kinds.LLM_ADAPTER:
            self._leave_adapter(namespace, name)
        self._versions[(kind, namespace, name)] = (kinds.uid_of(body), version)
        trimmed = {**body, "metadata": {**body["metadata"]}}
        trimmed["metadata"].pop("managedFields", None)
        self._bodies.setdefault(kind, {})[(namespace, name)] = self._encoder.encode(trimmed)
        if kind == kinds.LLM_DEPLOYMENT:
            self._enter_names(key, body)
        elif kind == kinds.LLM_ADAPTER:
            self._adapters.setdefault(key, set()).add(name)
            self._adapter_names.setdefault(_adapter_name(body), set()).add((namespace, name))
        else:
            self._children.setdefault(key, set()).add((kind, name))
            self._note_engines(key, kind)
        return key

    def drop(self, kind: Kind, body: Object) -> DeploymentKey | None:
        """The object was deleted. An old deletion does not undo a newer creation."""
        namespace, name = kinds.namespace_of(body), kinds.name_of(body)
        known = self._versions.get((kind, namespace, name))
        if known and known[0] != kinds.uid_of(body):
            return None
        return self._forget(kind, namespace, name, self._key_of(kind, body))

    def replace(
        self, kind: Kind, listing: Listing, *, namespace: str | None = None
    ) -> set[DeploymentKey]:
        """A complete list: what it does not hold is gone. The keys that it touched."""
        touched: set[DeploymentKey] = set()
        listed: set[tuple[str, str]] = set()
        for body in listing.items:
            listed.add((kinds.namespace_of(body), kinds.name_of(body)))
            if (key := self.keep(kind, body)) is not None:
                touched.add(key)
        for place in [*self._bodies.get(kind, {})]:
            if place in listed or namespace not in (None, place[0]):
                continue
            if self._versions[(kind, *place)][1] < listing.version:  # else newer than the list
                body = self._decode(kind, *place)
                if (key := self._forget(kind, *place, self._key_of(kind, body))) is not None:
                    touched.add(key)
        self.synced.add(kind)
        return touched

    def replace_children(self, key: DeploymentKey, kind: Kind, listing: Listing) -> None:
        """All there are of a kind for one LLMDeployment."""
        listed = set()
        for body in listing.items:
            listed.add(kinds.name_of(body))
            self.keep(kind, body)
        for of, name in [*self._children.get(key, ())]:
            if of != kind or name in listed:
                continue
            if self._versions[(kind, key.namespace, name)][1] < listing.version:
                self._forget(kind, key.namespace, name, key)

    def deployment(self, key: DeploymentKey) -> Object | None:
        if not self.has(key):
            return None
        return self._decode(kinds.LLM_DEPLOYMENT, *key)

    def taken_names(self, key: DeploymentKey) -> dict[str, DeploymentKey]:
        """The served names of an LLMDeployment that belong to another one, and to which."""
        names = self._names[key].all if key in self._names else ()
        owners = {name: self._owner(name) for name in names}
        return {name: owner for name, owner in owners.items() if owner not in (None, key)}

    def _owner(self, name: str) -> DeploymentKey | None:
        """A name belongs to the LLMDeployment that was accepted with it; before that to the oldest
        that uses it, in all namespaces: routers know no namespaces. An older one that adds a name
        later does not take it over."""
        servers = self._servers.get(name, ())
        return min(servers, key=lambda key: (self._names[key].claim(name), key), default=None)

    def adapters(self, key: DeploymentKey) -> list[Object]:
        """The LLMAdapters that name this LLMDeployment, which need not exist."""
        names = sorted(self._adapters.get(key, ()))
        return [self._decode(kinds.LLM_ADAPTER, key.namespace, name) for name in names]

    def adapter_claims(self, key: DeploymentKey) -> list[AdapterClaim]:
        """The same, with who has the names that they claim."""
        return [AdapterClaim(body, self._adapter_owner(body)) for body in self.adapters(key)]

    def _adapter_owner(self, body: Object) -> str:
        own, name = (kinds.namespace_of(body), kinds.name_of(body)), _adapter_name(body)
        if (owner := self._owner(name)) is not None:
            return f"LLMDeployment {owner.name}{_elsewhere(owner.namespace, own[0])}"
        places = self._adapter_names.get(name, set())
        first = min(
            (self._decode(kinds.LLM_ADAPTER, *place) for place in places), key=age_of, default=body
        )
        place = (kinds.namespace_of(first), kinds.name_of(first))
        return "" if place == own else f"LLMAdapter {place[1]}{_elsewhere(place[0], own[0])}"

    def rivals(self, key: DeploymentKey) -> set[DeploymentKey]:
        """All others that use one of its served names."""
        names = self._names[key].all if key in self._names else ()
        return {other for name in names for other in self._servers[name]} - {key}

    def has(self, key: DeploymentKey) -> bool:
        return key in self._bodies.get(kinds.LLM_DEPLOYMENT, {})

    def all_keys(self) -> list[DeploymentKey]:
        return [DeploymentKey(*place) for place in self._bodies.get(kinds.LLM_DEPLOYMENT, {})]

    def rolling(self) -> list[DeploymentKey]:
        """Those that have engines of more than one revision."""
        return [key for key in self._rolling if self.has(key)]

    def observe(self, key: DeploymentKey) -> Observed:
        """Everything that serves this LLMDeployment. Children of an earlier one of the same name
        are included: the plan must see what is in its way."""
        children: dict[tuple[Kind, str], Object] = {}
        pods: list[Object] = []
        for kind, name in self._children.get(key, ()):
            body = self._decode(kind, key.namespace, name)
            if kind == kinds.POD:
                pods.append(body)
            else:
                children[(kind, name)] = body
        pods.sort(key=kinds.name_of)
        return Observed(children, tuple(pods))

    def __len__(self) -> int:
        return sum(map(len, self._bodies.values()))

    def _decode(self, kind: Kind, namespace: str, name: str) -> Object:
        body: Object = self._decoder.decode(self._bodies[kind][(namespace, name)])
        return body

    def _forget(
        self, kind: Kind, namespace: str, name: str, key: DeploymentKey | None
    ) -> DeploymentKey | None:
        if kind == kinds.LLM_ADAPTER:
            self._leave_adapter(namespace, name)
        if self._bodies.get(kind, {}).pop((namespace, name), None) is None:
            return None
        self._versions.pop((kind, namespace, name), None)
        if kind == kinds.LLM_DEPLOYMENT and key is not None:
            self._leave_names(key)
        if key is not None and (children := self._children.get(key)) is not None:
            children.discard((kind, name))
            self._note_engines(key, kind)
            if not children:
                del self._children[key]
        return key

    def _note_engines(self, key: DeploymentKey, kind: Kind) -> None:
        """Counted at each change: every reconcile asks, of the whole fleet."""
        if kind != kinds.DEPLOYMENT:
            return
        children = self._children[key]
        if sum(of == kind and answers(name) for of, name in children) > 1:
            self._rolling.add(key)
        else:
            self._rolling.discard(key)

    def _enter_names(self, key: DeploymentKey, body: Object) -> None:
        self._leave_names(key)
        earlier = accepted_of(body)
        held = () if earlier is None else served_names(msgspec.json.decode(earlier[1]), key.name)
        created = str(body["metadata"].get("creationTimestamp", ""))
        names = _Names(created, served_names(body.get("spec"), key.name), frozenset(held))
        self._names[key] = names
        for name in names.all:
            self._servers.setdefault(name, set()).add(key)

    def _leave_names(self, key: DeploymentKey) -> None:
        if (names := self._names.pop(key, None)) is None:
            return
        for name in names.all:
            servers = self._servers.get(name, set())
            servers.discard(key)
            if not servers:
                self._servers.pop(name, None)

    def _leave_adapter(self, namespace: str, name: str) -> None:
        if (namespace, name) not in self._bodies.get(kinds.LLM_ADAPTER, {}):
            return
        body = self._decode(kinds.LLM_ADAPTER, namespace, name)
        tables: list[tuple[dict[Any, set[Any]], Any, Any]] = [
            (self._adapters, self._key_of(kinds.LLM_ADAPTER, body), name),
            (self._adapter_names, _adapter_name(body), (namespace, name)),
        ]
        for table, key, entry in tables:
            entries = table.get(key, set())
            entries.discard(entry)
            if not entries:
                table.pop(key, None)

    def _key_of(self, kind: Kind, body: Object) -> DeploymentKey | None:
        namespace = kinds.namespace_of(body)
        if kind == kinds.LLM_ADAPTER:
            deployment = (body.get("spec") or {}).get("deployment")
            return DeploymentKey(namespace, str(deployment)) if deployment else None
        if kind == kinds.LLM_DEPLOYMENT:
            return DeploymentKey(namespace, kinds.name_of(body))
        name = kinds.labels_of(body).get(DEPLOYMENT_LABEL)
        return DeploymentKey(namespace, name) if name else None


def _adapter_name(body: Object) -> str:
    """That clients use."""
    return str((body.get("spec") or {}).get("name") or kinds.name_of(body))


def _elsewhere(namespace: str, here: str) -> str:
    return "" if namespace == here else f" in namespace {namespace}"


def are_synced(world: World, wanted: Collection[Kind]) -> bool:
    return all(kind in world.synced for kind in wanted)


def _version(body: Object) -> int:
    """NOTE: resource versions are opaque by contract, and numbers in every API server there is;
    since Kubernetes 1.35 clients may compare them."""
    text = str(body["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdigit() else 0
