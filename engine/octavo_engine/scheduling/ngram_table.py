"""Where a sequence's runs of tokens were met last: hashes into four arrays of bounded size.

A slot holds no run, only where one ended, and the sequence's own tokens say which; so a run takes
some sixteen bytes, and what is found is never wrong. Of two runs that fall into one slot the later
has it, and the other goes to its slot in the next array; one that falls out of the last is
forgotten.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_BITS = 11  # of an array's size
MOST_BITS = 17  # 2 MiB a sequence
BULK = 64  # tokens from which on entering all anew is quicker
_SIZES = 64  # lengths of runs, at most
_MASK = 2**64 - 1
# Odd, and far from simple: of the hash, and of a run's slot in each array.
_STEP, _OFFSET = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xC2B2AE3D27D4EB4F, 0xA0761D6478BD642F)


class NgramTable:
    """Of one sequence. Tokens may only be added between calls."""

    __slots__ = ("_arrays", "_bits", "_least", "_length", "_most")

    def __init__(self, least: int, most: int) -> None:
        assert 1 <= least <= most < least + _SIZES
        self._least, self._most = least, most  # tokens of a run
        self._bits = 0
        self._length = 0  # tokens whose runs are entered
        self._arrays = [array("i") for _ in _FACTORS]

    @property
    def num_bytes(self) -> int:
        return sum(len(slots) * slots.itemsize for slots in self._arrays)

    def find_and_enter(self, tokens: list[int]) -> int:
        """Enter all that is new. Returns where the longest run of last tokens that came before went
        on, the latest such place; 0 if none did. Hot path: once a step and sequence."""
        length = len(tokens)
        num_runs = length * (self._most - self._least + 1)
        is_full = num_runs > len(self._arrays[0]) and self._bits < MOST_BITS
        if is_full or length - self._length > BULK:
            self._enter_all(tokens, num_runs)
        else:
            for end in range(self._length + 1, length):
                for size, digest in self._runs(tokens, end):
                    self._enter(tokens, end, size, digest)
        found = 0
        for size, digest in reversed(self._runs(tokens, length)):
            found = found or self._find(tokens, length, size, digest)
            self._enter(tokens, length, size, digest)
        self._length = length
        return found

    def _runs(self, tokens: list[int], end: int) -> list[tuple[int, int]]:
        """Length and hash of each run that ends there, the shortest first."""
        runs = []
        digest = 0
        for size in range(1, min(self._most, end) + 1):
            digest = (digest * _STEP + tokens[end - size] + 1) & _MASK
            if size >= self._least:
                runs.append((size, (digest + size * _OFFSET) & _MASK))
        return runs

    def _find(self, tokens: list[int], end: int, size: int, digest: int) -> int:
        shift, kind = 64 - self._bits, size - self._least
        for slots, factor in zip(self._arrays, _FACTORS, strict=True):
            entry = slots[(digest * factor & _MASK) >> shift]
            if entry and entry % _SIZES == kind:
                place = entry // _SIZES
                if tokens[place - size : place] == tokens[end - size : end]:
                    return place
        return 0

    def _enter(self, tokens: list[int], end: int, size: int, digest: int) -> None:
        shift = 64 - self._bits
        for slots, factor in zip(self._arrays, _FACTORS, strict=True):
            slot = (digest * factor & _MASK) >> shift
            before, slots[slot] = slots[slot], end * _SIZES + size - self._least
            if not before:
                return
            place, its_size = before // _SIZES, before % _SIZES + self._least
            its_tokens = tokens[place - its_size : place]
            if its_size == size and its_tokens == tokens[end - size : end]:
                return  # the same run, met again
            end, size = place, its_size
            digest = self._runs(tokens, end)[size - self._least][1]

    def _enter_all(self, tokens: list[int], num_runs: int) -> None:
        """All runs but those that end with the last token, into new arrays."""
        self._bits = min(max(LEAST_BITS, num_runs.bit_length()), MOST_BITS)
        self._arrays = [array("i", bytes(4 << self._bits)) for _ in _FACTORS]
        entries, digests = self._all_runs(tokens)
        for slots, factor in zip(self._arrays, _FACTORS, strict=True):
            places = (digests * np.uint64(factor)) >> np.uint64(64 - self._bits)
            latest = np.zeros(len(slots), np.int64)
            latest[places] = np.arange(len(entries))  # the last of equal ones stays
            np.frombuffer(slots, np.int32)[places] = entries
            rest = digests[latest[places]] != digests
            entries, digests = entries[rest], digests[rest]

    def _all_runs(self, tokens: list[int]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Entries and hashes, in the order of their ends."""
        all_tokens = np.array(tokens, np.uint64)
        entries, digests = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        digest = np.zeros(len(tokens), np.uint64)
        for size in range(1, min(self._most, len(tokens) - 1) + 1):
            ends = np.arange(size, len(tokens))
            # What came before the last `size` tokens of each; the first end is too early for it.
            digest = digest[-len(ends) :] * np.uint64(_STEP) + all_tokens[: len(ends)]
            digest += np.uint64(1)
            if size >= self._least:
                entries.append(ends * _SIZES + size - self._least)
                digests.append(digest + np.uint64(size * _OFFSET & _MASK))
        entry = np.concatenate(entries)
        order = np.argsort(entry, kind="stable")
        return entry[order], np.concatenate(digests)[order]
