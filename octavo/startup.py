"""What `octavo serve` shows of its start: a bar and a banner on a terminal, log lines elsewhere."""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import sys
import time
from typing import IO, TYPE_CHECKING

from octavo.styles import has_styles
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.loading import LOADING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.server.settings import ServerSettings

_BAR_WIDTH = 30


def settle_access_log(settings: ServerSettings, out: IO[str] | None = None) -> ServerSettings:
    """On a terminal somebody wants to see what comes in; a file would fill up with it."""
    if settings.access_log != "auto":
        return settings
    is_seen = _is_terminal(out or sys.stderr, settings)
    return dataclasses.replace(settings, access_log="requests" if is_seen else "errors")


def _is_terminal(out: IO[str], settings: ServerSettings) -> bool:
    return out.isatty() and settings.log_format != "json"


class StartupReporter:
    """Shows the progress of the start, and then how to use what was started."""

    def __init__(
        self,
        url: str,
        settings: ServerSettings,
        began_at: float,
        out: IO[str] | None = None,
        *,
        on_ready: Callable[[tuple[str, ...]], None] = lambda names: None,
    ) -> None:
        self._on_ready = on_ready
        self._url = url
        self._settings = settings
        self._out = out or sys.stderr
        self._is_terminal = _is_terminal(self._out, settings)
        self._began_at = began_at
        self._shown = -1
        self._phase = LOADING

    def loading(self, health: CoreHealth) -> None:
        percent = int(health.progress * 100)
        phase = health.loading.phase if health.loading is not None else LOADING
        if phase != self._phase:  # it fetches first, where the model is not on this disk
            self._phase, self._shown = phase, -1
        if self._is_terminal:
            if percent != self._shown:
                filled = _BAR_WIDTH * percent // 100
                bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
                self._shown = percent
                print(f"\r  {phase:8} {bar} {percent:3d} %", end="", file=self._out, flush=True)
        elif percent // 25 > self._shown // 25:
            self._shown = percent
            if percent:
                self._log(phase.capitalize(), percent=percent)

    def ready(self, info: ModelInfo) -> None:
        self.close()
        self._on_ready(info.names)
        took_s = time.monotonic() - self._began_at
        if self._is_terminal:
            is_bold = has_styles(self._out)
            text = banner(info, self._url, self._settings, took_s, is_bold=is_bold)
            print(text, file=self._out, flush=True)
            return
        self._log(
            "Ready", url=self._url, model=info.names[0], backend=info.backend,
            kv_blocks=info.num_blocks, kv_bytes=info.kv_bytes,
            kv_tokens=info.num_blocks * BLOCK_SIZE, max_model_len=info.max_model_len,
            implementation=info.implementation,
            seconds=round(took_s, 2),
        )  # fmt: skip

    def draining(self, in_flight: int) -> None:
        self._log("Draining", in_flight=in_flight)

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._is_terminal and self._shown >= 0:
            print("\r\033[K", end="", file=self._out, flush=True)
            self._shown = -1

    def _log(self, message: str, **fields: object) -> None:
        logging.getLogger("octavo.serve").info(message, extra=fields)


def banner(
    info: ModelInfo, url: str, settings: ServerSettings, took_s: float, *, is_bold: bool = False
) -> str:
    """Where the model is served, how much fits, and a request to try."""
    strong, plain = ("\033[1m", "\033[0m") if is_bold else ("", "")
    root = settings.root_path
    lines = [f"{strong}Octavo serves {', '.join(info.names)}{plain} (ready in {took_s:.1f} s)", ""]
    facts = {"API": f"{url}{root}/v1"}
    if settings.docs and not settings.uds:
        facts["Page"] = f"{url}{root}/ (chat) · {url}{root}/docs"
    weights = f" · {info.format}" if info.format else ""
    facts["Engine"] = f"{info.backend}{weights} · context {info.max_model_len:,} tokens"
    if "generate" in info.tasks:
        facts["KV cache"] = kv_capacity(info)
    if info.implementation == "transformers":
        facts["Model"] = "computed by transformers: results may depend on the batch"
    lines += [f"  {strong}{name:9}{plain}{value}" for name, value in facts.items()]
    lines += ["", *(f"  {line}" for line in example_request(info, url + root, settings)), ""]
    if "generate" in info.tasks and not settings.uds:
        lines.append(f"  Chat with octavo chat --url {url}{root} · stop the server with Ctrl-C")
    else:
        lines.append("  Stop the server with Ctrl-C")
    return "\n".join(lines) + "\n"


def kv_capacity(info: ModelInfo) -> str:
    """In tokens, and in requests as long as any may be: many more fit that are shorter."""
    tokens = info.num_blocks * BLOCK_SIZE
    requests = max(1, tokens // max(1, info.max_model_len))
    size = f"{info.kv_bytes / 2**20:,.0f} MiB" if info.kv_bytes else "simulated"
    plural = "s" if requests > 1 else ""
    return (
        f"{tokens:,} tokens ({size}): {requests:,} request{plural} of {info.max_model_len:,} tokens"
    )


def example_request(info: ModelInfo, url: str, settings: ServerSettings) -> list[str]:
    """Lines of a shell command."""
    body: dict[str, object] = {"model": info.names[0]}
    if "generate" in info.tasks:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is an octavo?"}]
    else:
        path = "embeddings" if "embed" in info.tasks else info.tasks[0]
        body["input"] = "What is an octavo?"
    curl = "curl"
    if settings.uds:
        curl, url = f"curl --unix-socket {shlex.quote(settings.uds)}", "http://localhost"
    key = ' -H "authorization: Bearer $OCTAVO_API_KEY"' if _needs_key(settings) else ""
    text = json.dumps(body, ensure_ascii=False)
    return [
        f"{curl} {url}/v1/{path} -H 'content-type: application/json'{key} \\",
        f"  -d {shlex.quote(text)}",
    ]


def _needs_key(settings: ServerSettings) -> bool:
    return bool(settings.api_keys or settings.api_key_file)
