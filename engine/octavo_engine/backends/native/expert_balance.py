"""Which expert lies in which slot, so that all ranks have about as many rows to compute. Pure.

Each rank has some slots in a row, and an expert may be in several. Every rank decides for itself
from the same counts, so the same counts must give the same slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.native.shard import Shard, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Weights are moved only where the busiest rank then has so much less to do: counts vary anyway.
LEAST_GAIN = 0.05


def first_slots(num_slots: int, num_experts: int) -> list[int]:
    """The expert of each slot at the start: all in their order, then the first of them again."""
    return [slot % num_experts for slot in range(num_slots)]


def slot_ranges(num_slots: int, num_ranks: int) -> list[range]:
    """The slots of each rank."""
    return [range(*split(num_slots, shard)) for shard in Shard(0, num_ranks).all()]


def rank_loads(rows: Sequence[int], slots: Sequence[int], num_ranks: int) -> list[float]:
    """The rows of each rank, where slots with the same expert share its rows evenly."""
    shares = np.array(rows, np.float64) / np.bincount(slots, minlength=len(rows))
    return [float(shares[slots[own.start : own.stop]].sum()) for own in _own(slots, num_ranks)]


def balance(rows: Sequence[int], slots: Sequence[int], num_ranks: int) -> list[int]:
    """The expert of each slot from now on, where those of `rows` by expert were computed lately.
    Most stay where they are; all do where little is gained."""
    if num_ranks == 1 or not any(rows):
        return list(slots)
    copies = _copies(rows, len(slots), num_ranks)
    placed = _place_copies(rows, copies, slots, num_ranks)
    _exchange(np.array(rows, np.float64) / copies, placed, num_ranks)
    before, after = (max(rank_loads(rows, each, num_ranks)) for each in (slots, placed))
    return placed if after <= (1 - LEAST_GAIN) * before else list(slots)


def _own(slots: Sequence[int], num_ranks: int) -> list[range]:
    return slot_ranges(len(slots), num_ranks)


def _copies(rows: Sequence[int], num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """How many slots each expert gets: one, and one more in turn for that whose slots have most to
    do. A second one on the same rank would help nobody."""
    loads = np.array(rows, np.float64)
    copies = np.ones(len(rows), np.int64)
    for _ in range(num_slots - len(rows)):
        copies[np.where(copies < num_ranks, loads / copies, -1.0).argmax()] += 1
    return copies


def _place_copies(
    rows: Sequence[int], copies: NDArray[np.int64], slots: Sequence[int], num_ranks: int
) -> list[int]:
    """Slots with so many copies of each expert, all others as they are."""
    placed = list(slots)
    ranges = _own(slots, num_ranks)
    rank_of = [rank for rank, own in enumerate(ranges) for _ in own]
    shares = np.array(rows, np.float64) / copies
    free: list[int] = []
    for expert in np.flatnonzero(np.bincount(slots, minlength=len(rows)) > copies):
        loads = rank_loads(rows, placed, num_ranks)
        own = [slot for slot, held in enumerate(placed) if held == expert]
        own.sort(key=lambda slot: (-loads[rank_of[slot]], slot))
        free += own[: len(own) - int(copies[expert])]
    wanted = copies - np.bincount([e for s, e in enumerate(placed) if s not in free],
                                  minlength=len(rows))  # fmt: skip
    for expert in sorted(np.flatnonzero(wanted > 0), key=lambda e: (-shares[e], e)):
        for _ in range(int(wanted[expert])):
            kept = [0.0] * num_ranks
            for slot, held in enumerate(placed):
                kept[rank_of[slot]] += 0.0 if slot in free else shares[held]
            holding = {rank_of[s] for s, e in enumerate(placed) if e == expert and s not in free}
            best = min(free, key=lambda s: (rank_of[s] in holding, kept[rank_of[s]], s))
            free.remove(best)
            placed[best] = int(expert)
    return placed


def _exchange(shares: NDArray[np.float64], placed: list[int], num_ranks: int) -> None:
    """Exchange experts between the rank with most to do and that with least, as long as the larger
    of the two then has less."""
    ranges = _own(placed, num_ranks)
    held = np.array(placed)
    for _ in placed:
        loads = [shares[held[own.start : own.stop]].sum() for own in ranges]
        most, least = (ranges[int(pick(loads))] for pick in (np.argmax, np.argmin))
        gap = max(loads) - min(loads)
        out, back = held[most.start : most.stop], held[least.start : least.stop]
        moved = shares[out][:, None] - shares[back][None, :]
        # Of two slots of one expert a rank has no use.
        moved[np.isin(out, back), :] = 0.0
        moved[:, np.isin(back, out)] = 0.0
        left = np.maximum(gap - moved, moved)  # how far the larger is above what the smaller was
        i, j = divmod(int(left.argmin()), len(back))
        if left[i, j] >= gap * (1 - 1e-9):
            break
        held[most.start + i], held[least.start + j] = back[j], out[i]
    placed[:] = held.tolist()
