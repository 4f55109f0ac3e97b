"""A request to an AsyncEngine in one call, as an iterator of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.core.text.submission import Submission

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.state.sampling_params import SamplingParams


def generate(
    engine: AsyncEngine, prompt: str | Sequence[int], params: SamplingParams, **fields: Any
) -> AsyncGenerator[RequestOutput, None]:
    return engine.iterate(Submission(prompt=prompt, params=params, **fields))
