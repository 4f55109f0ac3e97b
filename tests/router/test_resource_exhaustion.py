"""The machine runs short of something: the router does less, says so, and recovers."""

from __future__ import annotations

import asyncio
import errno
import itertools
import resource
import signal
import threading
from contextlib import AsyncExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.fakes.http_client import Answer, RawClient, chat
from tests.fakes.router_process import RouterProcess, routing
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream
from tests.router.test_server import plain_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 2**20
LIMIT = 160 * MIB  # of a router that takes some 40


@contextmanager
def limited(process_id: int, kind: int, limit: int) -> Iterator[None]:
    """For a while a process may not have more."""
    before = resource.prlimit(process_id, kind, (limit, resource.prlimit(process_id, kind)[1]))
    try:
        yield
    finally:
        resource.prlimit(process_id, kind, before)


@contextmanager
def in_front_of(upstream: ScriptedUpstream, *flags: str) -> Iterator[RouterProcess]:
    """Run it in a thread: the upstream is this loop's."""
    url = f"http://127.0.0.1:{upstream.port}"
    with routing("--upstreams", url, *flags) as router:
        yield router


class NoSockets:
    """A network that can make none: that is known at once, or told later."""

    def __init__(self, number: int, *, is_told_later: bool) -> None:
        self._error = OSError(number, "none left")
        self._is_told_later = is_told_later

    def open(
        self, protocol: Any, host: str, port: int, on_done: Callable[[OSError | None], None]
    ) -> Any:
        if not self._is_told_later:
            raise self._error
        asyncio.get_running_loop().call_soon(on_done, self._error)
        return SimpleNamespace(cancel=lambda: None)

    async def connect(self, *_: Any, **__: Any) -> None:
        raise self._error


@on_loop
async def test_without_ports_or_files_requests_fail_and_no_engine_is_blamed():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        reported: list[str] = []
        rig.proxy.dispatcher.on_result = (  # type: ignore[attr-defined]
            lambda pool, result: reported.append(result.value)
        )
        pool = rig.upstreams.of(rig.endpoints[0]).pool
        network = pool._network
        for number, later in itertools.product((errno.EMFILE, errno.EADDRNOTAVAIL), (True, False)):
            pool._network = NoSockets(number, is_told_later=later)  # type: ignore[assignment]
            for _ in range(6):  # more than eject an engine that refuses
                answer = await client.ask(chat())
                assert (answer.status, answer.code) == (503, "upstream_unreachable")
                assert answer.header("retry-after") is not None
        assert set(reported) == {"client_gone"}  # nobody's fault
        pool._network = network
        assert (await client.ask(chat())).status == 200
        await rig.settled()


def test_a_full_disk_costs_lines_of_the_log_and_no_request():
    async def story() -> None:
        async with ScriptedUpstream(plain_server) as upstream:
            await asyncio.to_thread(reported, upstream)

    def reported(upstream: ScriptedUpstream) -> None:
        with in_front_of(upstream) as router:
            size = router.log.stat().st_size
            with limited(router.process.pid, resource.RLIMIT_FSIZE, size):
                for _ in range(30):
                    assert router.client.post("/v1/chat/completions", json=chat()).is_success
                router.until(lambda: router.metric("octavo_router_requests_total") == 30)
                assert router.log.stat().st_size == size
            router.client.post("/v1/chat/completions", json=chat()).raise_for_status()
            router.until(lambda: len(router.access_lines) > 0)

    asyncio.run(story())


def test_without_file_descriptors_who_is_in_is_served_and_others_come_in_later():
    async def story() -> None:
        async with ScriptedUpstream(plain_server) as upstream:
            await asyncio.to_thread(reported, upstream)

    def reported(upstream: ScriptedUpstream) -> None:
        with in_front_of(upstream) as router:
            router.client.post("/v1/chat/completions", json=chat()).raise_for_status()
            used = psutil.Process(router.process.pid).num_fds()
            with limited(router.process.pid, resource.RLIMIT_NOFILE, used + 8):
                asyncio.run(crowd(router))
            assert router.process.poll() is None
            asyncio.run(all_are_served(router))

    async def crowd(router: RouterProcess) -> None:
        """More than can be taken: some are, and are answered one way or the other."""
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(await RawClient.open(router.port))
                for _ in range(40)
            ]
            tasks = [asyncio.create_task(client.get("/health")) for client in clients]
            done, waiting = await asyncio.wait(tasks, timeout=5.0, return_when="FIRST_COMPLETED")
            assert done  # not all is lost
            for task in waiting:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def all_are_served(router: RouterProcess) -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(await RawClient.open(router.port))
                for _ in range(40)
            ]
            answers = await asyncio.gather(*(client.ask(chat()) for client in clients))
            assert {answer.status for answer in answers} == {200}

    asyncio.run(story())


@pytest.mark.slow
def test_memory_is_refused_before_it_is_taken_and_comes_back(tmp_path: Path):
    """Bodies that wait are what grows; the process stays below its limit, and alive."""
    body = chat("x" * (4 * MIB))
    go = threading.Event()  # upstream and clients have loops of their own
    config = tmp_path / "router.yaml"

    async def holds(peer: Peer, request: Received) -> None:
        if b"/v1/chat" in request.line:
            while not go.is_set():  # noqa: ASYNC110  # set by another thread
                await asyncio.sleep(0.01)
        await plain_server(peer, request)

    async def ask(router: RouterProcess) -> Answer | None:
        async with await RawClient.open(router.port) as client:
            try:
                return await client.ask(body)
            except (ConnectionError, asyncio.IncompleteReadError):
                return None  # refused while it spoke: a reset may overtake the answer

    async def story() -> None:
        async with ScriptedUpstream(holds) as upstream:
            await asyncio.to_thread(reported, upstream)

    def reported(upstream: ScriptedUpstream) -> None:
        config.write_text(f"limits: {{max_memory_bytes: {LIMIT}}}\nflow: {{max_in_flight: 1}}\n")
        with in_front_of(upstream, "--config", str(config)) as router:
            asyncio.run(crowd(router))

    async def crowd(router: RouterProcess) -> None:
        process = psutil.Process(router.process.pid)
        tasks = [asyncio.create_task(ask(router)) for _ in range(60)]
        most = 0
        while not any(task.done() for task in tasks):  # a process's memory
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.01)
        async with await RawClient.open(router.port) as probe:
            assert (await probe.get("/health")).status == 200
        go.set()
        answers = await asyncio.gather(*tasks)
        heard = [answer for answer in answers if answer is not None]
        assert {answer.status for answer in heard} == {200, 503}
        refused = [answer for answer in heard if answer.status == 503]
        assert {answer.code for answer in refused} == {"out_of_memory"}
        assert all(answer.header("retry-after") for answer in refused)
        while (answer := await ask(router)) is None or answer.status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # memory is looked at now and then
        assert most < LIMIT

    asyncio.run(story())


@pytest.mark.slow
def test_with_a_fifth_of_a_core_probes_are_answered(tmp_path: Path):
    """It runs for 20 ms and stands for 80, under requests without end: nobody kills it for that."""
    over = threading.Event()

    async def story() -> None:
        async with ScriptedUpstream(plain_server) as upstream:
            await asyncio.to_thread(reported, upstream)

    def reported(upstream: ScriptedUpstream) -> None:
        with in_front_of(upstream) as router:
            starving = threading.Thread(target=starve, args=(router,))
            starving.start()
            try:
                asyncio.run(crowd(router))
            finally:
                over.set()
                starving.join()
                router.process.send_signal(signal.SIGCONT)

    def starve(router: RouterProcess) -> None:
        while not over.is_set():
            router.process.send_signal(signal.SIGSTOP)
            over.wait(0.08)
            router.process.send_signal(signal.SIGCONT)
            over.wait(0.02)

    async def keep_asking(router: RouterProcess) -> None:
        async with await RawClient.open(router.port) as client:
            while not over.is_set():
                assert (await client.ask(chat())).status == 200

    async def crowd(router: RouterProcess) -> None:
        tasks = [asyncio.create_task(keep_asking(router)) for _ in range(32)]
        took_s = []
        for _ in range(10):
            for path in ("/livez", "/ready"):
                before_s = used_s(router)
                async with await RawClient.open(router.port) as probe:
                    assert (await probe.get(path)).status == 200
                took_s.append(used_s(router) - before_s)
        over.set()
        await asyncio.gather(*tasks)
        # The chart's probes wait for two and five seconds, and forgive two failures. In two seconds
        # the router runs for so long, where nobody else wants the processor.
        assert sorted(took_s)[len(took_s) // 2] < 0.4, took_s

    def used_s(router: RouterProcess) -> float:
        times = psutil.Process(router.process.pid).cpu_times()
        return float(times.user + times.system)

    asyncio.run(story())
