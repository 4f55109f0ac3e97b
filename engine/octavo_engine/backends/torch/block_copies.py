"""KV blocks on their way to pinned memory and back, while steps compute.

A block lies in as many places as there are layers, twice. A kernel on the steps' own stream
collects it in a *slot*, one piece of device memory; so it is what the steps launched before leave,
and those launched behind may overwrite it. A thread copies slots to the host on a stream of its
own. On the way back another thread fills slots; blocks get their content on the steps' stream once
it is there. No step ever waits for a copy between device and host.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from octavo_engine.backends.torch.operands import PageMoves
from octavo_engine.backends.torch.pinned_pages import PinnedPages
from octavo_engine.backends.torch.transfers import send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits, PageCopy
    from octavo_engine.backends.torch.device_kv import DeviceKV
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.tiers.page import Page

STAGING_BYTES = 512 << 20  # at most; room for the blocks of one step otherwise
SPARE_SLOTS = 64  # beside those of a step's prompts: single tokens fill blocks, too
STORED_BYTES = 320 << 20  # pages that wait to be written to disk or to be sent
LATENCY_S = 5e-4
BLOCKS_AT_ONCE = 16  # where the caller waits
MEASURED_BLOCKS = 32  # that are copied to see how fast the link is


def count_slots(limits: BackendLimits, page_bytes: int) -> int:
    wanted = -(-limits.max_tokens // 16) + SPARE_SLOTS
    return max(2, min(wanted, STAGING_BYTES // page_bytes))


class HasRegions(Protocol):
    """A DeviceKV."""

    def regions(self) -> list[Tensor]: ...


class SlotCopy:
    """A PageCopy between slots and pages."""

    def __init__(self, staging: Staging, slots: list[int], pages: list[Page]) -> None:
        self.staging, self.slots, self.pages = staging, slots, pages
        self.is_failed = False
        self.seconds = 0.0
        self._began_at = time.perf_counter()
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._began_at
        self._done.set()


class Staging:
    """Slots in device memory. Those of an earlier sleep are not those of now."""

    def __init__(self, num_slots: int, page_bytes: int, device: torch.device) -> None:
        self.data: Tensor | None = torch.empty(
            (num_slots, page_bytes // 4), dtype=torch.int32, device=device
        )
        self.free = deque(range(num_slots))  # whose ends any thread may use
        self.used: dict[int, Any] = {}  # when a slot's content was placed; its next load waits

    def take(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        self.free.extend(slots)


class Lane:
    """A thread that copies, and its stream."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._index = device.index or 0  # what a thread's device is set by must have one
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait_for(self, event: Any) -> None:
        if self.stream is not None and event is not None:
            self.stream.wait_event(event)

    def finish(self) -> None:
        """Wait for the stream."""
        if self.stream is not None:
            self.stream.synchronize()

    def settle(self) -> None:
        """Until all that was submitted is done."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self.stream is not None:
            torch.cuda.set_device(self._index)
        while (job := self._jobs.get()) is not None:
            job()


class SlotCopies:
    """Answers to `backend.BlockCopies`."""

    latency_s = LATENCY_S

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        kv_of: Callable[[], HasRegions],
        *,
        num_slots: int,
        page_bytes: int,
        host_bytes: int,
        is_stored: bool,
        woken: Callable[[], None],
    ) -> None:
        """`kv_of`: the cache, which is another one after each sleep."""
        self._kernels, self._device, self._kv_of = kernels, device, kv_of
        self._num_slots, self._page_bytes, self._woken = num_slots, page_bytes, woken
        # In flight there is a page for each slot, beside those that are kept.
        num_pages = host_bytes // page_bytes + num_slots
        num_pages += STORED_BYTES // page_bytes if is_stored else 0
        self._pages = PinnedPages(num_pages, page_bytes, is_pinned=device.type == "cuda")
        self._staging: Staging | None = None
        self._out, self._in = Lane("kv-save", device), Lane("kv-load", device)
        self.restore()
        self.bytes_per_s = self._measure()

    @property
    def num_saves_free(self) -> int:
        """A quarter of the slots is for loads alone, which a sequence waits for."""
        if self._staging is None:
            return 0
        return max(0, min(len(self._staging.free) - self._num_slots // 4, len(self._pages)))

    @property
    def num_loads_free(self) -> int:
        return 0 if self._staging is None else len(self._staging.free)

    def begin_save(self, block_ids: Sequence[int]) -> SlotCopy:
        staging = self._staging
        assert staging is not None, "the memory sleeps"
        pages = [page for _ in block_ids if (page := self._pages.take()) is not None]
        assert len(pages) == len(block_ids), "more blocks than there is room for"
        copy = SlotCopy(staging, staging.take(len(block_ids)), pages)
        self._move(staging, block_ids, copy.slots, is_save=True)
        ready = self._event()
        self._out.submit(lambda: self._save(copy, ready))
        return copy

    def begin_load(self, pages: Sequence[Page]) -> SlotCopy:
        staging = self._staging
        assert staging is not None, "the memory sleeps"
        copy = SlotCopy(staging, staging.take(len(pages)), list(pages))
        events = {id(e): e for slot in copy.slots if (e := staging.used.pop(slot, None))}
        self._in.submit(lambda: self._load(copy, list(events.values())))
        return copy

    def place(self, copy: PageCopy, block_ids: Sequence[int]) -> None:
        assert isinstance(copy, SlotCopy)
        if copy.staging is not self._staging:
            return  # what slept since has no blocks
        self._move(copy.staging, block_ids, copy.slots, is_save=False)
        placed = self._event()
        copy.staging.used.update(dict.fromkeys(copy.slots, placed))
        copy.staging.give_back(copy.slots)

    def drop(self, copy: PageCopy) -> None:
        assert isinstance(copy, SlotCopy)
        copy.staging.give_back(copy.slots)

    def release(self) -> None:
        """Let go of the device's memory."""
        for lane in (self._out, self._in):
            lane.settle()
        if self._staging is not None:
            self._staging.data = None
        self._staging = None

    def restore(self) -> None:
        if self._staging is None:
            self._staging = Staging(self._num_slots, self._page_bytes, self._device)

    def close(self) -> None:
        self.release()
        for lane in (self._out, self._in):
            lane.close()
        self._pages.close()

    def _move(
        self, staging: Staging, block_ids: Sequence[int], slots: Sequence[int], *, is_save: bool
    ) -> None:
        assert staging.data is not None
        move_blocks(self._kv_of(), self._kernels, staging.data, block_ids, slots, is_save=is_save)

    def _save(self, copy: SlotCopy, ready: Any) -> None:
        """On a thread of its own."""
        try:
            with torch.inference_mode(), self._out.on_stream():
                self._out.wait_for(ready)
                for slot, page in zip(copy.slots, copy.pages, strict=True):
                    self._copy(copy.staging, slot, page, is_save=True)
                self._out.finish()
        except Exception:
            copy.is_failed = True
        copy.staging.give_back(copy.slots)
        copy.end()
        self._woken()

    def _load(self, copy: SlotCopy, events: list[Any]) -> None:
        """On a thread of its own."""
        try:
            with torch.inference_mode(), self._in.on_stream():
                for event in events:
                    self._in.wait_for(event)
                for index, slot in enumerate(copy.slots):
                    copy.pages[index] = page = self._pinned(copy.pages[index])
                    self._copy(copy.staging, slot, page, is_save=False)
                self._in.finish()
        except Exception:
            copy.is_failed = True
        copy.end()
        self._woken()

    def _pinned(self, page: Page) -> Page:
        """The page, or its content in pinned memory as long as there is some; from any other the
        driver copies by itself, and this thread waits."""
        if self._pages.has(page):
            return page
        pinned = self._pages.take()
        if pinned is None:
            return page
        np.copyto(pinned, page)
        return pinned

    def _copy(self, staging: Staging, slot: int, page: Page, *, is_save: bool) -> None:
        assert staging.data is not None
        there = staging.data[slot]
        here = torch.from_numpy(page if page.flags.writeable else page.copy()).view(torch.int32)
        if is_save:
            here.copy_(there, non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)

    def _event(self) -> Any:
        """Behind all that was launched so far on the steps' stream."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record()
        return event

    def _measure(self) -> float:
        """Bytes a second into the device, as two loads of blocks that hold nothing show it; every
        kernel is compiled by it, too."""
        saved = self.begin_save([0])
        saved.wait()
        count = min(MEASURED_BLOCKS, self._num_slots)
        pages = [page for _ in range(count) if (page := self._pages.take()) is not None]
        for page in pages:
            np.copyto(page, saved.pages[0])
        for _ in range(2):
            loaded = self.begin_load(pages)
            loaded.wait()
            self.place(loaded, [0] + [-1] * (len(pages) - 1))
        return len(pages) * self._page_bytes / max(loaded.seconds, 1e-6)


def move_blocks(
    kv: HasRegions,
    kernels: Kernels,
    staging: Tensor,
    block_ids: Sequence[int],
    slots: Sequence[int],
    *,
    is_save: bool,
) -> None:
    """Blocks into slots, or back."""
    with torch.inference_mode():
        # Rows begin at multiples of 16 bytes: Triton compiles another kernel where they do not.
        padded = np.full((2, -(-len(block_ids) // 4) * 4), -1, np.int32)
        padded[:, : len(block_ids)] = block_ids, slots
        numbers = send(padded, staging.device)[:, : len(block_ids)]
        first = 0
        for region in kv.regions():
            moves = PageMoves(numbers[0], numbers[1], first)
            kernels.move_pages(staging, region, moves, is_save=is_save)
            first += region.shape[0] * region.shape[2]


def save_now(
    kv: DeviceKV, kernels: Kernels, block_ids: Sequence[int], device: torch.device
) -> list[Page]:
    """As `MovesKV`: the caller waits for all steps that were launched."""
    pages: list[Page] = []
    with torch.inference_mode():
        for start in range(0, len(block_ids), BLOCKS_AT_ONCE):
            some = block_ids[start : start + BLOCKS_AT_ONCE]
            staging = torch.empty((len(some), kv.page_words), dtype=torch.int32, device=device)
            move_blocks(kv, kernels, staging, some, range(len(some)), is_save=True)
            pages += list(staging.cpu().view(torch.uint8).numpy())
    return pages


def load_now(
    kv: DeviceKV,
    kernels: Kernels,
    block_ids: Sequence[int],
    pages: Sequence[Page],
    device: torch.device,
) -> None:
    """As `MovesKV`."""
    with torch.inference_mode():
        for start in range(0, len(block_ids), BLOCKS_AT_ONCE):
            some = block_ids[start : start + BLOCKS_AT_ONCE]
            held = np.stack(pages[start : start + BLOCKS_AT_ONCE]).view(np.int32)
            move_blocks(
                kv, kernels, torch.from_numpy(held).to(device), some, range(len(some)),
                is_save=False,
            )  # fmt: skip
