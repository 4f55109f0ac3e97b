"""Beam search: keep the most likely few texts at every token, as a decision without effects.

Its caller asks for the most likely next tokens of `live` and hands them to `advance`. A beam is
worth its log-probability divided by its length to the power of the length penalty; tokens of the
prompt do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_BEAM_WIDTH = 10  # twice as many alternatives are needed, and twenty are to be had


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Names as in vLLM. Raises InvalidRequest."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # has no effect on which texts are the likeliest: for callers of old
    length_penalty: float = 1.0  # above 1 favours long texts
    include_stop_str_in_output: bool = False  # keep the token that ends a text

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequest(
                f"beam_width must be between 1 and {MAX_BEAM_WIDTH}; got {self.beam_width}",
                param="beam_width",
            )
        if self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1; got {self.max_tokens}", param="max_tokens"
            )


class Choice(NamedTuple):
    """A token that may come next."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Beam:
    """A text so far, without its prompt."""

    token_ids: tuple[int, ...] = ()
    cum_logprob: float = 0.0
    logprobs: tuple[float, ...] = ()  # of each token, that of the end included
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(slots=True)
class BeamSearch:
    """Of one prompt."""

    params: BeamSearchParams
    eos_token_ids: Collection[int] = ()
    live: list[Beam] = field(default_factory=lambda: [Beam()])  # the likeliest first
    done: list[Beam] = field(default_factory=list)

    def advance(self, choices: Sequence[Sequence[Choice]]) -> None:
        """One token further: the likeliest next ones of each live beam."""
        candidates: list[tuple[Beam, bool]] = []
        for beam, nexts in zip(self.live, choices, strict=True):
            candidates += [self._extended(beam, choice) for choice in nexts]
        width = self.params.beam_width
        # Twice the width is enough: at most half of them can be texts that end here.
        candidates.sort(key=lambda item: -item[0].cum_logprob)
        self.live = []
        for beam, is_end in candidates[: 2 * width]:
            if is_end:
                self.done.append(beam)
            elif len(self.live) < width:
                self.live.append(beam)

    def cut(self) -> None:
        """No token more: what lives ends with what it has."""
        for beam in self.live:
            self.done.append(Beam(beam.token_ids, beam.cum_logprob, beam.logprobs, "length"))
        self.live = []

    def best(self) -> list[Beam]:
        """The texts, the best first; after `cut`."""
        ranked = sorted(self.done, key=lambda beam: -self.score(beam))
        return ranked[: self.params.beam_width]

    def score(self, beam: Beam) -> float:
        length = max(1, len(beam.logprobs))
        return float(beam.cum_logprob / length**self.params.length_penalty)

    def _extended(self, beam: Beam, choice: Choice) -> tuple[Beam, bool]:
        params = self.params
        is_end = not params.ignore_eos and choice.token_id in self.eos_token_ids
        keeps = not is_end or params.include_stop_str_in_output
        longer = Beam(
            (*beam.token_ids, choice.token_id) if keeps else beam.token_ids,
            beam.cum_logprob + choice.logprob,
            (*beam.logprobs, choice.logprob),
            "stop" if is_end else None,
        )
        return longer, is_end
