"""The events of a response that is made in the background, for those who read them later."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class EventLog:
    """Frames in order; the place of each is its sequence_number. Belongs to the event loop."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._is_closed = False
        self._grown = asyncio.Event()
        self.num_bytes = 0

    def add(self, frames: list[bytes]) -> None:
        self._frames += frames
        self.num_bytes += sum(map(len, frames))
        self._wake()

    def close(self) -> None:
        """Nothing follows."""
        self._is_closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Those from `start` on, as they come, until the last."""
        while True:
            frames, grown = self._frames[start:], self._grown
            if frames:
                start += len(frames)
                yield b"".join(frames)
            elif self._is_closed:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()
