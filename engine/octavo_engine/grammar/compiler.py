"""Compiles grammars in threads beside the step loop, each once, with a deadline and a bounded
queue."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from octavo_engine.errors import (
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
    is_failure,
)
from octavo_engine.grammar.buckets import SECONDS_BUCKETS
from octavo_engine.grammar.check import compiler_source, refusal
from octavo_engine.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from octavo_engine.grammar.panics import is_dead_end
from octavo_engine.grammar.prelude import BeforeMasks
from octavo_engine.grammar.priority import yield_to_others
from octavo_engine.grammar.process_memory import resident_bytes
from octavo_engine.grammar.schema import PARAM

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.grammar.vocabulary import Vocabulary
    from octavo_engine.state.grammar import GrammarSpec

logger = logging.getLogger(__name__)

# What a compiled grammar holds besides its source: automata that grow with use, within limits.
_BASE_BYTES = 1 << 20
_BYTES_PER_CHARACTER = 64
_MAX_THREADS = 8  # with those that are stuck
_TRY_OUT_TOKENS = 32
_TRY_OUT_S = 0.01  # beyond the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerSettings:
    """How much compiling may cost."""

    deadline_s: float = 2.0  # of one grammar, once it is begun
    queue_s: float = 10.0  # until it is begun
    max_pending: int = 64
    num_threads: int = 2
    cache_bytes: int = 256 << 20
    limits: GrammarLimits = DEFAULT_LIMITS


@dataclass(slots=True)
class CompiledGrammar:
    """What the answers of equal specs share. `matcher` is never advanced: copies are."""

    matcher: LLMatcher
    before: BeforeMasks | None
    vocabulary: Vocabulary


@dataclass(slots=True, eq=False)
class Compilation:
    """One grammar on its way. Fields are set by its thread; `is_done` last."""

    spec: GrammarSpec
    queued_at: float
    begun_at: float | None = None
    ended_at: float = 0.0
    compiled: CompiledGrammar | None = None
    error: RequestError | None = None
    num_bytes: int = 0  # that the process grew by, meanwhile
    is_done: bool = False
    is_given_up: bool = False


@dataclass(slots=True)
class CompileStats:
    """Counters that only grow."""

    hits: int = 0
    failures: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BUCKETS) + 1))
    seconds: float = 0.0


class GrammarCompiler:
    """Owned by the thread that calls it; only `_work` runs in others."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        settings: CompilerSettings | None = None,
        *,
        wake: Callable[[], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or CompilerSettings()
        self.stats = CompileStats()
        self.wake = wake or (lambda: None)  # called from a thread when something is done
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._now = now
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._cached_bytes = 0
        self._pending: dict[GrammarSpec, Compilation] = {}
        self._queue: SimpleQueue[Compilation | None] = SimpleQueue()
        self._num_threads = 0
        self._closed = False

    @property
    def cached_bytes(self) -> int:
        return self._cached_bytes

    def compile(self, spec: GrammarSpec) -> Compilation:
        """Done at once if it is known; otherwise `settle` says so. Raises QueueFull."""
        if (known := self._cache.get(spec)) is not None:
            self._cache.move_to_end(spec)
            self.stats.hits += 1
            return known
        if (pending := self._pending.get(spec)) is not None:
            return pending
        if len(self._pending) >= self.settings.max_pending:
            self.settle()
        if len(self._pending) >= self.settings.max_pending:
            raise QueueFull(
                f"{len(self._pending)} grammars wait to be compiled, the most allowed",
                code="grammar_queue_full",
                retry_after_s=1,
            )
        compilation = self._pending[spec] = Compilation(spec, self._now())
        self._more_threads(self.settings.num_threads)
        self._queue.put(compilation)
        return compilation

    def settle(self) -> None:
        """Take in what is done, and give up what takes too long."""
        now = self._now()
        for compilation in list(self._pending.values()):
            if compilation.is_done:
                self._take(compilation)
            elif (error := self._overdue(compilation, now)) is not None:
                compilation.is_given_up = True
                compilation.error = error
                self._pending.pop(compilation.spec)
                self.stats.failures += 1

    def close(self) -> None:
        """End the threads; one that is stuck ends with the process."""
        if not self._closed:
            self._closed = True
            for _ in range(self._num_threads):
                self._queue.put(None)

    def _take(self, compilation: Compilation) -> None:
        del self._pending[compilation.spec]
        stats = self.stats
        seconds = compilation.ended_at - (compilation.begun_at or compilation.ended_at)
        stats.seconds += seconds
        stats.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        if compilation.error is not None:
            stats.failures += 1
            if not isinstance(compilation.error, InvalidRequest):
                return  # it may succeed another time
        self._cache[compilation.spec] = compilation
        self._cached_bytes += _cost(compilation)
        while self._cached_bytes > self.settings.cache_bytes and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= _cost(oldest)

    def _overdue(self, compilation: Compilation, now: float) -> RequestError | None:
        settings = self.settings
        if compilation.begun_at is None:
            if now - compilation.queued_at <= settings.queue_s:
                return None
            return QueueFull(
                "the grammar waited too long to be compiled",
                code="grammar_queue_full",
                retry_after_s=5,
            )
        if now - compilation.begun_at <= settings.deadline_s:
            return None
        self._more_threads(self._num_threads + 1)  # its thread may be lost
        return InvalidRequest(
            f"the grammar takes more than {settings.deadline_s:g} s to compile; make it smaller",
            param=PARAM,
            code="grammar_timeout",
        )

    def _more_threads(self, wanted: int) -> None:
        while self._num_threads < min(wanted, _MAX_THREADS):
            self._num_threads += 1
            threading.Thread(
                target=self._work, name=f"octavo-grammar-{self._num_threads}", daemon=True
            ).start()

    # -- in the threads --------------------------------------------------------------------------

    def _work(self) -> None:
        while (compilation := self._queue.get()) is not None:
            if not compilation.is_given_up:
                self._compile(compilation)
                self.wake()

    def _compile(self, compilation: Compilation) -> None:
        try:
            vocabulary = self._shared_vocabulary()
            yield_to_others()  # not before: all grammars wait for the vocabulary
            compilation.begun_at = self._now()
            before = resident_bytes()
            compilation.compiled = self._compiled(compilation.spec, vocabulary)
            compilation.num_bytes = resident_bytes() - before
        except RequestError as error:
            compilation.error = error
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.exception("A grammar could not be compiled")
            if compilation.begun_at is None or isinstance(error, OSError | MemoryError):
                name = type(error).__name__
                compilation.error = GenerationFailed(f"the grammar could not be compiled: {name}")
            else:  # the library gave up on this text; it will on the next engine too
                compilation.error = refusal("the compiler failed on it")
        compilation.ended_at = self._now()
        compilation.is_done = True

    def _shared_vocabulary(self) -> Vocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _compiled(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        limits = self.settings.limits
        source = compiler_source(spec, vocabulary.specials, limits)
        matcher = LLMatcher(
            vocabulary.compiler_tokenizer, source, limits=limits.parser_limits(), log_level=0
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # so that the first step finds automata begun
        if matcher.is_error():
            raise refusal(matcher.get_error())
        _try_out(matcher.deep_copy(), vocabulary)
        before = None
        if spec.after:
            opens = tuple(mark.encode() for mark in spec.opens)
            before = BeforeMasks(vocabulary, spec.after.encode(), budget=spec.budget, opens=opens)
        return CompiledGrammar(matcher, before, vocabulary)


def _try_out(matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """A few steps of some answer: what bursts on its first tokens is refused before it runs.

    Raises InvalidRequest. That a way ends nowhere is no reason: another one may not.
    """
    deadline = time.perf_counter() + _TRY_OUT_S
    for _ in range(_TRY_OUT_TOKENS):
        mask = vocabulary.row()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        mask &= ~vocabulary.ends
        place = int((mask != 0).argmax())
        word = int(mask[place])
        if matcher.is_error() or not word:
            break
        matcher.consume_token(place * 32 + (word & -word).bit_length() - 1)
        if matcher.is_error() or matcher.is_stopped() or time.perf_counter() > deadline:
            break
    if matcher.is_error() and not is_dead_end(matcher.get_error()):
        raise refusal(matcher.get_error())


def _cost(compilation: Compilation) -> int:
    """In bytes, more rather than less: what others allocated meanwhile counts here too."""
    size = _BYTES_PER_CHARACTER * len(compilation.spec.text)
    size += _BASE_BYTES if compilation.compiled is not None else 1024
    return max(size, compilation.num_bytes)
