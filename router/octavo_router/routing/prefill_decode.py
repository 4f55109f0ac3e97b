"""Prefill and decode apart: which two endpoints would share one request. A decision only.

Handing the KV cache over is the engines' business, and no transfer exists that this router could
ask for; so the configuration refuses the policy `prefill-decode` and engines with role `prefill`
(routing.build). What does not depend on the transfer is here: when a second endpoint is worth it,
and which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_router.routing.pricing import cheapest, wait_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint

MIN_REMOTE_TOKENS = 256  # fewer uncached tokens are computed where the answer is


class Pair(NamedTuple):
    prefill: Endpoint | None  # None: the decoding endpoint computes the prompt itself
    decode: Endpoint


def choose_pair(
    prompt_tokens: int,
    prefill: Sequence[Endpoint],
    prefill_matched: Sequence[int],
    decode: Sequence[Endpoint],
    decode_matched: Sequence[int],
    *,
    transfer_token_s: float,
) -> Pair:
    """The decoding endpoint by its own wait; a prefilling one if the first token comes sooner so.

    `transfer_token_s`: seconds to hand over one token's KV. `decode` must not be empty.
    """
    at = cheapest(prompt_tokens, decode, decode_matched)
    answering = decode[at]
    uncached = prompt_tokens - decode_matched[at]
    if not prefill or uncached < MIN_REMOTE_TOKENS:
        return Pair(None, answering)
    there = cheapest(prompt_tokens, prefill, prefill_matched)
    prefill_s = wait_s(prefill[there], prompt_tokens - prefill_matched[there])
    # The answering engine works off its own queue meanwhile.
    remote_s = max(prefill_s + prompt_tokens * transfer_token_s, wait_s(answering, 1))
    if remote_s < wait_s(answering, uncached):
        return Pair(prefill[there], answering)
    return Pair(None, answering)
