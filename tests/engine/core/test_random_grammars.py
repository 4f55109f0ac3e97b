"""Random lives of requests with grammars: whatever happens, the books balance."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.fakes.grammar_rig import SPECS, Rig


class GrammarMachine(RuleBasedStateMachine):
    """Requests come, are aborted and preempted at random; the books balance, and end empty."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(num_blocks=8, max_num_seqs=3)
        self.count = 0

    @rule(
        spec=st.sampled_from(SPECS),
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 40),
        logprobs=st.sampled_from([None, None, 1]),
    )
    def add(self, spec: Any, length: int, max_tokens: int, logprobs: int | None) -> None:
        self.count += 1
        self.rig.add(
            spec,
            prompt=length,
            request_id=str(self.count),
            max_tokens=max_tokens,
            logprobs=logprobs,
        )

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.rig.step()

    @rule(number=st.integers(1, 30))
    def abort(self, number: int) -> None:
        name = str(number)
        output = self.rig.engine.abort(name)
        if output is not None:
            self.rig.answers[name].add(output)

    @rule(place=st.integers(0, 2))
    def preempt(self, place: int) -> None:
        scheduler = self.rig.engine.scheduler
        if place < len(scheduler.running):
            scheduler._preempt(scheduler.running[place])

    @invariant()
    def books_balance(self) -> None:
        self.rig.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        answers = self.rig.run()
        for answer in answers.values():
            assert answer.reason in ("stop", "length", "abort")
        self.rig.engine.close()


TestGrammarMachine = GrammarMachine.TestCase
TestGrammarMachine.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, derandomize=True
)
