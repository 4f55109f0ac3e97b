"""A request to the engine core: one request is one sequence (n > 1 arrives as n requests)."""

from __future__ import annotations

import msgspec

from octavo_engine.state.adapter import AdapterRef  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.audio import AudioWindow  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.kv_source import KVSource  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.labels import Labels  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.media import MediaItem, MediaSpan  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.retention import KVRetention  # noqa: TC001  (msgspec reads it)
from octavo_engine.state.sampling_params import SamplingParams  # noqa: TC001  (msgspec reads it)

BACKGROUND = 2**31  # a priority that no client may ask for: only what no other request needs


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. Immutable; crosses the process boundary as msgpack."""

    request_id: str  # unique in this engine's life; made by us, never by a client
    prompt_token_ids: list[int]  # at least one
    params: SamplingParams
    output_token_ids: list[
        int
    ] = []  # tokens generated elsewhere before: the resume of a broken stream
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0  # settled 64-bit key of the counter-based generator
    arrival_at: float = 0.0  # monotonic seconds
    deadline_at: float | None = None  # monotonic seconds; work past it is dropped
    priority: int = 0  # lower runs first, under the priority policy
    is_whole: bool = False  # nothing of the answer is shown before its end
    cache_salt: str = ""  # separates prefix caches of tenants
    adapter: AdapterRef | None = None
    labels: Labels | None = None  # of the prompt's prefixes; see kv.residency
    media: tuple[MediaSpan, ...] = ()  # pictures in the prompt, by their place; they do not overlap
    media_items: tuple[MediaItem, ...] = ()  # what they are made from, each picture once
    audio: AudioWindow | None = None  # of models that read audio; the core puts it in a slot
    group: str = ""  # the client's request, where it has several sequences; else empty
    kv_source: KVSource | None = None  # the engine that computed its prompt, if one did
    retention: KVRetention | None = None  # of its blocks, after its end
    is_prefetch: bool = False  # nothing is computed: its blocks are brought from tiers
