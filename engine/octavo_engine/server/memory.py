"""Memory that large bodies took is given back to the system once they were handled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo_common.heap import give_memory_back

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE_BODY_BYTES = 2**20
DELAY_S = 1.0


class MemoryRelease:
    """Belongs to the event loop. However many large bodies come, memory is given back once in
    `delay_s`: the C library keeps what was freed, for it cannot know that nobody needs it."""

    def __init__(
        self, release: Callable[[], None] = give_memory_back, *, delay_s: float = DELAY_S
    ) -> None:
        self._release = release
        self._delay_s = delay_s
        self._is_due = False

    def release_soon(self) -> None:
        """A large body was handled."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._delay_s, self._run)

    def _run(self) -> None:
        self._is_due = False
        # On a thread, without the interpreter's lock: it takes milliseconds.
        asyncio.get_running_loop().run_in_executor(None, self._release)
