"""A workload: which prompts arrive when. Prompts are ranges of token ids, shared where they are.

A prompt is a tuple of ranges: no token is stored twice, however many prompts begin alike. Ranges
that are different texts never overlap, so equal ids are equal texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo.study.engine_models import EngineModel

Prompt = tuple[range, ...]
MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. With `after` it follows that one's end, else the beginning, by `delay_s`."""

    prompt: Prompt
    answer: range  # the tokens it will be answered with: a later turn may quote them
    delay_s: float
    after: int | None = None  # place of an earlier arrival
    session: str = ""
    adapter: str = ""  # "" for the base model

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompt))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.answer)


@dataclass(frozen=True, slots=True)
class Workload:
    """In order of arrival, as far as that is known."""

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def span_s(self) -> float:
        """From the first arrival to the last of those that follow no other."""
        times = [arrival.delay_s for arrival in self.arrivals if arrival.after is None]
        return max(times) - min(times)

    def faster(self, factor: float) -> Workload:
        """Arrivals closer together by `factor`; people do not think faster for it."""
        arrivals = tuple(
            arrival
            if arrival.after is not None
            else replace(arrival, delay_s=arrival.delay_s / factor)
            for arrival in self.arrivals
        )
        return Workload(self.name, arrivals)

    def first(self, count: int) -> Workload:
        return Workload(self.name, self.arrivals[:count])

    def load(self, model: EngineModel, num_engines: int) -> float:
        """The work of all prompts, as if nothing were cached, over what engines can do meanwhile.

        Above 1 only a cache can save them; how busy they really were is measured.
        """
        work_s = sum(
            model.work_s(arrival.num_prompt_tokens, len(arrival.answer))
            for arrival in self.arrivals
        )
        return work_s / (max(self.span_s, 1e-9) * num_engines)

    def at_load(self, load: float, model: EngineModel, num_engines: int) -> Workload:
        """The same arrivals, at the pace that makes `load`."""
        return self.faster(load / self.load(model, num_engines))


class Texts:
    """Hands out ranges of token ids that no other request has."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, num_tokens: int) -> range:
        """A text of so many tokens, unlike any other. Raises ConfigError: there are too many."""
        first = self._next
        self._next += num_tokens
        if self._next > MAX_TOKEN_ID:
            raise ConfigError(
                "the workload has more than 2**32 different tokens; use fewer requests"
            )
        return range(first, self._next)


def tokens_of(prompt: Prompt) -> list[int]:
    return list(chain.from_iterable(prompt))
