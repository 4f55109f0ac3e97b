"""One answer's way through its grammar: what may come next, what must, and whether it is whole."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.errors import is_failure
from octavo_engine.grammar.panics import explained
from octavo_engine.grammar.prelude import Prelude

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from octavo_engine.grammar.prelude import BeforeMasks
    from octavo_engine.grammar.vocabulary import Vocabulary
    from octavo_engine.state.sequence_grammar import MaskMaker

    Mask = NDArray[np.uint32]

MAX_JUMP = 64  # forced tokens that are looked ahead at once
SLOW_S = 0.005  # a mask that took longer is made before its sequence is scheduled again


class GrammarRun:
    """Belongs to one sequence, and survives its preemptions.

    `prepare` may run in another thread; until `is_ready` only that thread touches this. `accept`
    takes the tokens that the answer got. Tokens which the grammar forces are found by `prepare`:
    where the mask leaves exactly one token, that is what sampling would choose.
    """

    __slots__ = (
        "_ahead",
        "_before",
        "_extra_ends",
        "_ignores_eos",
        "_is_jumping",
        "_later",
        "_matcher",
        "_vocabulary",
        "drafts",
        "error",
        "forced",
        "is_complete",
        "is_internal",
        "is_ready",
        "is_slow",
        "is_started",
        "mask",
        "masks_ahead",
        "workers",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        workers: MaskMaker,
        *,
        before: BeforeMasks | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Iterable[int] = (),
        is_jumping: bool = True,
    ) -> None:
        self.workers = workers
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._before = None if before is None else Prelude(before)  # None: it has begun
        # Where the text may end, the caller's own stop ids may end it too.
        size = vocabulary.mask_words * 32
        extra = [i for i in stop_token_ids if 0 <= i < size]
        self._extra_ends = vocabulary.mask_of(extra) if extra else None
        self._ignores_eos = ignore_eos
        self._is_jumping = is_jumping
        self._ahead: list[int] = []  # forced tokens that the matcher has taken already
        self._later: Mask | None = None  # what may follow them
        self.mask: Mask | None = None  # what may come next; once it is ready
        self.forced: list[int] = []  # what must follow the next token
        self.drafts: list[int] = []  # guesses of the next tokens, for `prepare` to look past
        self.masks_ahead: list[Mask] = []  # what may come behind each, as far as they are possible
        self.is_started = False  # `prepare` is queued or running
        self.is_ready = False
        self.is_slow = False
        self.is_complete = False  # nothing can follow
        self.error: str | None = None
        self.is_internal = False  # the error is no consequence of the grammar's text or its size

    @property
    def is_busy(self) -> bool:
        """Its mask is being made."""
        return self.is_started and not self.is_ready

    def prepare(self) -> None:
        """Find out what may come next. Never raises: what goes wrong fails this sequence."""
        started = time.perf_counter()
        try:
            self._prepare()
        except BaseException as error:
            if not is_failure(error):
                raise
            self._fail(f"{type(error).__name__}: {error}")
        if self.error is not None:
            self.mask, self.forced, self.masks_ahead = self._vocabulary.row(), [], []
        self.is_slow = time.perf_counter() - started > SLOW_S * (1 + len(self.masks_ahead))
        self.is_ready = True

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        self.is_started = self.is_ready = False
        self.mask, self.forced, self.drafts, self.masks_ahead = None, [], [], []
        if self.error is not None:
            return
        if self._ahead:
            self._accept_forced(token)
        elif self._before is not None:
            if self._before.follow(token):
                self._before = None
                self._settle()
        elif self._consume(token):
            self._settle()

    def start_slow_mask(self) -> None:
        """A mask that will be slow is started once all tokens of a step are accepted. Its sequence
        is not scheduled before it is ready."""
        if self.is_slow and not self.is_started and not self.is_complete:
            self.workers.start([self])

    def possible(self, drafts: list[int]) -> list[int]:
        """As many of these next tokens as could come. While no mask is being made."""
        if self.error is not None:
            return []
        if self._before is not None:
            return drafts
        try:
            return drafts[: self._matcher.validate_tokens(drafts)]
        except BaseException as error:
            if not is_failure(error):
                raise
            return []  # `prepare` will say what is wrong

    def replay(self, tokens: Iterable[int]) -> None:
        """Take tokens of an answer that was begun elsewhere."""
        ends = set(self._vocabulary.eos_token_ids)
        for token in tokens:
            if token in ends or self.error is not None:
                return
            self.accept(token)

    def _accept_forced(self, token: int) -> None:
        if token != self._ahead.pop(0):
            self.is_internal = True
            self._fail("a token was chosen that the mask forbids")
        elif not self._ahead:
            self._settle()
            if self._later is not None:
                self.mask, self._later = self._later, None
                self.is_started = self.is_ready = True

    def _prepare(self) -> None:
        self.mask = self._next_mask()
        if self.drafts:
            self.masks_ahead = self._masks_behind(self.drafts)
            return
        if not self._is_jumping or self._before is not None:
            return
        ahead: list[int] = []
        mask: Mask | None = self.mask
        while mask is not None and len(ahead) < MAX_JUMP:
            token = self._only(mask)
            if token is None or not self._consume(token):
                break
            ahead.append(token)
            mask = None if self._matcher.is_stopped() else self._next_mask()
        if ahead:
            self._ahead, self.forced, self._later = ahead, ahead[1:], mask

    def _masks_behind(self, drafts: list[int]) -> list[Mask]:
        """One a draft, up to a draft that cannot come, or that ends or begins what is bound."""
        masks: list[Mask] = []
        try:
            following = self._before_behind if self._before is not None else self._bound_behind
            masks.extend(following(drafts))
        except BaseException as error:
            if not is_failure(error):
                raise  # else: drafts beyond are not verified; the answer itself may never go there
        return masks

    def _before_behind(self, drafts: list[int]) -> Iterator[Mask]:
        before = copy.copy(self._before)
        assert before is not None
        for token in drafts:
            if not _has(before.mask, token) or before.follow(token):
                return
            yield before.mask

    def _bound_behind(self, drafts: list[int]) -> Iterator[Mask]:
        matcher, mask, ends = self._matcher.deep_copy(), self.mask, self._vocabulary.ends
        for token in drafts:
            assert mask is not None
            if not _has(mask, token) or _has(ends, token):
                return
            if not matcher.consume_token(token) or matcher.is_stopped():
                return
            mask = self._mask_of(matcher)
            if matcher.is_error():
                return
            yield mask

    def _next_mask(self) -> Mask:
        if self._before is not None:
            return self._before.mask
        mask = self._mask_of(self._matcher)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        return mask

    def _mask_of(self, matcher: LLMatcher) -> Mask:
        mask = self._vocabulary.row()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._extra_ends is not None and self._vocabulary.may_end(mask):
            mask |= self._extra_ends
        if self._ignores_eos:
            mask &= ~self._vocabulary.ends
        return mask

    def _only(self, mask: Mask) -> int | None:
        """The one token that is allowed, if it is no end."""
        if np.count_nonzero(mask) != 1:  # the usual case, so the cheap question first
            return None
        place = int(mask.argmax())
        word = int(mask[place])
        ends = int(self._vocabulary.ends[place])
        if self._extra_ends is not None:
            ends |= int(self._extra_ends[place])
        if word & (word - 1) or word & ends:
            return None
        return place * 32 + word.bit_length() - 1

    def _consume(self, token: int) -> bool:
        try:
            if self._matcher.consume_token(token):
                return True
            self._fail(self._matcher.get_error())
        except BaseException as error:
            if not is_failure(error):
                raise
            self._fail(f"{type(error).__name__}: {error}")
        return False

    def _settle(self) -> None:
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        else:
            self.is_complete = self._before is None and self._matcher.is_stopped()

    def _fail(self, reason: str) -> None:
        self.error = explained(reason) or "the grammar does not allow this token"


def _has(mask: Mask, token: int) -> bool:
    return token >> 5 < len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)
