"""Requests whose grammars are compiled beside the step loop: refused, late, too many, too large."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from octavo_common.heap import give_memory_back
from octavo_engine.errors import GenerationFailed, InvalidRequest, QueueFull
from octavo_engine.grammar.compiler import CompilerSettings
from octavo_engine.grammar.limits import GrammarLimits
from octavo_engine.grammar.normal import (
    grammar_spec,
    regex_spec,
    structural_tag_spec,
)
from octavo_engine.state.grammar import GrammarSpec
from tests.fakes.grammar_rig import CHOICE, CHOICES, Rig
from tests.fakes.unforeseen import fail_for

# As no request makes it: what no grammar enforces is found out before.
NOT = GrammarSpec(kind="json_schema", text='{"not":{}}')


def test_what_does_not_compile_is_refused_and_others_are_served() -> None:
    rig = Rig()
    rig.add(None, request_id="plain", max_tokens=20)
    rig.add(regex_spec("(?=look)ahead"), request_id="bad")
    rig.add(NOT, request_id="worse")
    answers = rig.run()
    assert len(answers["plain"].tokens) == 20
    for name in ("bad", "worse"):
        assert isinstance(answers[name].error, InvalidRequest)
    assert "'not'" in str(answers["worse"].error)
    with pytest.raises(InvalidRequest):
        rig.add(NOT)  # known by now: at once
    assert rig.engine.stats().grammar_failures == 2


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_the_vocabulary_that_all_grammars_wait_for_is_made_at_full_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    rig = Rig()
    compiler = rig.grammars.compiler
    make, compile_one = compiler._make_vocabulary, compiler._compiled
    seen: dict[str, int] = {}

    def note_making() -> Any:
        seen["vocabulary"] = niceness()
        return make()

    def note_compiling(*args: Any) -> Any:
        seen["grammar"] = niceness()
        return compile_one(*args)

    compiler._make_vocabulary = note_making  # the test's
    compiler._compiled = note_compiling  # type: ignore[method-assign, assignment]
    rig.add(CHOICE, request_id="one")
    rig.run()
    assert seen["vocabulary"] == niceness() < seen["grammar"]


class StuckCompiler:
    """Stands where compilation would be, until it is let go."""

    def __init__(self, rig: Rig) -> None:
        self.gate = threading.Event()
        compiler = rig.grammars.compiler
        compile_one = compiler._compiled

        def wait_first(*args: Any) -> Any:
            self.gate.wait(30)
            return compile_one(*args)

        compiler._compiled = wait_first  # type: ignore[method-assign, assignment]  # the test


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def wait_begun(rig: Rig) -> None:
    compiler = rig.grammars.compiler
    while any(c.begun_at is None for c in list(compiler._pending.values())[:2]):
        rig.engine._grammars = rig.grammars
        rig.grammars.wait(0.01)


def test_a_compile_that_takes_too_long_ends_with_400_and_delays_no_other() -> None:
    clock = HandClock()
    rig = Rig(now=clock)
    stuck = StuckCompiler(rig)
    rig.add(CHOICE, request_id="slow")
    rig.add(None, request_id="plain", max_tokens=5)
    while rig.answers["plain"].reason is None:
        rig.step()
    assert rig.answers["slow"].reason is None
    wait_begun(rig)
    clock.time += 1.9
    rig.step()
    assert rig.answers["slow"].reason is None
    clock.time += 0.2
    rig.step()
    error = rig.answers["slow"].error
    assert isinstance(error, InvalidRequest) and error.code == "grammar_timeout"
    stuck.gate.set()
    rig.run()


def test_while_it_compiles_a_request_can_be_aborted_or_run_out_of_time() -> None:
    clock = HandClock()
    rig = Rig(now=clock)
    stuck = StuckCompiler(rig)
    rig.add(CHOICE, request_id="gone")
    rig.add(CHOICE, request_id="late", deadline_at=101.0)
    rig.add(CHOICE, request_id="well")
    assert rig.engine.stats().num_waiting == 3
    aborted = rig.engine.abort("gone")
    assert aborted is not None and aborted.finish_reason == "abort"
    assert rig.engine.abort("gone") is None
    clock.time = 101.5
    rig.step()
    assert rig.answers["late"].reason == "deadline"
    stuck.gate.set()
    while rig.answers["well"].reason is None:
        rig.step()
    assert rig.answers["well"].text in CHOICES
    rig.run()
    assert sum(rig.engine.stats().grammar_compile_counts) == 1, "compiled once for all three"


@pytest.mark.parametrize("where", ["run", "line"])
def test_what_nobody_foresaw_of_one_that_waited_ends_it_alone(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    part, name = (rig.grammars, "_run_of") if where == "run" else (rig.engine.scheduler, "add")
    fail_for(monkeypatch, part, name, "bad")
    rig.add(None, request_id="plain", max_tokens=20)
    rig.add(CHOICE, request_id="bad")
    rig.add(CHOICE, request_id="good")
    answers = rig.run()
    assert isinstance(answers["bad"].error, GenerationFailed)
    assert str(answers["bad"].error) == "the engine could not take the request in: unforeseen"
    assert "RuntimeError: unforeseen" in caplog.text
    alone = Rig()
    alone.add(None, request_id="plain", max_tokens=20)
    assert answers["plain"].tokens == alone.run()["plain"].tokens
    assert answers["good"].text in CHOICES


def test_a_full_compile_queue_refuses_grammars_only() -> None:
    rig = Rig(settings=CompilerSettings(max_pending=2))
    stuck = StuckCompiler(rig)
    rig.add(regex_spec("a+"))
    rig.add(regex_spec("b+"))
    rig.add(regex_spec("b+"))  # one that is under way already
    with pytest.raises(QueueFull) as caught:
        rig.add(regex_spec("c+"))
    assert caught.value.code == "grammar_queue_full"
    rig.add(None, request_id="plain", max_tokens=3)
    while rig.answers["plain"].reason is None:
        rig.step()
    stuck.gate.set()
    rig.run()


def test_an_automaton_that_bursts_fails_its_request() -> None:
    limits = GrammarLimits(max_lexer_states=40)
    rig = Rig(settings=CompilerSettings(limits=limits))
    rig.add(regex_spec("(.*a.{20}){3}"), request_id="bomb", max_tokens=200)
    rig.add(CHOICE, request_id="well")
    answers = rig.run()
    assert answers["well"].text in CHOICES
    assert answers["bomb"].reason in ("error", "refused")
    assert "grammar" in str(answers["bomb"].error)
    assert rig.engine.stats().nan_failures == 0


@pytest.mark.parametrize(
    "spec",
    [
        regex_spec("(a?){200}a{200}"),
        grammar_spec('root ::= "a"{1000000}'),
        structural_tag_spec({"type": "structural_tag", "format": {
            "type": "regex", "pattern": "(a?){200}a{200}"}}),
    ],
    ids=["regex", "ebnf", "structural_tag"],
)  # fmt: skip
def test_an_automaton_that_bursts_at_once_is_refused_when_it_is_compiled(spec: Any) -> None:
    rig = Rig()
    rig.add(spec, request_id="bomb")
    answer = rig.run()["bomb"]
    assert answer.reason == "refused" and answer.tokens == []
    assert isinstance(answer.error, InvalidRequest)
    with pytest.raises(InvalidRequest):
        rig.add(spec)  # known by now: at once


def test_a_compiler_that_panics_on_a_text_refuses_the_text() -> None:
    rig = Rig()
    compiler = rig.grammars.compiler

    def panic(*args: Any) -> Any:
        raise ValueError("not implemented")

    compiler._compiled = panic  # type: ignore[method-assign, assignment]  # the test
    rig.add(CHOICE, request_id="bad")
    assert isinstance(rig.run()["bad"].error, InvalidRequest)


def test_memory_that_is_not_there_is_no_fault_of_the_text() -> None:
    rig = Rig()
    compiler = rig.grammars.compiler

    def fail(*args: Any) -> Any:
        raise MemoryError

    compiler._compiled = fail  # type: ignore[method-assign, assignment]  # the test
    rig.add(CHOICE, request_id="unlucky")
    assert isinstance(rig.run()["unlucky"].error, GenerationFailed)


def test_the_cache_keeps_to_its_bytes() -> None:
    rig = Rig(settings=CompilerSettings(cache_bytes=3 << 20))
    for index in range(12):
        rig.add(regex_spec(f"x{{{index + 1}}}"))
        rig.run()
    assert rig.grammars.compiler.cached_bytes <= 3 << 20
    hits = rig.engine.stats().grammar_cache_hits
    rig.add(regex_spec("x{12}"))
    assert rig.engine.stats().grammar_cache_hits == hits + 1
    rig.run()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_the_cache_counts_what_a_grammar_took_where_that_is_more_than_its_text() -> None:
    rig = Rig(settings=CompilerSettings(deadline_s=60.0))
    text = '{"type": "integer", "multipleOf": 99991}'  # an automaton of so many states
    give_memory_back()  # of tests before, in which the automaton would find room
    rig.add(GrammarSpec(kind="json_schema", text=text), max_tokens=1)
    rig.run()
    assert rig.grammars.compiler.cached_bytes > 10 << 20
