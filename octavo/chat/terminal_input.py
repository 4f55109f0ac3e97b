"""Lines from standard input for an event loop, with a history where there is a terminal."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "> "
READER = "octavo-stdin"
HISTORY_LINES = 1000


class TerminalInput:
    """Reads in a thread of its own, because reading cannot be cancelled: a line that was waited for
    and given up is the next one."""

    def __init__(self, history: Path | None = None) -> None:
        self._pending: asyncio.Future[str | None] | None = None
        self._history = history
        if history is not None:
            self._load(history)

    @property
    def is_waiting(self) -> bool:
        return self._pending is not None

    async def line(self) -> str | None:
        """None at the end."""
        if self._pending is None:
            self._pending = self._start()
        text = await asyncio.shield(self._pending)
        self._pending = None
        return text

    def close(self) -> None:
        """Keep what was typed."""
        if self._history is not None:
            import readline

            with suppress(OSError):
                readline.write_history_file(self._history)
                self._history.chmod(0o600)

    def _load(self, history: Path) -> None:
        import readline

        readline.set_history_length(HISTORY_LINES)
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.read_history_file(history)

    def _start(self) -> asyncio.Future[str | None]:
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def settle(text: str | None) -> None:
            if not line.done():
                line.set_result(text)

        def read() -> None:
            try:
                text: str | None = input(PROMPT if sys.stdin.isatty() else "")
            except (EOFError, UnicodeDecodeError):
                text = None
            with suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(settle, text)

        threading.Thread(target=read, name=READER, daemon=True).start()
        return line
