"""An API server as far as list and watch go, over real sockets, that can also misbehave."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.raw_http import Head, RawHttp, begin_chunks, chunk, whole

Object = dict[str, Any]


@dataclass
class _Event:
    version: int
    kind: str  # ADDED, MODIFIED, DELETED
    resource: str
    body: Object


@dataclass
class KubeWatch(RawHttp):
    """Use as `async with KubeWatch() as api`; change the world with `put` and `delete`."""

    token: str = ""  # wanted of every request
    denied: set[str] = field(default_factory=set)  # resources that answer 403
    denied_namespaces: set[str] = field(default_factory=set)
    page_limit: int = 500
    frozen: bool = False  # watches are accepted and then say nothing at all
    version: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.num_watches = 0
        self._events: list[_Event] = []
        self._oldest = 0  # watches from before get 410
        self._news = asyncio.Event()
        self._end = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- the world

    def put(self, resource: str, body: Object) -> None:
        meta = body["metadata"]
        key = (resource, meta["namespace"], meta["name"])
        kind = "MODIFIED" if key in self.objects else "ADDED"
        self._record(kind, resource, key, copy.deepcopy(body))

    def delete(self, resource: str, name: str, namespace: str = "default") -> None:
        key = (resource, namespace, name)
        self._record("DELETED", resource, key, self.objects.pop(key))

    def delete_late(self, resource: str, body: Object) -> None:
        """Tells that an object is gone whose name another one has by now."""
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self._tell(_Event(self.version, "DELETED", resource, body))

    def bookmark(self, resource: str) -> None:
        self.version += 1
        body = {"metadata": {"resourceVersion": str(self.version)}}
        self._tell(_Event(self.version, "BOOKMARK", resource, body))

    def compact(self) -> None:
        """Forgets all events so far: who did not hear them has to list again."""
        self._events.clear()
        self._oldest = self.version

    # -- mischief

    def end_watches(self) -> None:
        """Ends them properly, as after timeoutSeconds."""
        self._end.set()
        self._end = asyncio.Event()

    def _record(self, kind: str, resource: str, key: tuple[str, str, str], body: Object) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        if kind != "DELETED":
            self.objects[key] = body
        self._tell(_Event(self.version, kind, resource, body))

    def _tell(self, event: _Event) -> None:
        self._events.append(event)
        self._news.set()
        self._news = asyncio.Event()

    # -- HTTP

    async def answer(
        self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        url = urlsplit(head.target)
        query = dict(parse_qsl(url.query))
        parts = url.path.strip("/").split("/")
        resource = parts[-1]
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        if self.token and head.headers.get("authorization") != f"Bearer {self.token}":
            return _reply(writer, 401, {"code": 401})
        if resource in self.denied or namespace in self.denied_namespaces:
            return _reply(writer, 403, {"code": 403})
        if "watch" in query:
            return await self._watch(writer, resource, namespace, query)
        return _reply(writer, 200, self._list(resource, namespace, query))

    def _list(self, resource: str, namespace: str, query: dict[str, str]) -> Object:
        matching = [
            body
            for (kind, place, _), body in sorted(self.objects.items())
            if kind == resource and place == (namespace or place) and _selected(body, query)
        ]
        at = int(query.get("continue", "0"))
        limit = min(self.page_limit, int(query.get("limit", "500")))
        meta: Object = {"resourceVersion": str(self.version)}
        if at + limit < len(matching):
            meta["continue"] = str(at + limit)
        return {"metadata": meta, "items": matching[at : at + limit]}

    async def _watch(
        self, writer: asyncio.StreamWriter, resource: str, namespace: str, query: dict[str, str]
    ) -> None:
        begin_chunks(writer, "application/json")
        self.num_watches += 1
        at, end = int(query["resourceVersion"]), self._end
        if at < self._oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            _line(writer, {"type": "ERROR", "object": status})
            chunk(writer, b"")
            return
        while not end.is_set():
            news = self._news
            for event in list(self._events):
                if event.version > at and not self.frozen:
                    at = event.version
                    place = event.body["metadata"].get("namespace")
                    if event.resource == resource and place in (namespace or place, None):
                        _line(writer, {"type": event.kind, "object": event.body})
            waits = [asyncio.create_task(news.wait()), asyncio.create_task(end.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if writer.is_closing():
                raise ConnectionResetError
        chunk(writer, b"")


def pod(
    name: str,
    *,
    deployment: str = "smollm2",
    ip: str = "10.0.0.1",
    uid: str = "",
    ready: bool = True,
    revision: str = "r1",
    terminating: bool = False,
    phase: str = "Running",
    namespace: str = "default",
    component: str = "engine",
) -> Object:
    """An engine pod as the operator makes it."""
    meta: Object = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "labels": {
            "octavo.dev/deployment": deployment,
            "octavo.dev/revision": revision,
            "app.kubernetes.io/component": component,
        },
    }
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [
        {"type": "Ready", "status": "False"},  # waits for the gate
        {"type": "ContainersReady", "status": "True" if ready else "False"},
    ]
    status: Object = {"phase": phase, "conditions": conditions}
    if ip:
        status["podIP"] = ip
    return {"metadata": meta, "status": status}


def service(
    name: str,
    routing: Object | str | None,
    *,
    deployment: str = "",
    namespace: str = "default",
    created: str = "2026-01-01T00:00:00Z",
) -> Object:
    meta: Object = {
        "name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": {},
        "creationTimestamp": created,
    }  # fmt: skip
    if deployment:
        meta["labels"]["octavo.dev/deployment"] = deployment
    if routing is not None:
        text = routing if isinstance(routing, str) else json.dumps(routing)
        meta["annotations"] = {"octavo.dev/routing": text}
    return {"metadata": meta, "spec": {"ports": [{"name": "http", "port": 80}]}}


def endpoint_slice(
    name: str,
    service_name: str,
    endpoints: list[Object] | None,
    *,
    ports: list[Object] | None = None,
    namespace: str = "default",
) -> Object:
    labels = {"kubernetes.io/service-name": service_name}
    meta = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": labels}
    ports = [{"name": "http", "port": 8000}] if ports is None else ports
    return {"metadata": meta, "endpoints": endpoints, "ports": ports}


def _selected(body: Object, query: dict[str, str]) -> bool:
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, re.split(r",(?![^(]*\))", query.get("labelSelector", ""))):
        key, values = term.strip(), ""
        if match := re.fullmatch(r"(\S+?)(?:=(\S+)| in \((.*)\))", key):
            key, values = match[1], match[2] or match[3]
        if key not in labels or (values and labels[key] not in re.split(r",\s*", values)):
            return False
    return True


def _reply(writer: asyncio.StreamWriter, status: int, body: Object) -> None:
    whole(writer, status, json.dumps(body).encode(), "application/json")


def _line(writer: asyncio.StreamWriter, value: Object) -> None:
    chunk(writer, json.dumps(value).encode() + b"\n")
