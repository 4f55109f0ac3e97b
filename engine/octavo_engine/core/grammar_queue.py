"""Requests that wait for their grammar, and what becomes of them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.core.refusals import refusal_of
from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.masks import MaskWorkers
from octavo_engine.grammar.run import GrammarRun
from octavo_engine.sampling.adjust import Adjustments
from octavo_engine.state.outputs import SequenceOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.errors import RequestError
    from octavo_engine.grammar.compiler import Compilation, CompiledGrammar, GrammarCompiler
    from octavo_engine.state.request import EngineRequest


class Settled(NamedTuple):
    """What came of requests since the last look."""

    ready: list[tuple[EngineRequest, GrammarRun]]
    refused: list[tuple[str, RequestError]]
    finished: list[SequenceOutput]  # their deadline passed


class GrammarQueue:
    """Between a request's arrival and its place in line. The engine's thread owns it."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        workers: MaskWorkers | None = None,
        *,
        is_jumping: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `is_jumping` forced tokens are sampled one by one, as tests compare."""
        self._is_jumping = is_jumping
        self.compiler = compiler
        self.workers = workers or MaskWorkers()
        self._now = now
        self._woken = threading.Event()
        compiler.wake = self._woken.set
        self._waiting: dict[str, tuple[EngineRequest, Compilation]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: EngineRequest) -> GrammarRun | None:
        """The run if the grammar is known already; otherwise the request waits here.

        Raises InvalidRequest or QueueFull.
        """
        assert request.params.grammar is not None
        if request.request_id in self._waiting:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        compilation = self.compiler.compile(request.params.grammar)
        if compilation.is_done and compilation.error is not None:
            raise _copied(compilation.error)
        if compilation.is_done and compilation.compiled is not None:
            return self._run_of(request, compilation.compiled)
        self._waiting[request.request_id] = (request, compilation)
        return None

    def settle(self) -> Settled:
        """The requests that need not wait any longer."""
        settled = Settled([], [], [])
        if not self._waiting:
            return settled
        self.compiler.settle()
        now = self._now()
        for request_id, (request, compilation) in list(self._waiting.items()):
            if compilation.error is not None and (compilation.is_done or compilation.is_given_up):
                settled.refused.append((request_id, _copied(compilation.error)))
            elif compilation.is_done and compilation.compiled is not None:
                try:
                    run = self._run_of(request, compilation.compiled)
                    settled.ready.append((request, run))
                except Exception as error:
                    settled.refused.append((request_id, refusal_of(error, request_id)))
            elif request.deadline_at is not None and now >= request.deadline_at:
                settled.finished.append(
                    SequenceOutput(request_id=request_id, finish_reason="deadline")
                )
            else:
                continue
            del self._waiting[request_id]
        return settled

    def abort(self, request_id: str) -> SequenceOutput | None:
        """Forget one that waits; its compilation goes on, for the cache."""
        if self._waiting.pop(request_id, None) is None:
            return None
        return SequenceOutput(request_id=request_id, finish_reason="abort")

    def _run_of(self, request: EngineRequest, compiled: CompiledGrammar) -> GrammarRun:
        return run_of(request, compiled, self.workers, is_jumping=self._is_jumping)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is compiled, for a caller that has nothing else to do."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def close(self) -> None:
        self.compiler.close()
        self.workers.close()


def run_of(
    request: EngineRequest,
    compiled: CompiledGrammar,
    workers: MaskWorkers,
    *,
    is_jumping: bool = True,
) -> GrammarRun:
    """A sequence's own way through the grammar, with the tokens of a resume behind it."""
    params = request.params
    run = GrammarRun(
        compiled.matcher.deep_copy(),
        compiled.vocabulary,
        workers,
        before=compiled.before,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        is_jumping=(
            # Only where sampling could not but choose the forced token, and its
            # probability is not reported.
            is_jumping
            and params.logprobs is None
            and not params.logits_processors
            and Adjustments.of(request) is None
        ),
    )
    run.replay(request.output_token_ids)
    if run.error is not None:
        raise InvalidRequest(
            f"the tokens generated so far do not follow the grammar: {run.error}", param="tokens"
        )
    return run


def _copied(error: RequestError) -> RequestError:
    """Each is raised on its own."""
    return type(error)(
        error.message, param=error.param, code=error.code, retry_after_s=error.retry_after_s
    )
