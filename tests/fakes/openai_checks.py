"""What the official client sees of a simulated engine, directly and through a router."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import OpenAI


def check_completion_whole_and_streamed(client: OpenAI) -> None:
    body = {"model": "sim", "prompt": "Once", "max_tokens": 12, "seed": 3}
    whole = client.completions.create(**body)  # type: ignore[call-overload]
    events = list(
        client.completions.create(**body, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    text = "".join(event.choices[0].text for event in events if event.choices)
    assert text == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.completion_tokens, events[-1].usage.completion_tokens) == (12, 12)
