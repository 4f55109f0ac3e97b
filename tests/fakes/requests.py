"""Builders of requests and sequences: only what a test is about has to be said."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.state.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.state.adapter import AdapterRef
    from octavo_engine.state.media import MediaItem, MediaSpan
    from octavo_engine.state.retention import KVRetention

_numbers = itertools.count()


def make_request(
    prompt: Iterable[int] | int = 5,
    *,
    request_id: str | None = None,
    output: Iterable[int] = (),
    eos: tuple[int, ...] = (),
    priority: int = 0,
    deadline_at: float | None = None,
    cache_salt: str = "",
    seed: int = 0,
    group: str = "",
    adapter: AdapterRef | None = None,
    media: tuple[MediaSpan, ...] = (),
    media_items: tuple[MediaItem, ...] = (),
    retention: KVRetention | None = None,
    is_prefetch: bool = False,
    **params: Any,
) -> EngineRequest:
    """A request. A number as prompt gives so many tokens; `params` are sampling parameters."""
    tokens = make_prompt(prompt) if isinstance(prompt, int) else list(prompt)
    return EngineRequest(
        request_id=f"r{next(_numbers)}" if request_id is None else request_id,
        prompt_token_ids=tokens,
        output_token_ids=list(output),
        params=SamplingParams(**params),
        eos_token_ids=eos,
        priority=priority,
        deadline_at=deadline_at,
        cache_salt=cache_salt,
        seed=seed,
        group=group,
        adapter=adapter,
        media=media,
        media_items=media_items,
        retention=retention,
        is_prefetch=is_prefetch,
    )


def make_prompt(num_tokens: int, *, first: int = 0) -> list[int]:
    """`num_tokens` ids; prompts with another `first` differ from the first token on."""
    return [(first + 7 * i) % 500 for i in range(num_tokens)]


def make_sequence(
    prompt: Iterable[int] | int = 5, *, max_num_tokens: int = 1_000_000, **request: Any
) -> Sequence:
    """A sequence that has just arrived."""
    return Sequence(make_request(prompt, **request), max_num_tokens=max_num_tokens)
