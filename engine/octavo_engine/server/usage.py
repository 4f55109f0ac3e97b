"""The tokens a request cost, over all its prompts and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_engine.core.outputs import RequestOutput
    from octavo_engine.server.generation import Job


class Usage:
    """Fed with every output; exact in every way a request can end."""

    __slots__ = ("_cached", "_completion", "prompt_tokens")

    def __init__(self, job: Job) -> None:
        self.prompt_tokens = job.prompt_tokens
        self._cached: dict[int, int] = {}
        self._completion: dict[tuple[int, int], int] = {}
        for place, told in enumerate(job.told):  # its client sees one answer, and one sum
            self._completion[divmod(place, job.params.n)] = len(told.token_ids)

    def add(self, prompt_index: int, news: RequestOutput) -> None:
        if news.num_cached_tokens:
            self._cached[prompt_index] = news.num_cached_tokens
        for output in news.outputs:
            self._completion[prompt_index, output.index] = output.num_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(self._completion.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def forget_completion(self) -> None:
        """For a request that asked for no tokens and whose one token was thrown away."""
        self._completion.clear()

    def as_dict(self) -> dict[str, Any]:
        completion = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
