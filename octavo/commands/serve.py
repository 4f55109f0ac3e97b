"""`octavo serve`: an engine behind the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from octavo.models.references import check_short_name
from octavo.options.parser import CommandParser
from octavo.options.settings import (
    add_engine_options,
    add_server_options,
    render_config,
    serve_settings,
    warn_of_unknown_environment,
)
from octavo.options.vllm_flags import translate
from octavo_common.file_limit import raise_file_limit
from octavo_engine.core.process.spawn import spawn_ahead

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.process.spawn import SpawnedCore
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
    check_short_name(config)
    if config.node_rank:
        return _compute(config, server)
    return _serve(config, server)


def _compute(config: EngineConfig, settings: ServerSettings) -> int:
    """A stage for the engine on another host."""
    from octavo_common.logs import set_up_logging
    from octavo_engine.core.model_files import resolve
    from octavo_engine.executor.node import run_node

    set_up_logging(settings.log_format, settings.log_level)
    files = resolve(config)
    assert files is not None, "stages are computed by --device cpu, which has a model's files"
    with contextlib.suppress(KeyboardInterrupt):
        run_node(config, files)
    return 0


def _serve(config: EngineConfig, settings: ServerSettings) -> int:
    began_at = time.monotonic()
    raise_file_limit()  # each client is a file, and so is what the core and its peers exchange
    spawned = spawn_ahead(config)  # it imports what it needs while we do
    try:
        return _serve_with(spawned, config, settings, began_at)
    finally:
        if spawned is not None:
            spawned.drop()


def _serve_with(
    spawned: SpawnedCore | None, config: EngineConfig, settings: ServerSettings, began_at: float
) -> int:
    from octavo_engine.encryption import read_encryption_keys
    from octavo_engine.server.http.listen import open_port, open_unix_socket
    from octavo_engine.server.openai.chat.dialect import known_formats

    known_formats(settings)  # an unknown name is refused before clients can connect
    keys = read_encryption_keys(config.encryption_key_file)
    if settings.uds:
        listener = open_unix_socket(settings.uds)
        url = f"unix:{settings.uds}"
    else:
        listener = open_port(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        url = f"{'https' if settings.ssl_certfile else 'http'}://{_readable(host)}:{port}"
    admin_listener = None
    if settings.admin_port:
        admin_listener = open_port(
            settings.admin_host, settings.admin_port, "--admin-host and --admin-port"
        )
    from octavo.local.home import Home
    from octavo.models.servers import ServerRecord
    from octavo.startup import StartupReporter, settle_access_log
    from octavo_common.logs import set_up_logging
    from octavo_engine.server.run import serve

    set_up_logging(settings.log_format, settings.log_level)
    settings = settle_access_log(settings)
    record = ServerRecord(Home.find(os.environ), url, config.names)
    reporter = StartupReporter(url, settings, began_at, on_ready=record.ready)

    async def start() -> Any:
        from octavo_engine.core.async_engine import AsyncEngine
        from octavo_engine.core.connect import choose_connect

        return await AsyncEngine.start(config, connect=choose_connect(config, spawned=spawned))

    try:
        with record:
            _run(serve(start, settings, listener, reporter, keys, admin_listener=admin_listener))
    finally:
        reporter.close()
        listener.close()
        if admin_listener is not None:
            admin_listener.close()
        if settings.uds:
            with contextlib.suppress(OSError):
                os.unlink(settings.uds)
    return 0


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
