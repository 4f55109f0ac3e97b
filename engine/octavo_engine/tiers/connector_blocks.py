"""A connector of another package as a place for KV blocks: one thread drives both its halves.

Nothing that it does or fails to do can yield a wrong token: a row counts as a block when it ends in
the checksum of these bytes under this name. One that raised is left alone for a while, and so is
one that has not returned.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections import OrderedDict
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.checksum import crc32
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.tiers.connector import (
    KV_LAYER,
    ConnectorBlock,
    ConnectorBlocks,
    ConnectorRequest,
    ForwardContext,
    KVCacheConfig,
    KVConnectorRole,
    SchedulerOutput,
)
from octavo_engine.tiers.page import block_name, split_name
from octavo_engine.tiers.price import TierMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo_engine.state.sequence import Sequence as OneSequence
    from octavo_engine.tiers.connector import ConnectorConfig, KVConnectorBase_V1
    from octavo_engine.tiers.page import BlockName, Page

logger = logging.getLogger(__name__)

HASH_BYTES, CHECK_BYTES = 16, 4  # behind the bytes of a block in a row
BUFFER_BYTES = 64 << 20  # of all rows
MAX_PENDING_BYTES = 256 << 20  # that wait to be saved; more is not saved
MAX_SAVED_BYTES = 16 << 20  # at a time; lookups and loads come between
MAX_KNOWN = 1 << 18  # blocks that were handed over, and those that must not come back
RETRY_S, MAX_RETRY_S = 1.0, 30.0  # after a failure; doubled with each further one
AGAIN_S = 0.01  # until the next attempt where a number is not known yet
POLL_S = 0.001  # while a load goes on
# What is assumed before anything was read: low, so that no more than a little time can be lost.
LATENCY_S, BYTES_PER_S = 5e-3, 2e8
_NO_TRAILER = bytes(HASH_BYTES + CHECK_BYTES)  # of a row that was not filled, or is spoiled


class _Job(NamedTuple):
    work: Callable[[float], None]  # with the time at which nobody waits for it any more
    deadline: float
    done: Callable[[], None]


class ConnectorStore:
    """As `kv_peers.BlockPeer`, and a place to save to. `lookup`, `fetch` and `put` never wait;
    callbacks are called on its thread, `done` always once."""

    def __init__(
        self,
        connector: type[KVConnectorBase_V1],
        config: ConnectorConfig,
        *,
        key: bytes,
        page_bytes: int,
    ) -> None:
        """`key` separates blocks of engines that differ. Raises what the connector raises."""
        self.meter = TierMeter(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
        self.num_failures = self.num_unsaved = 0
        self._settings = config.kv_transfer_config
        self._name = self._settings.kv_connector
        self._key, self._page_bytes = key, page_bytes
        row_bytes = page_bytes + HASH_BYTES + CHECK_BYTES
        num_rows = max(1, BUFFER_BYTES // row_bytes)
        self._rows = np.zeros((num_rows, row_bytes), np.uint8)
        cache = KVCacheConfig(num_rows, row_bytes, BLOCK_SIZE)
        self._scheduler = connector(config, KVConnectorRole.SCHEDULER, cache)
        self._worker = connector(config, KVConnectorRole.WORKER, cache)
        self._worker.register_kv_caches({KV_LAYER: self._rows})
        self._lock = threading.Lock()  # of the four below
        self._pending: dict[BlockName, Page | None] = {}  # waits to be saved; None: is spoiled
        self._saved: OrderedDict[BlockName, None] = OrderedDict()  # the oldest first
        self._spoiled: OrderedDict[BlockName, None] = OrderedDict()
        self._is_saving = False
        self._sequences: dict[str, tuple[OneSequence, ConnectorRequest]] = {}
        self._is_async: dict[str, bool] = {}  # by request id; its thread's
        self._retry_s, self._up_at = RETRY_S, 0.0
        self._late_at: float | None = None  # when the call that is under way is overdue
        self._is_closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-connector", daemon=True)
        self._thread.start()

    @property
    def is_down(self) -> bool:
        now, late_at = time.monotonic(), self._late_at
        return now < self._up_at or (late_at is not None and now >= late_at)

    def __contains__(self, name: object) -> bool:
        """Whether nothing is left to be done for saving it."""
        return not self._settings.is_kv_producer or name in self._saved or name in self._pending

    def lookup(
        self,
        names: Sequence[BlockName],
        timeout_s: float,
        done: Callable[[set[BlockName]], None],
        *,
        sequence: OneSequence,
    ) -> None:
        """Which blocks of a sequence it has, as far as it says in time."""
        found: set[BlockName] = set()
        digests = list(sequence.digests)
        hashes = [self._hash(block_name(digest, 0)) for digest in digests]
        request = ConnectorRequest(sequence.request_id, list(sequence.token_ids), hashes)
        self._sequences[request.request_id] = (sequence, request)
        places = {digest: place for place, digest in enumerate(digests)}
        first = min(places[split_name(name)[0]] for name in names)

        def work(deadline: float) -> None:
            end = first + self._ask(request, first * BLOCK_SIZE, deadline) // BLOCK_SIZE
            with self._lock:
                found.update(
                    name
                    for name in names
                    if places[split_name(name)[0]] < end and name not in self._spoiled
                )

        self._submit(work, timeout_s, lambda: done(found))

    def fetch(
        self,
        names: Sequence[BlockName],
        timeout_s: float,
        take: Callable[[BlockName, Page], None],
        done: Callable[[], None],
        *,
        begun: Callable[[], None] = lambda: None,
        sequence: OneSequence,
    ) -> None:
        """Read pages, as many at a time as there are rows; `take` gets each that is right."""
        known = self._sequences.get(sequence.request_id)

        def work(deadline: float) -> None:
            begun()
            if known is None:
                return
            for at in range(0, len(names), len(self._rows)):
                part = names[at : at + len(self._rows)]
                self._load(known[1], part, deadline, take)

        self._submit(work, timeout_s, done)

    def put(self, name: BlockName, page: Page) -> None:
        """Have it saved, unless too much waits for that already."""
        with self._lock:
            if name in self or name in self._spoiled:
                return
            is_full = (len(self._pending) + 1) * self._page_bytes > MAX_PENDING_BYTES
            if is_full or self.is_down:
                self.num_unsaved += 1
                return
            self._pending[name] = page
        self._begin_saving()

    def drop(self, names: Iterable[BlockName]) -> None:
        """Blocks that must never be found again. A connector cannot forget them: they are not taken
        from it any more, and what it has is overwritten by a row that no engine takes."""
        with self._lock:
            for name in names:
                _note(self._spoiled, name)
                if self._settings.is_kv_producer and (name in self._saved or name in self._pending):
                    self._pending[name] = None
        self._begin_saving()

    def settle(self) -> None:
        """Say which of the requests that it knows have ended; on the engine's thread."""
        for request_id, (sequence, request) in list(self._sequences.items()):
            if sequence.finish_reason is not None:
                del self._sequences[request_id]
                self._submit(self._ending(request), MAX_RETRY_S, lambda: None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is saved; whether it is. For a clean end and for tests."""
        end = time.monotonic() + timeout_s
        while self._pending and not self.is_down and time.monotonic() < end:
            self._begin_saving()
            time.sleep(0.001)
        return not self._pending

    def close(self, *, waits: bool = True) -> None:
        self.settle()
        self.flush(2.0)
        self._is_closed = True
        self._jobs.put(None)
        if waits:
            self._thread.join(timeout=2.0)  # a connector that hangs does not keep the process

    def _submit(
        self, work: Callable[[float], None], timeout_s: float, done: Callable[[], None]
    ) -> None:
        if self._is_closed:
            done()
        else:
            self._jobs.put(_Job(work, time.monotonic() + timeout_s, done))

    def _begin_saving(self) -> None:
        """Unless it has begun. Others are served between two parts."""
        with self._lock:
            if self._is_saving or not self._pending:
                return
            self._is_saving = True
        self._submit(self._save, MAX_RETRY_S, self._saved_part)

    def _saved_part(self) -> None:
        self._is_saving = False
        if not self.is_down:
            self._begin_saving()

    def _hash(self, name: BlockName) -> bytes:
        return hashlib.blake2b(name, key=self._key, digest_size=HASH_BYTES).digest()

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._late_at = job.deadline
            try:
                if not self.is_down:
                    job.work(job.deadline)
                    self._retry_s = RETRY_S
            except Exception as error:  # the connector's own code: anything may happen
                self._fail(error)
            finally:
                self._late_at = None
                job.done()
        for half in (self._worker, self._scheduler):
            try:
                half.shutdown()
            except Exception:
                logger.exception("The KV connector %s could not be ended", self._name)

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, MAX_RETRY_S)
        self._up_at = time.monotonic() + wait_s
        with self._lock:
            spoiled = {name: None for name, page in self._pending.items() if page is None}
            self.num_unsaved += len(self._pending) - len(spoiled)
            self._pending.clear()
            self._pending.update(spoiled)
        logger.warning(
            "The KV connector %s is not used for %.0f s: %s: %s",
            self._name, wait_s, type(error).__name__, error,
        )  # fmt: skip

    def _ask(self, request: ConnectorRequest, num_computed: int, deadline: float) -> int:
        """Tokens that it has behind those. Raises ValueError if what it says cannot be."""
        while True:
            answer = self._scheduler.get_num_new_matched_tokens(request, num_computed)
            count, is_async = answer
            if count is not None:
                break
            if time.monotonic() + AGAIN_S >= deadline:
                return 0
            time.sleep(AGAIN_S)
        if type(count) is not int or not 0 <= count <= request.num_tokens - num_computed:
            raise ValueError(
                f"get_num_new_matched_tokens returned {count!r} for a request with "
                f"{request.num_tokens - num_computed} further tokens"
            )
        if count:
            self._is_async[request.request_id] = bool(is_async)
        return count

    def _load(
        self,
        request: ConnectorRequest,
        names: Sequence[BlockName],
        deadline: float,
        take: Callable[[BlockName, Page], None],
    ) -> None:
        blocks = [ConnectorBlock(self._hash(name), row) for row, name in enumerate(names)]
        self._rows[: len(blocks), self._page_bytes :] = 0  # what lies there is of no block
        num_tokens = BLOCK_SIZE * len({split_name(name)[0] for name in names})
        self._scheduler.update_state_after_alloc(request, ConnectorBlocks(blocks), num_tokens)
        meta = self._scheduler.build_connector_meta(SchedulerOutput([]))
        worker = self._worker
        worker.bind_connector_metadata(meta)
        try:
            worker.start_load_kv(ForwardContext({KV_LAYER: self._rows}))
            worker.wait_for_layer_load(KV_LAYER)
            if self._is_async.get(request.request_id, False):
                self._await(request.request_id, deadline)
            failed = worker.get_block_ids_with_load_errors()
        finally:
            worker.clear_connector_metadata()
        num_wrong = 0
        for name, block in zip(names, blocks, strict=True):
            if block.block_id in failed:
                continue
            row = self._rows[block.block_id]
            page = row[: self._page_bytes].copy()
            trailer = row[self._page_bytes :].tobytes()
            if trailer == _trailer(block.block_hash, page):
                with self._lock:
                    _note(self._saved, name)
                take(name, page)
            elif trailer != _NO_TRAILER:
                num_wrong += 1
        if num_wrong:
            raise ValueError(f"{num_wrong} blocks that it loaded are not those that were saved")

    def _await(self, request_id: str, deadline: float) -> None:
        """Raises TimeoutError."""
        while True:
            _, received = self._worker.get_finished(set())
            if received and request_id in received:
                return
            if self._is_closed or time.monotonic() >= deadline:
                raise TimeoutError("a load did not end in time")
            time.sleep(POLL_S)

    def _save(self, deadline: float) -> None:
        """One part of what waits."""
        most = min(len(self._rows), max(1, MAX_SAVED_BYTES // self._page_bytes))
        with self._lock:
            part = list(itertools.islice(self._pending.items(), most))
        blocks = []
        for number, (name, page) in enumerate(part):
            block = ConnectorBlock(self._hash(name), number)
            row = self._rows[number]
            row[:] = 0
            if page is not None:
                row[: self._page_bytes] = page
                row[self._page_bytes :] = np.frombuffer(_trailer(block.block_hash, page), np.uint8)
            blocks.append(block)
        meta = self._scheduler.build_connector_meta(SchedulerOutput(blocks))
        self._worker.bind_connector_metadata(meta)
        try:
            self._worker.save_kv_layer(KV_LAYER, self._rows, None)
            self._worker.wait_for_save()
            self._worker.get_finished(set())
        finally:
            self._worker.clear_connector_metadata()
        with self._lock:
            for name, page in part:
                _note(self._saved, name)
                if self._pending.get(name) is page:
                    del self._pending[name]

    def _ending(self, request: ConnectorRequest) -> Callable[[float], None]:
        def work(deadline: float) -> None:
            self._is_async.pop(request.request_id, None)
            self._scheduler.request_finished(request, [])

        return work


def _trailer(block_hash: bytes, page: Page) -> bytes:
    check = crc32(page.data, crc32(block_hash))
    return block_hash + check.to_bytes(CHECK_BYTES, "little")


def _note(names: OrderedDict[BlockName, None], name: BlockName) -> None:
    names[name] = None
    if len(names) > MAX_KNOWN:
        names.popitem(last=False)
