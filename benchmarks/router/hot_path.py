"""What a request costs the router itself: the real parts, without sockets and without a kernel.

    python -m benchmarks.router.hot_path [--mix plain] [--functions]

Thirty-two clients, four engines, the traffic of a mix; all that is faked are the transports. The
minimum over many batches is shown, for it is what the code costs, and the number of calls, which
no neighbour can disturb. `--functions` adds where the time goes (under the profiler: shares, not
times).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from typing import Any, cast

import uvloop

from benchmarks.router.traffic import MIXES, Answers, Mix, requests
from octavo_router.app import App
from octavo_router.config.load import load_config
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.http.client_connection import ClientConnection
from octavo_router.http.connection_settings import Shared
from octavo_router.http.upstream_connection import UpstreamConnection

CLIENTS = 32
ENGINES = 4
BATCHES = 2000
REQUESTS_PER_CLIENT = 200  # a warm-up of as many batches has sent each once


class Transport:
    """Takes what is written, and forgets it."""

    def __init__(self) -> None:
        self.last = b""

    def write(self, data: bytes) -> None:
        self.last = data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        raise SystemExit("the router cut a connection")

    close = abort


class Rig:
    """A router between fake clients and fake engines. Lives on a running loop."""

    def __init__(self, mix: Mix) -> None:
        config = load_config(text="", flags={}, environment={})
        self._requests = [requests(mix, REQUESTS_PER_CLIENT, client=i) for i in range(CLIENTS)]
        self._answers = Answers(mix)
        self.app = app = App(config)
        specs = [
            EndpointSpec(
                id=f"e{i}", address=Address("127.0.0.1", 9 + i), names=("m",), kind="openai"
            )
            for i in range(ENGINES)
        ]
        app.registry.replace("static", specs)
        loop = asyncio.get_running_loop()
        shared = Shared(app.proxy, config.limits, config.timeouts, app.deadlines, loop)
        self.clients = [ClientConnection(shared) for _ in range(CLIENTS)]
        for client in self.clients:
            client.connection_made(cast("asyncio.Transport", Transport()))
        self.upstreams = []
        for endpoint in app.registry.endpoints.values():
            app.registry.report(endpoint, "ready")
            pool = app.upstreams.of(endpoint).pool
            for _ in range(CLIENTS):
                upstream = UpstreamConnection(pool, pool._parser)
                upstream.connection_made(cast("asyncio.Transport", Transport()))
                pool.give_back(upstream)
                upstream.idle_since = time.monotonic() + 1e6
                self.upstreams.append(upstream)
        self._num_batches = 0

    def batch(self) -> float:
        """Seconds for one request of every client, and its answer."""
        number = self._num_batches
        self._num_batches += 1
        sent = [
            templates[number % REQUESTS_PER_CLIENT].numbered(number) for templates in self._requests
        ]
        began_at = time.perf_counter()
        for client, request in zip(self.clients, sent, strict=True):
            client.data_received(request)
        sent_at = time.perf_counter()
        busy = [upstream for upstream in self.upstreams if upstream.user is not None]
        if len(busy) != CLIENTS:
            raise SystemExit(f"{len(busy)} of {CLIENTS} requests reached an engine")
        answers = [self._answer(upstream) for upstream in busy]
        found_at = time.perf_counter()
        for upstream, pieces in zip(busy, answers, strict=True):
            for piece in pieces:
                upstream.data_received(piece)
        return (sent_at - began_at) + (time.perf_counter() - found_at)

    def _answer(self, upstream: UpstreamConnection) -> list[bytes]:
        """To the request that was written there."""
        request = cast("Transport", upstream._transport).last
        is_stream = b'"stream": true' in request
        return list(self._answers.stream()) if is_stream else [self._answers.whole()]


def count_calls(rig: Rig, batches: int = 20) -> float:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for _ in range(batches):
        rig.batch()
    sys.setprofile(None)
    return calls / (batches * CLIENTS)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mix", default="plain", choices=["uniform", "whole", "streams", "plain"])
    parser.add_argument("--functions", action="store_true", help="where the time goes")
    args = parser.parse_args()
    rig = Rig(MIXES[args.mix])
    for _ in range(200):  # warm: caches, memos, specialised bytecode
        rig.batch()
    taken = sorted(rig.batch() / CLIENTS * 1e6 for _ in range(BATCHES))
    print(f"{taken[0]:.1f} µs a request at least, {taken[len(taken) // 2]:.1f} µs in the median; "
          f"{count_calls(rig):.0f} calls")  # fmt: skip
    if args.functions:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(200):
            rig.batch()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    uvloop.run(main())
