"""The API server over the real engine in simulator mode, with its insides in reach."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.build_core import build_core
from octavo_engine.core.process.in_process_client import InProcessClient
from octavo_engine.scheduling.invariants import check_invariants
from octavo_engine.server.app import build_app
from octavo_engine.server.http.listen import open_port
from octavo_engine.server.run import make_server
from octavo_engine.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.applications import Starlette

    from octavo_engine.backends.backend import Backend
    from octavo_engine.core.process.client import Listener
    from octavo_engine.server.service import Service

CONFIG = EngineConfig(
    model="sim", device="sim", served_model_names=("sim",), max_model_len=512,
    scheduler=SchedulerConfig(max_num_seqs=16, max_queue=64),
    sim=SimConfig(kv_blocks=256, time_scale=0.0),
)  # fmt: skip


@dataclass
class Simulated:
    """A server that answers; `core` belongs to a thread of its own, so look at it when idle."""

    port: int
    engine: AsyncEngine
    core: Any
    service: Service
    loop: asyncio.AbstractEventLoop
    app: Starlette

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def until(self, is_true: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        """On the server's loop, where that state belongs."""

        async def wait() -> None:
            deadline = time.monotonic() + timeout_s
            while not is_true():
                assert time.monotonic() < deadline, f"never: {what}; {self.leftovers()}"
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(timeout_s + 5)

    def leftovers(self) -> dict[str, int]:
        """What is still held for requests. All zero when nobody asks for anything."""
        scheduler = self.core.scheduler
        return {
            "in flight": self.service.admission.in_flight,
            "requests": self.engine.num_in_flight,
            "detokenisers": len(self.engine._outputs.sequence_ids),
            "sequences": len(scheduler.sequences),
            "blocks": len(scheduler.kv.pool.blocks) - scheduler.kv.pool.num_free,
            "live": len(self.core._live),
            "grammars": len(self.core._grammars or ()),
        }

    def check_idle(self) -> None:
        """Nothing is left of any request, and the pool is whole."""
        self.until(lambda: not any(self.leftovers().values()), "idle")
        check_invariants(self.core.scheduler)


@contextmanager
def simulating(
    config: EngineConfig = CONFIG,
    settings: ServerSettings | None = None,
    *,
    backend: Backend | None = None,
) -> Iterator[Simulated]:
    """With `backend` in place of the simulator's own."""
    settings = settings or ServerSettings()
    listener = open_port("127.0.0.1", 0)
    started = threading.Event()
    parts: dict[str, Any] = {}

    def build(config: EngineConfig, *, progress: Any) -> Any:
        core, info = build_core(config, progress=progress, backend=backend)
        parts["core"] = core
        return core, info

    def connect(config: EngineConfig, listener: Listener) -> InProcessClient:
        return InProcessClient(config, listener, build=build)

    async def work() -> None:
        engine = await AsyncEngine.start(config, connect=connect)
        await engine.ready()
        app = build_app(engine, settings)
        server = make_server(app, settings)
        parts.update(engine=engine, server=server, service=app.state.service, app=app)
        parts["loop"] = asyncio.get_running_loop()
        started.set()
        await server.serve(sockets=[listener])
        if app.state.service.batches is not None:
            await app.state.service.batches.stop()
        await engine.stop()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    assert started.wait(60), "it did not start"
    try:
        yield Simulated(
            listener.getsockname()[1], parts["engine"], parts["core"], parts["service"],
            parts["loop"], parts["app"],
        )  # fmt: skip
    finally:
        parts["loop"].call_soon_threadsafe(parts["server"].leave)
        thread.join(60)
        assert not thread.is_alive()
        listener.close()
