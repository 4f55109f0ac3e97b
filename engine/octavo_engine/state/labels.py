"""Names that routers give to prefixes of a sequence, and how many tokens each stands for.

The engine does not know what they mean; it only reports which of them its KV cache holds.
"""

from __future__ import annotations

import msgspec

NAME_BYTES = 8
ENTRY_BYTES = 12  # a name, then the number of tokens as u32, little-endian


class Labels(msgspec.Struct, frozen=True, array_like=True):
    """Parallel, by ascending block. One label per entry; a name may come with several blocks."""

    entries: bytes  # ENTRY_BYTES each
    blocks: bytes  # a native u32 each: the full block that must be cached for the entry to be true


class ResidencyChange(msgspec.Struct, omit_defaults=True):
    """What became true or untrue since the last one."""

    stored: bytes = b""  # entries
    evicted: bytes = b""  # names; to be taken out before the entries are put in
    # Entries whose last block lies outside the pool, by medium; to be put in last.
    tiers: dict[str, bytes] = {}
    snapshot: bytes | None = None  # every entry that is true now, all changes included
    snapshot_tiers: dict[str, bytes] = {}  # the same of those outside, beside `snapshot`
