"""An API server in memory: uids, resource versions, generations, field ownership, preconditions.

What a controller can observe of the real one, without a socket. Calls are numbered, and a hook may
fail, delay or end the caller before or after any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo_operator.cluster.api import Listing
from octavo_operator.errors import ApiRefused, ClusterError, Conflict, NotFound
from octavo_operator.objects import kinds
from octavo_operator.objects.kinds import Kind, Object

MANAGER = "octavo-operator"
WRITES = frozenset(("apply", "apply_status", "create", "replace", "patch", "condition", "delete"))
# Lists whose items are merged by a key; all others are exchanged whole.
KEYED: dict[tuple[str, ...], str] = {
    ("metadata", "ownerReferences"): "uid",
    ("status", "conditions"): "type",
    ("spec", "ports"): "port",
}


@dataclass(frozen=True)
class Call:
    number: int
    verb: str
    kind: Kind
    namespace: str | None
    name: str

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES


@dataclass(frozen=True)
class WatchEvent:
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    kind: Kind
    body: Object


@dataclass
class _Stored:
    body: Object
    owned: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)  # manager -> leaves


Hook = Callable[[Call], None]
Key = tuple[Kind, str, str]


class FakeCluster:
    def __init__(self, *, absent: frozenset[Kind] = frozenset()) -> None:
        self._stored: dict[Key, _Stored] = {}
        self._numbers = itertools.count(1)
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)
        self.absent = absent  # kinds this cluster does not serve
        self.calls: list[Call] = []
        self.events: list[WatchEvent] = []
        self.logs: dict[str, str | ClusterError] = {}  # by pod; of any container
        self.before: Hook = _nothing
        self.after: Hook = _nothing

    # --- as the operator sees it ---------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        with self._call("get", kind, namespace, name):
            stored = self._stored.get((kind, namespace, name))
            return _copy(stored.body) if stored else None

    async def find(
        self, kind: Kind, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> Listing:
        with self._call("find", kind, namespace, ""):
            if kind in self.absent:
                raise NotFound(f"the server could not find {kind.plural}", status=404)
            found = self.all(kind, namespace, selector=selector)
            if fields:
                found = [body for body in found if _matches(body, fields)]
            return Listing(found, next(self._versions))

    async def apply(self, body: Object) -> Object:
        with self._call(
            "apply", kinds.kind_of(body), kinds.namespace_of(body), kinds.name_of(body)
        ):
            return self._apply(body, MANAGER, drop="status")

    async def apply_status(self, body: Object) -> Object:
        kind, namespace, name = kinds.kind_of(body), kinds.namespace_of(body), kinds.name_of(body)
        with self._call("apply_status", kind, namespace, name):
            if (kind, namespace, name) not in self._stored:
                raise NotFound(f"{kind.plural} {name} not found", status=404)
            return self._apply(
                {**{k: v for k, v in body.items() if k != "spec"}}, MANAGER + "/status"
            )

    async def create(self, body: Object) -> Object:
        kind, namespace = kinds.kind_of(body), kinds.namespace_of(body)
        meta = dict(body["metadata"])
        if "name" not in meta:
            meta["name"] = f"{meta['generateName']}{next(self._uids):05x}"
        with self._call("create", kind, namespace, meta["name"]):
            return self.put({**body, "metadata": meta}, must_be_new=True)

    async def replace(self, body: Object) -> Object:
        kind, namespace, name = kinds.kind_of(body), kinds.namespace_of(body), kinds.name_of(body)
        with self._call("replace", kind, namespace, name):
            stored = self._require(kind, namespace, name)
            self._check(stored, body["metadata"])
            return self._store(kind, namespace, name, _copy(body), stored)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        with self._call("patch", kind, namespace, name):
            return self.merge(kind, namespace, name, patch)

    async def set_pod_condition(self, namespace: str, name: str, condition: Object) -> Object:
        with self._call("condition", kinds.POD, namespace, name):
            stored = self._require(kinds.POD, namespace, name)
            condition = dict(condition)
            self._check(stored, {"uid": condition.pop("podUid")})
            body = _copy(stored.body)
            conditions = body.setdefault("status", {}).setdefault("conditions", [])
            types = [c["type"] for c in conditions]
            if condition["type"] in types:
                conditions[types.index(condition["type"])] = condition
            else:
                conditions.append(condition)
            return self._store(kinds.POD, namespace, name, body, stored)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        with self._call("delete", kind, namespace, name):
            stored = self._stored.get((kind, namespace, name))
            if stored is None:
                return
            self._check(stored, {"uid": uid, "resourceVersion": resource_version})
            self.remove(kind, namespace, name)

    async def log(self, namespace: str, pod: str, container: str, *, lines: int) -> str:
        with self._call("log", kinds.POD, namespace, pod):
            reported = self.logs.get(pod, "")
            if isinstance(reported, ClusterError):
                raise reported
            return "\n".join(reported.splitlines()[-lines:])

    # --- as users, kubelets and other controllers act: no hooks, not counted ---------------------

    def all(self, kind: Kind, namespace: str | None = None, *, selector: str = "") -> list[Object]:
        wanted = [part.partition("=") for part in selector.split(",") if part]
        found = []
        for (of, space, _), stored in self._stored.items():
            if of != kind or (namespace and space != namespace):
                continue
            labels = kinds.labels_of(stored.body)
            if all(k in labels if not eq else labels.get(k) == v for k, eq, v in wanted):
                found.append(_copy(stored.body))
        return found

    def one(self, kind: Kind, namespace: str, name: str) -> Object:
        return _copy(self._require(kind, namespace, name).body)

    def has(self, kind: Kind, namespace: str, name: str) -> bool:
        return (kind, namespace, name) in self._stored

    def put(self, body: Object, *, must_be_new: bool = False) -> Object:
        """As `kubectl replace --force=false` or create, by somebody else."""
        kind, namespace, name = kinds.kind_of(body), kinds.namespace_of(body), kinds.name_of(body)
        stored = self._stored.get((kind, namespace, name))
        if stored is not None and must_be_new:
            raise Conflict(
                f"{kind.plural} {name!r} already exists", status=409, reason="AlreadyExists"
            )
        return self._store(kind, namespace, name, _copy(body), stored or _Stored({}))

    def merge(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        stored = self._require(kind, namespace, name)
        self._check(stored, patch.get("metadata", {}))
        body = _copy(stored.body)
        _merge(body, patch)
        body["metadata"]["uid"] = stored.body["metadata"]["uid"]
        return self._store(kind, namespace, name, body, stored)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """With all that it owned, as the garbage collector does in the background."""
        stored = self._stored.pop((kind, namespace, name))
        stored.body["metadata"]["resourceVersion"] = str(next(self._versions))
        self.events.append(WatchEvent("DELETED", kind, _copy(stored.body)))
        uids = {kinds.uid_of(other.body) for other in self._stored.values()}
        orphans = [
            key
            for key, other in self._stored.items()
            if (owners := kinds.owner_uids(other.body)) and not uids & set(owners)
        ]
        for key in orphans:
            if key in self._stored:
                self.remove(*key)

    @property
    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.is_write]

    # --- inside ---------------------------------------------------------------------------------

    def _call(self, verb: str, kind: Kind, namespace: str | None, name: str) -> _Numbered:
        return _Numbered(self, Call(next(self._numbers), verb, kind, namespace, name))

    def _require(self, kind: Kind, namespace: str, name: str) -> _Stored:
        stored = self._stored.get((kind, namespace, name))
        if stored is None:
            raise NotFound(f"{kind.plural} {name!r} not found", status=404)
        return stored

    def _check(self, stored: _Stored, wanted: Mapping[str, Any]) -> None:
        meta = stored.body["metadata"]
        for name in ("uid", "resourceVersion"):
            if wanted.get(name) and wanted[name] != meta[name]:
                raise Conflict(f"the {name} is {meta[name]}, not {wanted[name]}", status=409)

    def _apply(self, body: Object, manager: str, drop: str = "") -> Object:
        kind, namespace, name = kinds.kind_of(body), kinds.namespace_of(body), kinds.name_of(body)
        if kind in self.absent:
            raise NotFound(f"the server could not find {kind.plural}", status=404)
        stored = self._stored.get((kind, namespace, name))
        meta = body["metadata"]
        if stored is None:
            if meta.get("uid") or meta.get("resourceVersion"):
                raise Conflict("uid mismatch: the object does not exist", status=409)
            stored = _Stored(
                {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {}}
            )
        else:
            self._check(stored, meta)
        given = {
            path: value
            for path, value in _leaves(body)
            if path[0] not in ("apiVersion", "kind", drop)
            and path[:2] not in (("metadata", "uid"), ("metadata", "resourceVersion"))
        }
        result = _copy(stored.body)
        others = set().union(*(paths for m, paths in stored.owned.items() if m != manager))
        for path in stored.owned.get(manager, set()) - given.keys() - others:
            _remove(result, path)
        for path, value in given.items():
            _set(result, path, _copy(value))
        controllers = [
            o for o in result["metadata"].get("ownerReferences", []) if o.get("controller")
        ]
        if len(controllers) > 1:
            raise ApiRefused("Only one reference can have Controller set to true", status=422)
        stored.owned[manager] = set(given)
        return self._store(kind, namespace, name, result, stored)

    def _store(
        self, kind: Kind, namespace: str, name: str, body: Object, stored: _Stored
    ) -> Object:
        old = stored.body
        meta = body.setdefault("metadata", {})
        is_new = (kind, namespace, name) not in self._stored
        if is_new:
            meta["uid"] = f"uid-{next(self._uids)}"
            meta["generation"] = 1
            meta.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        else:
            for key in ("uid", "resourceVersion", "generation", "creationTimestamp"):
                meta[key] = old["metadata"][key]
            if body == old:
                return _copy(body)
            if body.get("spec") != old.get("spec"):
                meta["generation"] = old["metadata"]["generation"] + 1
        meta["resourceVersion"] = str(next(self._versions))
        body["apiVersion"], body["kind"] = kind.api_version, kind.name
        stored.body = body
        self._stored[(kind, namespace, name)] = stored
        self.events.append(WatchEvent("ADDED" if is_new else "MODIFIED", kind, _copy(body)))
        return _copy(body)


class _Numbered:
    def __init__(self, cluster: FakeCluster, call: Call) -> None:
        self._cluster, self._call = cluster, call

    def __enter__(self) -> None:
        self._cluster.calls.append(self._call)
        self._cluster.before(self._call)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._cluster.after(self._call)


def _matches(body: Object, fields: str) -> bool:
    """Of the form involvedObject.uid=…,type=…"""
    for part in fields.split(","):
        path, _, wanted = part.partition("=")
        value: Any = body
        for name in path.split("."):
            value = (value or {}).get(name)
        if value != wanted:
            return False
    return True


def _copy(value: Object) -> Object:
    """Everything here is JSON, and this is several times faster than copy.deepcopy."""
    copied: Object = msgspec.json.decode(msgspec.json.encode(value))
    return copied


def _nothing(call: Call) -> None:
    pass


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    if path in KEYED and isinstance(value, list):
        key = KEYED[path]
        return [((*path, f"{key}={item[key]}"), item) for item in value]
    return [(path, value)]


def _set(body: Object, path: tuple[str, ...], value: Any) -> None:
    for depth, part in enumerate(path[:-1], 1):
        if path[:depth] in KEYED:
            items = body.setdefault(part, [])
            key = KEYED[path[:depth]]
            wanted = path[depth].partition("=")[2]
            for index, item in enumerate(items):
                if str(item[key]) == wanted:
                    items[index] = value
                    return
            items.append(value)
            return
        body = body.setdefault(part, {})
    body[path[-1]] = value


def _remove(body: Object, path: tuple[str, ...]) -> None:
    parents = []
    for depth, part in enumerate(path[:-1], 1):
        if path[:depth] in KEYED:
            key, _, wanted = path[depth].partition("=")
            body[part] = [item for item in body.get(part, []) if str(item[key]) != wanted]
            return
        parents.append((body, part))
        body = body.get(part, {})
    body.pop(path[-1], None)
    for parent, part in reversed(parents):
        if part in parent and not parent[part]:
            del parent[part]


def _merge(body: Any, patch: Any) -> None:
    for key, value in patch.items():
        if value is None:
            body.pop(key, None)
        elif isinstance(value, Mapping):
            if not isinstance(body.get(key), dict):
                body[key] = {}
            _merge(body[key], value)
        else:
            body[key] = _copy(value)
