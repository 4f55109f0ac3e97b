"""Log-probabilities of many tokens in a few long lists: nothing for the garbage collector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast, overload

from octavo_engine.core.text.logprobs import DecodedLogprobs, TokenChoice

if TYPE_CHECKING:
    from collections.abc import Iterable

E = TypeVar("E", bound=DecodedLogprobs | None)


@dataclass(slots=True)
class FlatLogprobs(Sequence[E], Generic[E]):
    """Reads as the list of DecodedLogprobs that it stands for; each is made when it is requested.

    Position i has the entries [start_indices[i], end_indices[i]) of the other lists: its own token
    first, then the alternatives. One that nothing is known of, the first of a prompt, has none.
    Names are vLLM's.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str] = field(default_factory=list)
    decoded_bytes: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # one a position

    def append(self, entry: E) -> None:
        self.start_indices.append(len(self.token_ids))
        if entry is not None:
            ones: list[DecodedLogprobs | TokenChoice] = [entry, *entry.top]
            for one in ones:
                self.token_ids.append(one.token_id)
                self.logprobs.append(one.logprob)
                self.ranks.append(one.rank)
                self.decoded_tokens.append(one.text)
                self.decoded_bytes.append(one.bytes)
        self.end_indices.append(len(self.token_ids))
        self.offsets.append(0 if entry is None else entry.offset)

    def extend(self, entries: Iterable[E]) -> None:
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> E: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs[E]: ...

    def __getitem__(self, index: int | slice) -> E | FlatLogprobs[E]:
        if isinstance(index, int):
            return self._entry(index)
        part: FlatLogprobs[E] = FlatLogprobs()
        part.extend(self._entry(place) for place in range(*index.indices(len(self))))
        return part

    def _entry(self, index: int) -> E:
        first, end = self.start_indices[index], self.end_indices[index]
        if first == end:
            return cast("E", None)
        top = [
            TokenChoice(
                self.token_ids[k], self.decoded_tokens[k], self.decoded_bytes[k],
                self.logprobs[k], self.ranks[k],
            )
            for k in range(first + 1, end)
        ]  # fmt: skip
        rank = self.ranks[first]
        assert rank is not None  # of the token itself it is always known
        entry = DecodedLogprobs(
            self.token_ids[first], self.decoded_tokens[first], self.decoded_bytes[first],
            self.logprobs[first], rank, top, self.offsets[index],
        )  # fmt: skip
        return cast("E", entry)
