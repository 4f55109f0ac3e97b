"""Blocks of this engine for others: found by any thread, copied by the engine between two steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.protocol.prefix_hash import unpack_tokens
from octavo_engine.tiers.block_server import (
    CopiedBlock,
    FollowedBlocks,
    FollowRequest,
    PageRequest,
)
from octavo_engine.tiers.page import is_state, is_tail, split_name, split_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from octavo_engine.backends.backend import MovesKV, MovesStates
    from octavo_engine.kv.manager import KVManager
    from octavo_engine.tiers.host_store import HostStore
    from octavo_engine.tiers.page import BlockName, Page, PageSizes
    from octavo_engine.tiers.run_store import RunStore

MAX_COPIED_BYTES = 32 << 20  # between two steps
MAX_FOLLOWED_BYTES = 64 << 20  # of one prompt that is being computed, after a step


class OwnBlocks:
    """A BlockSource: the pool's published blocks and snapshots, then host memory, then disk."""

    def __init__(
        self,
        kv: KVManager,
        mover: MovesKV,
        *,
        sizes: PageSizes,
        states: MovesStates | None = None,
        host: HostStore | None = None,
        disk: RunStore | None = None,
        wake: Callable[[], None],
        will_compute: Callable[[Collection[bytes]], bool] = lambda digests: False,
        publish_tails: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` has `serve` called soon; it is called on other threads. `will_compute`: whether a
        sequence has yet to compute one of these. `publish_tails` lets partly filled blocks of
        running sequences be found."""
        self._kv, self._mover, self._states, self._sizes = kv, mover, states, sizes
        self._host, self._disk = host, disk
        self._requests: deque[PageRequest] = deque()  # its ends are safe to use from any thread
        self._follows: deque[FollowRequest] = deque()  # likewise
        self._wake, self._will_compute = wake, will_compute
        self._publish_tails = publish_tails

    def has(self, name: BlockName) -> bool:
        digest, group = split_name(name)
        if is_state(name):
            is_here = self._slot_of(digest) is not None
        elif group < self._kv.num_groups:
            is_here = self._kv.pool.caches[group].get(digest) is not None
        else:
            return False
        return is_here or any(
            store is not None and name in store for store in (self._host, self._disk)
        )

    def copy(self, names: Sequence[BlockName]) -> PageRequest:
        request = PageRequest(names)
        self._requests.append(request)
        self._wake()
        return request

    def follow(self, names: Sequence[BlockName]) -> FollowRequest:
        request = FollowRequest(names)
        self._follows.append(request)
        self._wake()
        return request

    def serve(self) -> int:
        """Copy what was requested, up to a bound; on the engine's thread. Returns the bytes."""
        num_bytes = 0
        for _ in range(len(self._follows)):
            num_bytes += self._fill_followed(self._follows.popleft())
        while self._requests:
            if num_bytes >= MAX_COPIED_BYTES:
                self._wake()
                break
            num_bytes += self._fill(self._requests.popleft())
        return num_bytes

    def _fill_followed(self, request: FollowRequest) -> int:
        """What the last step has added, from the pool and host memory."""
        found, in_pool, missing = self._look_up(request.names)
        most = self._sizes.blocks_in(MAX_FOLLOWED_BYTES)
        is_more = len(in_pool) > most
        in_pool = in_pool[:most]
        found |= self._copied(in_pool)
        digests = [split_name(name)[0] for name in missing]
        is_more = is_more or (bool(digests) and self._will_compute(digests))
        request.fill(FollowedBlocks(found, is_more))
        return self._sizes.sum(name for name, _ in in_pool)

    def _fill(self, request: PageRequest) -> int:
        """A tail may be the beginning of any block that follows the same one."""
        tails = [name for name in request.names if is_tail(name)]
        found, in_pool, missing = self._look_up([n for n in request.names if not is_tail(n)])
        on_disk = [name for name in missing if self._disk is not None and name in self._disk]
        in_pool, num_tokens = self._add_tails(in_pool, tails)
        found |= self._copied(in_pool)

        def fill() -> None:
            copied = {
                name: CopiedBlock(page, num_tokens.get(name, BLOCK_SIZE))
                for name, page in found.items()
            }
            request.fill([copied.get(name) for name in request.names])

        if on_disk and self._disk is not None:

            def read(pages: list[Page | None]) -> None:
                there = zip(on_disk, pages, strict=True)
                found.update((name, page) for name, page in there if page is not None)
                fill()

            self._disk.fetch(on_disk, read)
        else:
            fill()
        return self._sizes.sum(name for name, _ in in_pool)

    def _add_tails(
        self, in_pool: list[tuple[BlockName, int]], tails: Sequence[BlockName]
    ) -> tuple[list[tuple[BlockName, int]], dict[BlockName, int]]:
        """With the blocks of `tails`, and how many of their tokens these have."""
        in_pool, num_tokens = list(in_pool), {}
        if tails:  # the end of a stream that moves may still be on its way to this engine
            self._publish_tails()
        for name in tails:
            parent, group, tokens = split_tail(name)
            if group >= self._kv.num_groups:
                continue
            block, count = self._kv.pool.caches[group].longest(parent, unpack_tokens(tokens))
            if block is not None:
                in_pool.append((name, block.id))
                num_tokens[name] = count
        return in_pool, num_tokens

    def _look_up(
        self, names: Sequence[BlockName]
    ) -> tuple[dict[BlockName, Page], list[tuple[BlockName, int]], list[BlockName]]:
        """Pages in host memory, names and places of blocks in the pool and of snapshots, and what
        is nowhere there."""
        found: dict[BlockName, Page] = {}
        in_pool: list[tuple[BlockName, int]] = []
        missing: list[BlockName] = []
        for name in names:
            digest, group = split_name(name)
            known = group < self._kv.num_groups
            block = self._kv.pool.caches[group].get(digest) if known else None
            slot = self._slot_of(digest) if is_state(name) else None
            if block is not None:
                in_pool.append((name, block.id))
            elif slot is not None:
                in_pool.append((name, slot))
            elif self._host is not None and (page := self._host.get(name)) is not None:
                found[name] = page
            else:
                missing.append(name)
        return found, in_pool, missing

    def _slot_of(self, digest: bytes) -> int | None:
        return None if self._kv.states is None else self._kv.states.cached.get(digest)

    def _copied(self, in_pool: Sequence[tuple[BlockName, int]]) -> dict[BlockName, Page]:
        blocks = [one for one in in_pool if not is_state(one[0])]
        pages = self._mover.save_blocks([block_id for _, block_id in blocks]) if blocks else []
        copied = dict(zip((name for name, _ in blocks), pages, strict=True))
        for name, slot in in_pool:
            if is_state(name):
                assert self._states is not None, "or there was no slot"
                copied[name] = self._states.save_states(slot)
        return copied
