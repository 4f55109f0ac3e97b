"""What a caller submits to the engine: one prompt, and how it is to be answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.state.adapter import AdapterRef
    from octavo_engine.state.audio import AudioWindow
    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.retention import KVRetention
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Not validated yet; the engine settles what is left open."""

    request_id: str  # need not be unique
    prompt: str | Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None  # from its arrival
    cache_salt: str = ""
    resumed: Sequence[ResumedOutput] = ()  # one an answer, if another engine began it
    adapter: AdapterRef | None = None
    media: PromptMedia | None = None
    audio: AudioWindow | None = None
    labels: Labels | None = None  # of the prompt's prefixes; see kv.residency
    stream: bool = True  # false: one output, at the end
    # Submissions of one group are parts of one request, which shares the engine with others.
    group: str = ""
    can_move: bool = False  # a router goes on with it on another engine if this one ends it
    kv_source: KVSource | None = None  # the engine that computed its prompt, if one did
    retention: KVRetention | None = None  # of its KV blocks, after its end
    is_prefetch: bool = False  # nothing is computed: its blocks are brought from tiers
