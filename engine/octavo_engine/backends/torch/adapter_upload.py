"""Adapters on their way to the device: a thread, two pinned buffers and a stream of their own.

Whoever launches steps does not wait for it, nor do the steps: only one that uses an adapter which
has not arrived. The adapter itself lies in ordinary memory, of which there is more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.landing import marks_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from octavo_engine.backends.torch.landing import StreamMark

BUFFER_BYTES = 8 << 20


class AdapterUploader:
    """Copies one adapter after the other."""

    def __init__(self, device: torch.device, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        is_cuda = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "octavo-adapter-upload")
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)
        ]
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]  # torch's
        self._make_mark = marks_of(device)

    def begin(self, place: Tensor, data: Tensor, free_from: StreamMark | None) -> Future[None]:
        """Fill the bytes of `place`, which belong to others up to a mark. Once the future is done,
        they are there for what is launched then."""
        return self._thread.submit(self._move, place, data, free_from)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._buffers.clear()

    def _move(self, place: Tensor, data: Tensor, free_from: StreamMark | None) -> None:
        if free_from is not None:
            free_from.wait()
        size = len(self._buffers[0])
        sent: list[StreamMark | None] = [None, None]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for number, start in enumerate(range(0, len(data), size)):
                side = number % 2
                mark = sent[side]
                if mark is not None:
                    mark.wait()
                part = data[start : start + size]
                pinned = self._buffers[side][: len(part)]
                pinned.copy_(part)
                target = place[start : start + len(part)]
                target.copy_(pinned, non_blocking=self._stream is not None)
                sent[side] = self._make_mark()
        for mark in sent:
            if mark is not None:
                mark.wait()
