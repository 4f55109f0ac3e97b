"""Grammars that take too much, tried out in processes that they take down instead of the server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from octavo_engine.errors import InvalidRequest, QueueFull
from octavo_engine.grammar import trials as trials_module
from octavo_engine.grammar.normal import grammar_spec, json_schema_spec, regex_spec
from octavo_engine.grammar.trials import TRIES, GrammarTrials

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HARMLESS = json_schema_spec({"type": "object", "properties": {"a": {"type": "string"}}})
# Its automaton has a state for each remainder: gigabytes, which no limit of the compiler's counts.
BOMB = json_schema_spec({"type": "integer", "multipleOf": 99_999_989})
MODULE = "import os, time, octavo_engine.grammar.trial_process as t\n"
ABORTS = "t.check = lambda spec: os.abort() if 'abort' in spec.text else None\n"


@contextmanager
def trials(changed: str = "", **settings: Any) -> Iterator[GrammarTrials]:
    """Processes as they are, or with a line that changes the module before it runs."""
    if changed:
        settings["command"] = (sys.executable, "-c", f"{MODULE}{changed}\nt.main()")
    found = GrammarTrials(**settings)
    try:
        yield found
    finally:
        found.close()


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # of another test, and a zombie by now
            if "trial_process" in str(child.cmdline()):
                found.append(child)
    return found


def refusal(found: GrammarTrials, spec: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        found.check(spec)
    return caught.value


def test_what_can_be_served_passes_and_what_cannot_is_refused_by_its_reason():
    with trials() as found:
        found.check(HARMLESS)
        assert "regex parse error" in refusal(found, regex_spec("(")).message
        found.check(grammar_spec("start: <|end|>\n"))  # a token of the model's: the core knows it
        assert found.num_lost == 0


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_its_author_s_to_mend():
    with trials("t.CPU_S, t.GROWTH_BYTES = 1, 8 << 30") as found:
        error = refusal(found, BOMB)
        assert (error.code, error.param) == ("grammar_timeout", "response_format")
        assert found.num_lost == 1
        found.check(HARMLESS)
        began_at = time.monotonic()
        assert refusal(found, BOMB).code == "grammar_timeout"  # known: nothing runs again
        assert (found.num_lost, time.monotonic() - began_at < 1.0) == (1, True)


def test_a_grammar_that_takes_too_much_memory_is_its_author_s_to_mend():
    with trials("t.GROWTH_BYTES = 24 << 20") as found:
        assert "takes more than" in refusal(found, BOMB).message
        assert found.num_lost == 1
        found.check(HARMLESS)


def test_a_grammar_that_the_compiler_dies_of_ends_one_process_and_no_other_request():
    with trials(ABORTS) as found:
        others: list[str] = []

        def go_on() -> None:
            for number in range(20):
                found.check(json_schema_spec({"const": number}))
                others.append("served")

        thread = threading.Thread(target=go_on)
        thread.start()
        assert "ends the compiler" in refusal(found, json_schema_spec({"const": "abort"})).message
        thread.join()
        assert (found.num_lost, len(others)) == (1, 20)


def test_a_process_that_somebody_else_ends_is_replaced_and_the_grammar_tried_again():
    with trials(num_processes=1) as found:
        found.check(HARMLESS)
        (child,) = children()
        os.kill(child.pid, signal.SIGKILL)
        found.check(json_schema_spec({"const": 1}))
        assert found.num_lost == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_group_does_not_end_what_the_server_still_answers(number: signal.Signals):
    signals = f"t.check = lambda spec: os.kill(os.getpid(), {int(number)})"
    with trials(signals) as found:
        found.check(HARMLESS)
        assert found.num_lost == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_what_ends_a_process_before_it_is_ready_is_not_the_grammar_s_fault(number: signal.Signals):
    """Imports take a while: whatever ends it then may end the next one too."""
    with trials(f"t.main = lambda: os.kill(os.getpid(), {int(number)})") as found:
        with pytest.raises(QueueFull):
            found.check(HARMLESS)
        assert found.num_lost == TRIES


@pytest.mark.slow
def test_a_process_that_starts_for_too_long_is_not_the_grammar_s_fault(monkeypatch):
    """On a busy machine it may have used seconds of processor time by then."""
    monkeypatch.setattr(trials_module, "START_S", 2.0)
    spins = "def spin():\n    while True: pass\nt.main = spin"
    with trials(spins) as found:
        with pytest.raises(QueueFull):
            found.check(HARMLESS)
        assert found.num_lost == 1


def killed(times: int, count: Path) -> str:
    """Processes are killed over the first so many grammars; what was tried is counted."""
    return (
        "def check(spec):\n"
        f"    with open({str(count)!r}, 'a+') as file:\n"
        "        file.write('x')\n"
        "        file.seek(0)\n"
        "        number = len(file.read())\n"
        f"    if number <= {times}: os.kill(os.getpid(), 9)\n"
        "t.check = check"
    )


@pytest.mark.parametrize("times", [1, TRIES - 1, TRIES])
def test_an_innocent_grammar_outlives_kills_in_a_row(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trials_module, "ALONE_AFTER_S", 0.1)
    with trials(killed(times, tmp_path / "count")) as found:
        found.check(HARMLESS)
        assert found.num_lost == times
        found.check(json_schema_spec({"const": 1}))
        assert found.num_lost == times


def test_a_grammar_over_which_each_process_is_killed_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trials_module, "ALONE_AFTER_S", 0.1)
    with trials(killed(100, tmp_path / "count")) as found:
        assert "ends the compiler" in refusal(found, HARMLESS).message
        assert found.num_lost == TRIES + 1
        assert "ends the compiler" in refusal(found, HARMLESS).message
        assert found.num_lost == TRIES + 1  # known: nothing runs again


SIBLINGS = """
import psutil
def check(spec):
    if 'poison' not in spec.text:
        return time.sleep(0.3)
    with open(PATH, 'a') as file:
        others = [one for one in psutil.Process(os.getppid()).children()
                  if one.pid not in (os.getpid(), *BEFORE)
                  and one.status() != psutil.STATUS_ZOMBIE]
        file.write(f'{len(others)}\\n')
    os.kill(os.getpid(), 9)
t.check = check
"""


def test_the_last_trial_has_no_other_process_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two grammars at once, neither waits for ever, and others are served in between."""
    monkeypatch.setattr(trials_module, "ALONE_AFTER_S", 0.1)
    seen = tmp_path / "seen"
    before = [child.pid for child in psutil.Process().children()]
    prelude = f"PATH, BEFORE = {str(seen)!r}, {before}\n{SIBLINGS}"
    with trials(prelude) as found, ThreadPoolExecutor(4) as pool:
        poisons = [json_schema_spec({"const": f"poison {number}"}) for number in range(2)]
        refused = [pool.submit(refusal, found, spec) for spec in poisons]
        served = [pool.submit(found.check, json_schema_spec({"const": n})) for n in range(6)]
        assert all("ends the compiler" in one.result().message for one in refused)
        for one in served:
            one.result()
        assert found.num_lost == 2 * (TRIES + 1)
        others = [int(line) for line in seen.read_text().split()]
        assert len(others) == 2 * (TRIES + 1)
        assert others.count(0) >= 2, others
        assert others[-1] == 0, others


def test_a_process_that_hangs_is_ended_and_the_client_may_try_again():
    with trials("t.check = lambda spec: time.sleep(60)", wall_s=0.3) as found:
        with pytest.raises(QueueFull) as caught:
            found.check(HARMLESS)
        assert (caught.value.code, caught.value.retry_after_s) == ("grammar_queue_full", 5)
        assert not children()


@pytest.mark.slow
def test_one_that_computes_until_its_time_is_over_is_the_grammar_s_fault():
    """On a machine so busy that it never gets the processor time that would end it."""
    spins = "t.CPU_S = 1000\ndef spin(spec):\n    while True: pass\nt.check = spin"
    with trials(spins, wall_s=8.0) as found:
        assert refusal(found, HARMLESS).code == "grammar_timeout"
        assert not children()


@pytest.mark.slow
def test_who_waits_too_long_for_a_process_may_try_again():
    with trials("t.check = lambda spec: time.sleep(1)", num_processes=1, queue_s=0.1) as found:
        found.check(HARMLESS)
        busy = threading.Thread(target=found.check, args=(json_schema_spec({"const": 1}),))
        busy.start()
        time.sleep(0.3)
        with pytest.raises(QueueFull):
            found.check(json_schema_spec({"const": 2}))
        busy.join()


def test_a_process_that_keeps_memory_is_replaced():
    with trials("t.KEPT_BYTES = -1", num_processes=1) as found:
        for number in range(3):
            found.check(json_schema_spec({"const": number}))
            assert not children()
        assert found.num_lost == 0


def test_verdicts_come_from_a_process_too_and_are_unknown_where_it_ends():
    with trials() as found:
        assert found.verdicts(["3", '"a"'], '{"type": "integer"}') == [True, False]
    with trials("t.verdict = lambda text, schema: os.abort()") as found:
        assert found.verdicts(["3", "4"], "{}") == [None, None]


@pytest.mark.slow
def test_processes_end_with_their_parent():
    code = (
        "from octavo_engine.grammar.trials import *\n"
        "from octavo_engine.grammar.normal import regex_spec\n"
        "shared_trials().check(regex_spec('a'))\n"
        "import os, psutil\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
