"""An API server as far as list and watch go, over real sockets, that can also misbehave."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

Object = dict[str, Any]

RESOURCES = ("pods", "services", "endpointslices")


@dataclass
class _Event:
    version: int
    kind: str  # ADDED, MODIFIED, DELETED
    resource: str
    body: Object


@dataclass
class KubeWatch:
    """Use as `async with KubeWatch() as api`; change the world with `put` and `delete`."""

    port: int = 0
    token: str = ""  # wanted of every request
    denied: set[str] = field(default_factory=set)  # resources that answer 403
    page_limit: int = 500
    frozen: bool = False  # watches are accepted and then say nothing at all
    requests: list[str] = field(default_factory=list)
    version: int = 100

    def __post_init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.num_watches = 0
        self._events: list[_Event] = []
        self._oldest = 0  # watches from before are told 410
        self._news = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._end = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            self._server = None

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

    def bookmark(self, resource: str) -> None:
        self.version += 1
        body = {"metadata": {"resourceVersion": str(self.version)}}
        self._tell(_Event(self.version, "BOOKMARK", resource, body))

    def compact(self) -> None:
        """Forgets all events so far: who did not hear them has to list again."""
        self._events.clear()
        self._oldest = self.version

    # -- mischief

    def cut(self) -> None:
        """Resets every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await self._answer(head, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the router went away, which is its right
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        target = head.split()[1]
        self.requests.append(target)
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        parts = url.path.strip("/").split("/")
        resource = parts[-1]
        namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else ""
        if self.token and f"authorization: Bearer {self.token}" not in head:
            return _reply(writer, 401, {"code": 401})
        if resource in self.denied:
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
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.num_watches += 1
        at, end = int(query["resourceVersion"]), self._end
        if at < self._oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            _chunk(writer, {"type": "ERROR", "object": status})
            writer.write(b"0\r\n\r\n")
            return
        while not end.is_set():
            news = self._news
            for event in list(self._events):
                if event.version > at and not self.frozen:
                    at = event.version
                    place = event.body["metadata"].get("namespace")
                    if event.resource == resource and place in (namespace or place, None):
                        _chunk(writer, {"type": event.kind, "object": event.body})
            waits = [asyncio.create_task(news.wait()), asyncio.create_task(end.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if writer.is_closing():
                raise ConnectionResetError
        writer.write(b"0\r\n\r\n")


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
) -> Object:
    """An engine pod as the operator makes it."""
    meta: Object = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "labels": {
            "octavo.dev/deployment": deployment,
            "octavo.dev/revision": revision,
            "app.kubernetes.io/component": "engine",
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
) -> Object:
    meta: Object = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": {}}
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
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if key not in labels or (value and labels[key] != value):
            return False
    return True


def _reply(writer: asyncio.StreamWriter, status: int, body: Object) -> None:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % (status, len(data)) + data)


def _chunk(writer: asyncio.StreamWriter, value: Object) -> None:
    data = json.dumps(value).encode() + b"\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
