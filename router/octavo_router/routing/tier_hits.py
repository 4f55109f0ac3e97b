"""What a hit on a slower memory is worth: prompt tokens that need not be computed, at a discount.

A block in host memory or on disk must be read before it is used. So it saves its tokens but for
what the read costs, in tokens that would be computed in the same time. Our own engines report what
their memories hold (residency.tier_slots), other servers by KV events (signals.kv_tier_keys).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from octavo_engine.protocol.route_keys import CHUNK_BYTES, KEY_BYTES
from octavo_router.residency.tier_slots import SAVED_PERCENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_router.endpoints.endpoint import Endpoint

    class Matches(Protocol):
        """The part of the residency index that is read here."""

        def match(self, keys: bytes, slots: list[int]) -> list[int]: ...


TOKENS_PER_KEY: Final = CHUNK_BYTES // 4  # of prompts given as token ids, 4 bytes each


def saved_tokens(matched_tokens: int, keys: bytes, held: Mapping[int, str]) -> int:
    """The tokens saved where the first `matched_tokens` of a prompt lie in the device's memory.

    `held` is the medium of each key that a slower memory holds; its keys are of prompts given as
    token ids. Keys count from the end of the match to the first that is missing.
    """
    percents = 0
    at = matched_tokens // TOKENS_PER_KEY * KEY_BYTES
    while at < len(keys):
        medium = held.get(int.from_bytes(keys[at : at + KEY_BYTES], "little"))
        if medium is None:
            break
        percents += SAVED_PERCENT[medium]
        at += KEY_BYTES
    return matched_tokens + TOKENS_PER_KEY * percents // 100


def count_tier_hits(
    endpoints: Sequence[Endpoint], keys: bytes, matched: list[int], index: Matches
) -> None:
    """Add to `matched`, of each endpoint's device memory, what its slower memory saves."""
    for i, endpoint in enumerate(endpoints):
        tiers = endpoint.tiers
        if tiers is not None and tiers.slots:
            matched[i] = tiers.saved_tokens(matched[i], index.match(keys, tiers.slots))
        elif endpoint.tier_keys:
            matched[i] = saved_tokens(matched[i], keys, endpoint.tier_keys)
