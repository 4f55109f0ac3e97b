"""Any request, in any company, on an engine of any settings, gets the bits that it gets alone."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from octavo_engine.core.engine import Engine
from octavo_engine.core.text.outputs import CompletionOutput, RequestOutput
from octavo_engine.errors import DeadlineExceeded, QueueFull, RequestError
from octavo_engine.scheduling.invariants import check_invariants
from tests.differential.difference import Difference, first_difference
from tests.differential.models import Settings, any_settings, reported
from tests.differential.wishes import Wish, Wisher

if TYPE_CHECKING:
    from random import Random

    from octavo_engine.core.offline.llm import LLM
    from octavo_engine.core.text.output_processor import TrackedRequest
    from tests.differential.models import Model

_SAID = ("index", "token_ids", "text", "finish_reason", "stop_reason", "num_tokens", "logprobs")


@dataclasses.dataclass(slots=True)
class Reported:
    """All that was said of one request; of one that was ended early, as far as it came."""

    output: RequestOutput
    error: str | None = None
    was_cut: bool = False

    def difference_from(self, alone: Reported) -> str:
        """Where it says something else; empty if it does not."""
        is_whole = not self.was_cut and self.error is None
        if self.error != alone.error and not self.was_cut:
            return f"error {self.error!r}, alone {alone.error!r}"
        if is_whole:
            return first_difference(_whole(self.output), _whole(alone.output))
        if alone.error is not None:
            return ""  # how far it had come is not promised
        whole = {output.index: output for output in alone.output.outputs}
        for output in self.output.outputs:
            expected = whole[output.index]
            if output.finish_reason in ("abort", None):
                output, expected = _beginning(output, output), _beginning(expected, output)
            if output != expected:
                return f"cut: {first_difference(_plain(output), _plain(expected))}"
        return ""


def _whole(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": output.prompt_logprobs,
        "outputs": list(map(_plain, output.outputs)),
    }


def _plain(output: CompletionOutput) -> dict[str, Any]:
    return {name: getattr(output, name) for name in _SAID}


def _beginning(output: CompletionOutput, cut: CompletionOutput) -> CompletionOutput:
    """Of an answer, as many tokens as there are of one that was cut, and what is said of them."""
    length = len(cut.token_ids)
    return CompletionOutput(
        output.index,
        token_ids=output.token_ids[:length],
        logprobs=(output.logprobs or [])[:length],
    )


class Company:
    """Requests that run at once on one engine, and come at different times."""

    def __init__(self, llm: LLM, rng: Random) -> None:
        self._llm = llm
        self._rng = rng

    def run(self, wishes: list[Wish]) -> list[Reported]:
        """Each in its place, whenever it was asked for."""
        llm = self._llm
        engine = llm._engine
        assert isinstance(engine, Engine)  # it generates
        reported: dict[int, Reported] = {}
        requests: dict[int, TrackedRequest] = {}
        waiting = self._rng.sample(list(enumerate(wishes)), len(wishes))
        while waiting or engine.has_work:
            while waiting and (not engine.has_work or self._rng.random() < 0.4):
                number, wish = waiting.pop()
                requests[number] = llm._start(self._submission(number, wish))
                reported[number] = Reported(RequestOutput("", None, []))
            outputs = engine.step().outputs
            for id_, error in engine.take_refused():
                self._abort(llm._processor.refuse(id_, error).aborts)
            self._abort(llm._processor.process(outputs).aborts)
            for number, request in list(requests.items()):
                self._read(wishes[number], request, reported[number])
                if request.finished:
                    del requests[number]
        check_invariants(engine.scheduler)
        assert len(llm._processor) == 0
        return [reported[number] for number in range(len(wishes))]

    def _submission(self, number: int, wish: Wish) -> Any:
        submission = self._llm._submission(number, wish.prompt, wish.params)
        ends_at = None if wish.deadline_s is None else time.monotonic() + wish.deadline_s
        return dataclasses.replace(submission, priority=wish.priority, deadline_at=ends_at)

    def _read(self, wish: Wish, request: TrackedRequest, reported: Reported) -> None:
        """Now and then, so that pieces of all sizes are joined."""
        after = wish.abort_after
        if after is not None and not request.finished:
            known = request.pending.outputs if request.pending is not None else []
            said = max((output.num_tokens for output in known), default=0)
            if said >= after:
                reported.was_cut = True
                self._abort(self._llm._processor.abort(request))
        if not request.finished and self._rng.random() < 0.7:
            return
        news = request.take()
        if news is not None:
            reported.output.prompt_token_ids = news.prompt_token_ids
            reported.output.absorb(news)
        if request.error is not None:
            reported.error = request.error.message
            # Who could not be done by its deadline may be refused before it begins.
            too_late = QueueFull if wish.deadline_s is not None else DeadlineExceeded
            reported.was_cut |= isinstance(request.error, (DeadlineExceeded, too_late))

    def _abort(self, ids: list[str]) -> None:
        for id_ in ids:
            self._llm._engine.abort(id_)


class Alone:
    """The truth: one request at a time, nothing cached, nothing guessed."""

    def __init__(self, model: Model, rng: Random) -> None:
        self._llm = model.engine(Settings())
        self._company = Company(self._llm, rng)

    def reported(self, wish: Wish) -> Reported:
        alone = dataclasses.replace(wish, abort_after=None, deadline_s=None)
        return self._company.run([alone])[0]

    def refuses(self, wish: Wish) -> bool:
        """Whether no engine takes it."""
        try:
            self._llm._submission(0, wish.prompt, wish.params)
        except RequestError:
            return True
        return False

    def close(self) -> None:
        self._llm.close()


def compare(model: Model, rng: Random, *, num_engines: int, num_rounds: int = 3) -> int:
    """Raises Difference; else how many answers were compared."""
    alone, wisher, count = Alone(model, rng), Wisher(rng), 0
    try:
        for _ in range(num_engines):
            settings = any_settings(rng, model.methods)
            llm = model.engine(settings)
            try:
                for _ in range(num_rounds):
                    count += compare_round(
                        alone, Company(llm, rng), wisher, rng, f"{model} {reported(settings)}"
                    )
            finally:
                llm.close()
    finally:
        alone.close()
    return count


def compare_round(alone: Alone, company: Company, wisher: Wisher, rng: Random, where: str) -> int:
    wishes = [wisher.wish() for _ in range(rng.randint(2, 14))]
    wishes = [wish for wish in wishes if not alone.refuses(wish)]
    for wish, seen in zip(wishes, company.run(wishes), strict=True):
        truth = alone.reported(wish)
        difference = seen.difference_from(truth)
        if difference:
            raise Difference(f"{where}\n{wish}\n{difference}")
        for output in truth.output.outputs:
            wisher.hear(output.text)
    return len(wishes)
