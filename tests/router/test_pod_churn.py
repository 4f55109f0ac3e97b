"""Pods come, leave, flap and are replaced while clients ask: what the API server's word does.

A real router, engines on addresses of their own, and an API server that can also fall silent.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from octavo_engine.protocol.endpoints import POD_UID_HEADER, STREAM_PATH
from octavo_engine.protocol.stream import CONTENT_TYPE, Hello, Snapshot
from tests.fakes.engine_stream import pack_frame
from tests.fakes.http_client import RawClient, chat
from tests.fakes.kube_watch import KubeWatch, pod, service
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event, fixed
from tests.router.test_server import configuration, running, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from octavo_router.app import App


@dataclass
class Engine:
    """One of ours, as far as routers see: tells who it is, and takes prompts only for itself."""

    uid: str
    num_answered: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)  # of streams

    async def __call__(self, peer: Peer, request: Received) -> None:
        if STREAM_PATH.encode() in request.line:
            await peer.begin_stream(CONTENT_TYPE)
            hello = Hello(epoch=self.uid, model="m", names=["m"], pod_uid=self.uid)
            await peer.chunk(pack_frame(hello) + pack_frame(Snapshot(b"", last=True)))
            await peer.left()
        elif request.header(POD_UID_HEADER) != self.uid:
            await peer.answer(b'{"error":{"code":"wrong_pod"}}', status="421 Misdirected Request")
        elif request.json.get("stream"):
            await peer.begin_stream()
            await peer.chunk(event("hel"))
            await self.go_on.wait()
            await peer.chunk(event("lo", "stop") + b"data: [DONE]\n\n")
            await peer.end_stream()
        else:
            self.num_answered += 1
            await fixed(peer, request)


class Cluster:
    """Pods on 127.0.0.x, all on one port, and the API server that tells of them."""

    def __init__(self, api: KubeWatch, port: int) -> None:
        self.api = api
        self.port = port
        self.engines: dict[str, Engine] = {}
        self._ups: dict[str, ScriptedUpstream] = {}
        self.app: App
        self.client: RawClient

    async def run(self, name: str, ip: str, *, tell: bool = True, uid: str = "") -> Engine:
        engine = self.engines[name] = Engine(uid or f"uid-{name}")
        up = self._ups[name] = ScriptedUpstream(engine, port=self.port, host=ip)
        await up.__aenter__()
        if tell:
            self.api.put("pods", pod(name, deployment="m", ip=ip))
        return engine

    async def kill(self, name: str) -> None:
        up = self._ups.pop(name)
        for peer in up.peers:
            if not peer.has_left.is_set():
                peer.reset()
        await up.__aexit__(None, None, None)

    async def stop(self) -> None:
        for name in tuple(self._ups):
            await self.kill(name)

    async def until(self, fact: Callable[[], bool]) -> float:
        """Seconds that it took."""
        began_at = time.monotonic()
        while not fact():  # noqa: ASYNC110  # facts have no events
            await asyncio.sleep(0.001)
        return time.monotonic() - began_at

    @property
    def ready(self) -> set[str]:
        return {one.id for one in self.app.registry.routable("default/m")}

    async def ask(self, count: int) -> set[str]:
        """Who answered; all must be answered."""
        served = set()
        for _ in range(count):
            answer = await self.client.ask(chat())
            assert answer.status == 200, answer
            served.add((answer.header("x-served-by") or "").partition(":")[0])
        return served


@asynccontextmanager
async def cluster(*pods: tuple[str, str]) -> AsyncIterator[Cluster]:
    """With these pods (name, address) ready, and a router that knows them."""
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(KubeWatch())
        probe = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = probe.sockets[0].getsockname()[1]
        probe.close()
        world = Cluster(api, port)
        stack.push_async_callback(world.stop)
        api.put("services", service("m", {"names": ["m"], "port": port}, deployment="m"))
        for name, ip in pods:
            await world.run(name, ip)
        text = f"""
discovery: {{kubernetes: {{enabled: true, api: '{api.url}', namespaces: [default]}}}}
routing: {{policy: round-robin}}
"""
        app, server = await stack.enter_async_context(running(configuration(text=text)))
        world.app = app
        world.client = await stack.enter_async_context(await RawClient.open(server.port))
        await until_ready(app)
        await world.until(lambda: len(world.ready) == len(pods))
        yield world


# The API server's own tests run on this loop, too; uvloop waits for its open watches at the end.
on_plain_loop = partial(on_loop, new_loop=asyncio.new_event_loop)

A, B, C = ("a", "127.0.0.2"), ("b", "127.0.0.3"), ("c", "127.0.0.4")


@on_plain_loop
async def test_a_pod_that_is_being_deleted_gets_nothing_new_and_ends_what_it_has():
    """Within a second of its deletionTimestamp, though it is ready and answers still."""
    async with cluster(A, B) as world:
        port = world.client.writer.get_extra_info("peername")[1]
        async with await RawClient.open(port) as one, await RawClient.open(port) as other:
            served = set()
            for client in (one, other):
                await client.post(chat(stream=True))
                served.add((await client.head()).header("x-served-by"))
                assert await client.chunk() == event("hel")
            assert len(served) == 2
            world.api.put("pods", pod("a", deployment="m", ip=A[1], terminating=True))
            # One second is promised; a machine that is busy may need more, a new list minutes.
            assert await world.until(lambda: world.ready == {"uid-b"}) < 5.0
            assert await world.ask(10) == {B[1]}
            for engine in world.engines.values():
                engine.go_on.set()
            for client in (one, other):
                assert (await client.chunk()).endswith(b"data: [DONE]\n\n")


@on_plain_loop
async def test_a_pod_that_is_not_ready_is_never_asked():
    """Though its engine runs and says that it is."""
    async with cluster(A) as world:
        await world.run("b", B[1], tell=False)
        world.api.put("pods", pod("b", deployment="m", ip=B[1], ready=False))
        await world.until(lambda: "uid-b" in world.app.registry.endpoints)
        endpoint = world.app.registry.endpoints["uid-b"]
        await world.until(lambda: bool(endpoint.names))  # it was heard
        assert await world.ask(10) == {A[1]}
        world.api.put("pods", pod("b", deployment="m", ip=B[1]))
        await world.until(lambda: world.ready == {"uid-a", "uid-b"})
        assert await world.ask(4) == {A[1], B[1]}


@on_plain_loop
async def test_readiness_that_flaps_costs_no_request():
    """After the first flips it has to stay ready for a while."""
    async with cluster(A, B) as world:
        for flip in range(20):
            world.api.put("pods", pod("a", deployment="m", ip=A[1], ready=bool(flip % 2)))
            await world.ask(2)
        world.api.put("pods", pod("a", deployment="m", ip=A[1]))
        specs = world.app.registry.endpoints
        await world.until(lambda: specs["uid-a"].spec.is_ready)
        await world.until(lambda: world.ready == {"uid-a", "uid-b"})
        assert await world.ask(4) == {A[1], B[1]}


@on_plain_loop
async def test_pods_are_replaced_while_nobody_can_be_asked_for_them():
    """The watch is down, one pod dies, another one comes; then it is listed again."""
    async with cluster(A, B) as world:
        await world.api.stop()
        await world.kill("a")
        assert await world.ask(10) == {B[1]}  # stale entries die by what they do
        world.api.delete("pods", "a")
        await world.run("c", C[1])
        assert await world.ask(4) == {B[1]}  # nobody knows of it yet
        await world.api.start()
        assert await world.until(lambda: world.ready == {"uid-b", "uid-c"}) < 5.0
        assert set(world.app.registry.endpoints) == {"uid-b", "uid-c"}
        assert await world.ask(4) == {B[1], C[1]}


@on_plain_loop
async def test_an_address_that_is_somebody_elses_by_now_gets_no_prompt():
    """The API server tells nothing; the stranger itself sends each prompt back."""
    async with cluster(A, B) as world:
        world.api.frozen = True
        await world.kill("a")
        stranger = await world.run("x", A[1], tell=False)
        assert await world.ask(20) == {B[1]}
        assert stranger.num_answered == 0
        await world.until(lambda: "pod uid-x" in world.app.registry.endpoints["uid-a"].reason)
        assert world.ready == {"uid-b"}


@on_plain_loop
async def test_one_that_says_that_it_is_another_is_dropped_at_once():
    """Before its stream told, 421 is enough, and the request is answered elsewhere."""
    async with cluster(A, B) as world:
        world.engines["a"].uid = "uid-z"  # of requests; its stream goes on as it was
        assert await world.ask(6) == {B[1]}
        assert world.ready == {"uid-b"}
        assert world.engines["a"].num_answered == 0
