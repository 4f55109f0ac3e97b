"""`octavo serve`: an engine behind the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser
from octavo.options.settings import (
    add_engine_options,
    add_server_options,
    render_config,
    serve_settings,
    warn_of_unknown_environment,
)
from octavo.options.vllm_flags import translate
from octavo_engine.protocol.loading import LOADING

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.server.settings import ServerSettings


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Serve a model through the OpenAI API.")
    add_engine_options(parser)
    add_server_options(parser)
    args = parser.parse_args(translate(argv))
    warn_of_unknown_environment()
    config, server, settings = serve_settings(args)
    if args.print_config:
        print(render_config(config, server, settings))
        return 0
    return _serve(config, server)


def _serve(config: EngineConfig, settings: ServerSettings) -> int:
    began_at = time.monotonic()
    from octavo_engine.server.http.listen import open_port, open_unix_socket
    from octavo_engine.server.openai.chat.dialect import known_formats

    known_formats(settings)  # an unknown name is refused before clients can connect
    if settings.uds:
        listener = open_unix_socket(settings.uds)
        url = f"unix:{settings.uds}"
    else:
        listener = open_port(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        url = f"{'https' if settings.ssl_certfile else 'http'}://{_readable(host)}:{port}"
    from octavo_common.logs import set_up_logging
    from octavo_engine.server.run import serve

    set_up_logging(settings.log_format, settings.log_level)
    reporter = StartupReporter(config, url, settings, began_at)

    async def start() -> Any:
        from octavo_engine.core.async_engine import AsyncEngine

        return await AsyncEngine.start(config)

    try:
        _run(serve(start, settings, listener, reporter))
    finally:
        reporter.close()
        listener.close()
        if settings.uds:
            with contextlib.suppress(OSError):
                os.unlink(settings.uds)
    return 0


class StartupReporter:
    """Shows the progress of the start: a bar on a terminal, log lines elsewhere."""

    def __init__(
        self, config: EngineConfig, url: str, settings: ServerSettings, began_at: float
    ) -> None:
        self._config = config
        self._url = url
        self._json = settings.log_format == "json"
        self._is_terminal = sys.stderr.isatty() and not self._json
        self._began_at = began_at
        self._shown = -1
        self._phase = LOADING
        self._bar_width = 30

    def loading(self, health: CoreHealth) -> None:
        percent = int(health.progress * 100)
        phase = health.loading.phase if health.loading is not None else LOADING
        if phase != self._phase:  # it fetches first, where the model is not on this disk
            self._phase, self._shown = phase, -1
        if self._is_terminal:
            if percent != self._shown:
                filled = self._bar_width * percent // 100
                bar = "█" * filled + "░" * (self._bar_width - filled)
                self._shown = percent
                print(f"\r  {phase:8} {bar} {percent:3d} %", end="", file=sys.stderr, flush=True)
        elif percent // 25 > self._shown // 25:
            self._shown = percent
            if percent:
                self._log(phase.capitalize(), percent=percent)

    def ready(self, info: ModelInfo) -> None:
        self.close()
        took_s = time.monotonic() - self._began_at
        kv = f"{info.kv_bytes / 2**20:,.0f} MiB" if info.kv_bytes else "simulated"
        if self._json or not self._is_terminal:
            self._log(
                "Ready", url=self._url, model=info.names[0], backend=info.backend,
                kv_blocks=info.num_blocks, kv_bytes=info.kv_bytes,
                max_model_len=info.max_model_len, seconds=round(took_s, 2),
            )  # fmt: skip
            return
        print(
            f"Octavo serves {', '.join(info.names)} at {self._url}/v1 (ready in {took_s:.1f} s)\n"
            f"  {info.backend} · KV cache {info.num_blocks} blocks ({kv}) · "
            f"context {info.max_model_len} tokens · stop with Ctrl-C",
            file=sys.stderr,
        )

    def draining(self, in_flight: int) -> None:
        self._log("Draining", in_flight=in_flight)

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._is_terminal and self._shown >= 0:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = -1

    def _log(self, message: str, **fields: object) -> None:
        import logging

        logging.getLogger("octavo.serve").info(message, extra=fields)


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not built for every platform
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def _readable(host: str) -> str:
    return f"[{host}]" if ":" in host else host
