"""Three engines and a router, processes of their own, shared by tests that want the whole."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.fakes.certificates import make_authority
from tests.fakes.process import ServeProcess, serving
from tests.fakes.router_process import RouterProcess, routing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINE_FLAGS = (
    "m", "--served-model-name", "sim", "--sim-step-base-ms", "4", "--sim-kv-blocks", "4096",
)  # fmt: skip
ROUTER_FILE = """
server: {accept_while_draining_s: 0.1, drain_timeout_s: 20, debug_endpoints: true}
health: {canary_interval_s: 0, slow_start_s: 1}
routing: {shadows: [round-robin], sample_every: 1}
"""


@dataclass
class Platform:
    """Tests that end one of its engines start it again."""

    engines: list[ServeProcess]
    router: RouterProcess
    config: str  # its file
    _stack: ExitStack

    @property
    def ports(self) -> list[int]:
        return [port_of(engine) for engine in self.engines]

    @property
    def urls(self) -> str:
        return ",".join(engine.url for engine in self.engines)

    def start_again(self, number: int, *flags: str) -> None:
        """An engine on the port of the one that has ended, and the router knows it."""
        port = port_of(self.engines[number])
        self.engines[number] = self._stack.enter_context(
            serving(*ENGINE_FLAGS, "--port", str(port), *flags)
        )
        self.until_all_ready()

    def until_all_ready(self) -> None:
        ready = dict.fromkeys(self.ports, "ready")
        self.router.until(lambda: self.router.states() == ready)

    @contextmanager
    def another_router(self, *flags: str) -> Iterator[RouterProcess]:
        with routing("--config", self.config, "--upstreams", self.urls, *flags) as router:
            yield router


def port_of(engine: ServeProcess) -> int:
    return int(engine.url.rpartition(":")[2])


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    config = tmp_path_factory.mktemp("router") / "router.yaml"
    config.write_text(ROUTER_FILE)
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(*ENGINE_FLAGS)) for _ in range(3)]
        urls = ",".join(engine.url for engine in engines)
        router = stack.enter_context(routing("--config", str(config), "--upstreams", urls))
        platform = Platform(engines, router, str(config), stack)
        platform.until_all_ready()
        yield platform


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate and a client's."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    make_authority(folder)
    return folder
