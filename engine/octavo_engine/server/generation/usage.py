"""The tokens a request cost, over all its prompts and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.server.generation.job import Job


class Usage:
    """Fed with every output; exact in every way a request can end."""

    __slots__ = ("_cached", "_completion", "_reasoning", "prompt_tokens")

    def __init__(self, job: Job) -> None:
        self.prompt_tokens = job.prompt_tokens
        self._cached: dict[int, int] = {}
        self._completion: dict[tuple[int, int], int] = {}
        self._reasoning: dict[int, int] = {}
        for place, resumed in enumerate(job.resumed):  # its client sees one answer, and one sum
            self._completion[divmod(place, job.params.n)] = len(resumed.token_ids)

    def add(self, prompt_index: int, result: RequestOutput) -> None:
        self.note_prompt(prompt_index, result)
        for output in result.outputs:
            self.note_answer(prompt_index, output.index, output.num_tokens)

    def note_prompt(self, prompt_index: int, result: RequestOutput) -> None:
        if result.num_cached_tokens:
            self._cached[prompt_index] = result.num_cached_tokens

    def note_answer(self, prompt_index: int, index: int, num_tokens: int) -> None:
        """So many tokens of an answer so far. For sums on the way, which must not run ahead of the
        events: who reads on elsewhere after one of them would see them shrink."""
        self._completion[prompt_index, index] = num_tokens

    def copy(self) -> Usage:
        """As it stands, to go on apart."""
        other = object.__new__(Usage)
        other.prompt_tokens = self.prompt_tokens
        other._cached = dict(self._cached)
        other._completion = dict(self._completion)
        other._reasoning = dict(self._reasoning)
        return other

    def note_reasoning(self, index: int, num_tokens: int) -> None:
        """So many tokens of an answer to the first prompt were reasoning."""
        self._reasoning[index] = num_tokens

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self._completion.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    def forget_completion(self) -> None:
        """For a request for no tokens, whose one token was thrown away."""
        self._completion.clear()

    def as_dict(self) -> dict[str, Any]:
        completion = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
