"""A request that was parsed and checked, as the engine runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.protocol.route_keys import Kind
    from octavo_engine.server.routers.route_labels import RoutedPrompt
    from octavo_engine.state.adapter import AdapterRef
    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.state.retention import KVRetention
    from octavo_engine.state.sampling_params import SamplingParams

    Note = Callable[[int, RequestOutput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that was parsed and checked, as the engine wants it."""

    request_id: str  # the client's or ours; the engine sees it with a suffix of our own
    prompts: list[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    adapter: AdapterRef | None = None  # the model's own answers where there is none
    media: PromptMedia | None = None  # pictures in the first prompt
    deadline_s: float | None = None
    # Of a stream that a router can go on with elsewhere, see server.resume:
    seed: int | None = None  # that all seeds follow from
    seeds: tuple[int, ...] = ()  # one a prompt
    resumed: tuple[ResumedOutput, ...] = ()  # prompt-major; empty unless resumed
    kv_address: str = ""  # where this engine serves its KV blocks, if it does
    route: RoutedPrompt | None = None  # how routers know the first prompt
    beams: BeamSearchParams | None = None  # the likeliest answers are searched, not sampled
    group: str = ""  # the request that this one and others are parts of; empty: a whole one
    kv_source: KVSource | None = None  # the engine that computed the prompts, if one did
    retention: KVRetention | None = None  # of its KV blocks, after its end
    is_prefetch: bool = False  # nothing is computed: its blocks are brought from tiers

    @property
    def can_move(self) -> bool:
        """Whether its router goes on with it on another engine, if this one ends it."""
        # Items with log-probabilities have no lines for routers: see server.routers.item_events.
        return self.seed is not None and self.params.logprobs is None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class JobOutput(NamedTuple):
    """New output of one of a request's prompts."""

    prompt_index: int
    output: RequestOutput


class RouteSource(NamedTuple):
    """What the route keys of a prompt are made from."""

    kind: Kind  # the shape of the body that came, by which routers know it
    text: str | None = None  # of a chat: its rendered prompt
    render_next: Callable[[str], Awaitable[str]] | None = None
