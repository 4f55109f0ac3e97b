"""The grammar that a sequence keeps to, as the scheduler and the runner see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from threading import Event

    import numpy as np
    from numpy.typing import NDArray


class MaskMaker(Protocol):
    """Makes masks in threads of its own."""

    @property
    def patience_s(self) -> float:
        """How long a step waits for its masks once the logits are there."""

    def start(self, runs: Sequence[SequenceGrammar]) -> Event:
        """Start on the masks that are not started; the event is set once the quick ones are
        made."""


class SequenceGrammar(Protocol):
    """One answer's state in its grammar. It survives the preemptions of its sequence.

    `prepare` may run in another thread; until `is_ready` only that thread touches this.
    """

    mask: NDArray[np.uint32] | None  # what may come next; once it is ready
    forced: list[int]  # what must follow the next token
    drafts: list[int]  # guesses of the next tokens, for `prepare` to look past
    masks_ahead: list[NDArray[np.uint32]]  # what may come behind each, as far as possible
    is_started: bool  # `prepare` is queued or running
    is_ready: bool
    is_slow: bool
    is_complete: bool  # nothing can follow
    error: str | None
    is_internal: bool  # the error is no consequence of the grammar's text or its size

    @property
    def workers(self) -> MaskMaker: ...

    @property
    def is_busy(self) -> bool:
        """Its mask is being made."""

    def prepare(self) -> None:
        """Find out what may come next. Never raises: what goes wrong fails this sequence."""

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""

    def start_slow_mask(self) -> None:
        """Start on the next mask now if it will be slow: all tokens of a step are accepted."""

    def possible(self, drafts: list[int]) -> list[int]:
        """As many of these next tokens as could come. While no mask is being made."""

    def replay(self, tokens: Iterable[int]) -> None:
        """Take tokens of an answer that was started elsewhere."""
