"""`octavo up`: replicas, router and rolling changes on this machine, from a cluster's YAML."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from octavo.options.parser import CommandParser, not_negative, whole_number
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.endpoints import ROUTER_PORT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from octavo.local.documents import Documents
    from octavo.local.screen import LiveScreen, PlainScreen
    from octavo.local.watch import DocumentWatch


def main(prog: str, argv: Sequence[str]) -> int:
    parser = CommandParser(prog, "Run the whole platform on this machine.")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a name of octavo list, a folder, .gguf file, ORG/NAME, demo://NAME, or another URI",
    )  # fmt: skip
    parser.add_argument(
        "-f", "--file", metavar="FILE", action="append", default=[],
        help="YAML file or folder with LLMDeployments; may be repeated; - reads stdin",
    )  # fmt: skip
    parser.add_argument("--replicas", type=not_negative, metavar="N", help="engines for MODEL")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "torch", "sim"),
        help="device that MODEL runs on",
    )
    parser.add_argument(
        "--warm-pool", type=not_negative, default=0, metavar="N",
        help="engines of each model that are loaded and wait, so that one is there at once when it "
        "is wanted, such as from zero replicas (default: 0)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address of the router")
    parser.add_argument(
        "--port", type=whole_number, default=ROUTER_PORT, metavar="N",
        help=f"port of the router, 0 for any free one (default: {ROUTER_PORT})",
    )  # fmt: skip
    parser.add_argument(
        "--plain",
        action="store_true",
        help="print lines instead of a live table, even on a terminal",
    )
    args = parser.parse_args(argv)
    documents, watch = _documents(args)
    return _run(args, documents, watch)


def _documents(args: argparse.Namespace) -> tuple[Documents, DocumentWatch | None]:
    from octavo.local.documents import Documents, deployment_of_model, read_documents
    from octavo.local.watch import DocumentWatch

    if bool(args.model) == bool(args.file):
        raise ConfigError("give either a MODEL or -f FILE")
    if args.model:
        replicas = 1 if args.replicas is None else args.replicas
        deployment = deployment_of_model(
            args.model, replicas=replicas, device=args.device or "auto"
        )
        return Documents((deployment,)), None
    for name in ("replicas", "device"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} requires a MODEL; with -f, set it in the file")
    if args.file == ["-"]:
        try:
            return read_documents({"stdin": sys.stdin.buffer.read().decode()}), None
        except UnicodeDecodeError:
            raise ConfigError("stdin is not UTF-8 text") from None
    watch = DocumentWatch(args.file)
    return read_documents(watch.read() or {}), watch


def _run(args: argparse.Namespace, documents: Documents, watch: DocumentWatch | None) -> int:
    from octavo.local.home import Home, HomeLock
    from octavo.local.supervisor import PlatformSupervisor

    home = Home.find(os.environ)
    home.make()

    async def work(screen: LiveScreen | PlainScreen) -> None:
        supervisor = PlatformSupervisor(
            home,
            screen,
            host=args.host,
            port=args.port or _free_port(),
            num_warm=args.warm_pool,
        )
        with HomeLock(home, supervisor.router.url):
            supervisor.router.check_port()
            home.tidy()
            supervisor.want(documents)
            await supervisor.run(watch)

    with _screen(is_plain=args.plain) as screen:
        asyncio.run(work(screen))
    return 0


def _free_port() -> int:
    """For --port 0."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _screen(*, is_plain: bool) -> LiveScreen | PlainScreen:
    from octavo.local.screen import LiveScreen, PlainScreen

    return LiveScreen() if sys.stderr.isatty() and not is_plain else PlainScreen()
