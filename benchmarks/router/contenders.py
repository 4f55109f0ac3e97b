"""The routers that are compared and how each is started; peers have their own environments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PEERS = Path.home() / ".cache" / "octavo" / "bench-peers"
VLLM_ROUTER = "vllm-router==0.1.17"
SGLANG_ROUTER = "sglang-router==0.3.2"


@dataclass(frozen=True, slots=True)
class Contender:
    """A router's name and its command line; `{port}` and `{urls}` are filled in."""

    name: str
    command: tuple[str, ...]
    package: str = ""  # on the package index; empty: ours

    def start(self, port: int, urls: Sequence[str]) -> list[str]:
        words: list[str] = []
        for word in self.command:
            if word == "{urls}":
                words += urls
            else:
                words.append(word.format(port=port, urls_comma=",".join(urls), peers=PEERS))
        return words


OCTAVO = Contender(
    "octavo prefix-load",
    (sys.executable, "-m", "octavo.cli", "router", "--host", "127.0.0.1", "--port", "{port}",
     "--upstreams", "{urls_comma}"),
)  # fmt: skip
BARE = Contender(
    "bare uvloop proxy",
    (sys.executable, "-m", "benchmarks.router.bare_proxy", "{port}", "{urls}"),
)
_QUIET = ("--host", "127.0.0.1", "--port", "{port}", "--worker-startup-check-interval", "1")
PEER_ROUTERS = (
    Contender(
        "vllm-router cache_aware",
        ("{peers}/vllm-router/bin/vllm-router", "--policy", "cache_aware", "--worker-urls",
         "{urls}", "--prometheus-port", "29000", "--log-level", "warning", *_QUIET),
        VLLM_ROUTER,
    ),
    Contender(
        "sglang-router cache_aware",
        ("{peers}/sglang-router/bin/smg", "launch", "--policy", "cache_aware", "--worker-urls",
         "{urls}", "--prometheus-host", "127.0.0.1", "--prometheus-port", "29001", "--log-level",
         "warn", *_QUIET),
        SGLANG_ROUTER,
    ),
)  # fmt: skip


def install_peers() -> list[Contender]:
    """Those that could be installed."""
    usable = []
    for peer in PEER_ROUTERS:
        folder = PEERS / peer.package.partition("==")[0]
        stamp = folder / peer.package
        if not stamp.exists():
            print(f"Installing {peer.package} …", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            done = subprocess.run([*pip, peer.package, "setproctitle"], check=False)
            if done.returncode:
                print(f"{peer.package} does not install here; left out.", file=sys.stderr)
                continue
            stamp.touch()
        usable.append(peer)
    return usable
