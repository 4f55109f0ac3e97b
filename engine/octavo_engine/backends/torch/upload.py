"""From mapped files to the device through a ring of pinned buffers that several threads fill.

A copy straight from a mapping goes through the driver's own small buffer, one thread at a time.
Here threads read pages into pinned memory while the copy engine empties the buffers filled before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Self

    from numpy.typing import NDArray
    from torch import Tensor

BUFFER_BYTES = 32 << 20
NUM_BUFFERS = 8


class Uploader:
    """Copies bytes into tensors of one device; `finish` waits for all of them."""

    def __init__(
        self,
        device: torch.device,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._buffer_bytes = buffer_bytes
        self._pool = ThreadPoolExecutor(num_buffers, thread_name_prefix="upload")
        self._slots = [
            _Slot(self._pool, device, buffer_bytes, is_cuda=self._is_cuda)
            for _ in range(num_buffers)
        ]
        self._next = 0

    def copy(self, target: Tensor, data: NDArray[np.uint8]) -> None:
        """Begin to fill `target`, contiguous and of the same number of bytes, from `data`."""
        assert target.is_contiguous()
        place = target.view(torch.uint8).view(-1)
        source = data.reshape(-1)
        assert place.numel() == source.nbytes, f"{place.numel()} bytes from {source.nbytes}"
        for start in range(0, source.nbytes, self._buffer_bytes):
            end = min(start + self._buffer_bytes, source.nbytes)
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            slot.begin(place[start:end], source[start:end])

    def finish(self) -> None:
        """Raises what went wrong in a thread."""
        for slot in self._slots:
            slot.wait()

    def close(self) -> None:
        self._pool.shutdown()
        self._slots.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """One pinned buffer: at any time it is idle, being read into, or being sent."""

    def __init__(
        self, pool: ThreadPoolExecutor, device: torch.device, num_bytes: int, *, is_cuda: bool
    ) -> None:
        self._pool = pool
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._bytes: NDArray[np.uint8] = self._buffer.numpy()
        self._stream = _stream(device) if is_cuda else None
        self._under_way: Future[None] | None = None

    def begin(self, place: Tensor, source: NDArray[np.uint8]) -> None:
        self.wait()
        # The target's memory may still be in use by what was launched before.
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            ready.record()
        self._under_way = self._pool.submit(self._move, place, source, ready)

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _move(
        self, place: Tensor, source: NDArray[np.uint8], ready: torch.cuda.Event | None
    ) -> None:
        count = len(source)
        np.copyto(self._bytes[:count], source)
        if self._stream is None or ready is None:
            place.copy_(self._buffer[:count])
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            place.copy_(self._buffer[:count], non_blocking=True)
        self._stream.synchronize()  # this thread's own copies only


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
