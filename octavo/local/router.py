"""The router's process: its files, its state page, its restarts."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from octavo.http_client import HttpConnection, ServerAddress, ServerError
from octavo.local.backoff import BackOff
from octavo.local.child import Child, describe_end, octavo_command
from octavo.local.home import write_whole
from octavo.local.routing import router_config, upstreams
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.endpoints import STATE_PATH
from octavo_engine.protocol.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo.local.home import Home
    from octavo.local.pool import Pool
    from octavo_operator.routers.poller import RouterDemand

NAME = "router"
TIMEOUT_S = 2.0
MAX_MISSES = 10
MAX_PORT = 65535
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class LocalRouter:
    """`write` before `start`; then `poll` in a task and `look` in the loop."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        home: Home,
        environ: Mapping[str, str],
        demand: RouterDemand,
        notify: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.state = "starting"
        self._host = host
        self._port = port
        self._log = home.logs / f"{NAME}.log"
        self._config_file = home.run / "router.yaml"
        self._upstreams_file = home.run / "upstreams.yaml"
        self._environ = environ
        self._demand = demand
        self._notify = notify
        self._wake = wake
        self._clock = clock
        self._token = secrets.token_hex(16)
        self._written = ("", "")
        self._child: Child | None = None
        self._started_at = 0.0
        self._backoff = BackOff()
        self._misses = 0
        self._decoder = msgspec.json.Decoder(State)
        demand.expect([NAME])

    @property
    def url(self) -> str:
        host = _ANY.get(self._host, self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.code is None

    def check_port(self) -> None:
        """Raises ConfigError if there is no such port, or another process has it."""
        if not 0 <= self._port <= MAX_PORT:
            raise ConfigError(f"--port must be between 0 and {MAX_PORT}; got {self._port}")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self._host, self._port))
            except OSError as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ConfigError(
                    f"cannot listen on {self._host}:{self._port}: {reason}; "
                    "choose another with --port"
                ) from None

    def write(self, pools: Sequence[Pool]) -> None:
        """Tells the router what has changed, if anything has. Raises OSError; the next call tries
        again."""
        config = router_config(
            pools,
            host=self._host,
            port=self._port,
            upstreams_file=str(self._upstreams_file),
            state_token=self._token,
            keys=next((pool.keys for pool in pools if pool.keys), ()),
        )
        engines = upstreams(pools)
        if engines != self._written[1]:
            write_whole(self._upstreams_file, engines)
        if config != self._written[0]:
            write_whole(self._config_file, config)
            if self.state == "ready" and self._child is not None:
                self._child.signal(signal.SIGHUP)
        self._written = (config, engines)

    def start(self) -> None:
        self._started_at = self._clock()
        self.state, self._misses = "starting", 0
        try:
            self._child = Child(
                octavo_command(
                    "router", f"--config={self._config_file}",
                    f"--host={self._host}", f"--port={self._port}",
                ),
                log=self._log,
                environment=self._environ,
            )  # fmt: skip
        except OSError as error:
            self._ended(f"could not be started: {error.strerror or error}", [])

    def look(self) -> None:
        """Notices its end, and starts it again."""
        now = self._clock()
        if self._child is None:
            if self._backoff.is_over(now):
                self.start()
            return
        if self._misses >= MAX_MISSES:
            self._child.kill()
        if (code := self._child.code) is None:
            return
        child, self._child = self._child, None
        self._ended(describe_end(code), child.last_lines(3))

    def _ended(self, why: str, lines: list[str]) -> None:
        now = self._clock()
        self.state = "down"
        pause_s = self._backoff.failed(now, ran_s=now - self._started_at)
        self._notify(f"the router ended ({why}); starts again in {pause_s:g} s · {self._log}")
        for line in lines:
            self._notify(f"  {line}")

    async def poll(self) -> None:
        """What it knows of engines and demand, once."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connection = await HttpConnection.connect(ServerAddress.parse(self.url))
                try:
                    headers = {"authorization": f"Bearer {self._token}"}
                    reply = await connection.request("GET", STATE_PATH, headers=headers)
                finally:
                    connection.close()
            if reply.status != 200:
                raise ServerError(reply.error)
            state = self._decoder.decode(b"".join(reply.body))
        except (TimeoutError, ServerError, ValueError, RecursionError):
            # One that has only just started may take its time.
            if self.state == "ready":
                self._misses += 1
            return
        self._misses = 0
        if self.state != "ready" and self.is_running:
            self.state = "ready"
            self._notify(f"the router listens at {self.url}/v1")
            self._wake()
        if self._demand.learn(NAME, state):
            self._wake()

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def remove_config(self) -> None:
        """It has keys: what only the router reads must not outlive it."""
        for path in (self._config_file, self._upstreams_file):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._written = ("", "")
