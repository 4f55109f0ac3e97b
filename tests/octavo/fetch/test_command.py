"""`octavo fetch` as a pod runs it: its exit codes, and the last line that the operator reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from octavo.commands import fetch as command
from octavo.fetch.errors import EXIT_CODES, FetchReason
from octavo.fetch.progress import STATUS_FILE
from octavo_operator import reasons
from octavo_operator.desired.weights import fetch_arguments
from octavo_operator.report.faults import pod_faults
from octavo_operator.spec import ModelSpec
from tests.fakes.model_store import Store, serving
from tests.fakes.process import environment

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = os.urandom(200_000)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", "fetch", *arguments],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip


def test_the_operator_s_arguments_work(tmp_path: Path):
    with serving(Store(files={"/m.gguf": CONTENT})) as store:
        model = ModelSpec(uri=f"{store.url}/m.gguf", scheme="http", served_name="m")
        done = run(*fetch_arguments(model, str(tmp_path / "to")))

    assert (done.returncode, done.stderr) == (0, "")
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["phase"], last["bytes"], last["files"]) == ("complete", len(CONTENT), 1)
    assert last["digest"].startswith("sha256:")
    assert json.loads((tmp_path / "to" / STATUS_FILE).read_text())["phase"] == "complete"


def test_a_failure_becomes_the_condition_s_reason(tmp_path: Path):
    with serving(Store()) as store:
        done = run(f"{store.url}/m.gguf", f"--to={tmp_path / 'to'}")

    assert done.returncode == EXIT_CODES[FetchReason.NOT_FOUND]
    ended = {"exitCode": done.returncode, "message": done.stdout, "reason": "Error"}
    pod = {
        "metadata": {"name": "p", "uid": "1"},
        "status": {"initContainerStatuses": [{"name": "fetch", "state": {"terminated": ended}}]},
    }
    (fault,) = pod_faults(pod, has_routers=False)
    assert fault.reason is reasons.Reason.MODEL_NOT_FOUND
    assert fault.fact == "m.gguf does not exist (404); check the address"


def test_every_reason_is_one_that_the_operator_knows():
    known = {reason.value for reason in reasons.Reason}
    assert {reason.value for reason in FetchReason} <= known
    assert len(set(EXIT_CODES.values())) == len(FetchReason) == len(EXIT_CODES)


def test_the_termination_message_is_written_where_there_is_one(tmp_path, monkeypatch, capsys):
    message = tmp_path / "termination-log"
    message.write_text("")
    monkeypatch.setattr(command, "TERMINATION_FILE", message)
    code = command.main("octavo fetch", ["file:///no/such/model", f"--to={tmp_path / 'to'}"])

    assert code == EXIT_CODES[FetchReason.NOT_FOUND]
    assert json.loads(message.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_fetch_goes_on_where_it_was(tmp_path, number):
    """The kubelet ends an init step at any moment."""
    store = Store(files={"/m.gguf": CONTENT}, stalls=[70_000])
    to = tmp_path / "to"
    with serving(store):
        arguments = [f"{store.url}/m.gguf", f"--to={to}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli", "fetch", *arguments],
            stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert process.stdout is not None
        with process.stdout as lines:
            next(line for line in lines if json.loads(line)["bytes"] == 70_000)
            process.send_signal(number)
        assert process.wait(20) != 0
        assert not (to / "m.gguf").exists()
        assert run(*arguments).returncode == 0
    assert (to / "m.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hf://a/b"], "--to"),
        (["hf://a/b", "--to=x", "--digest=md5:1"], "must be sha256:"),
        (["hf://a/b", "--to=x", "--connections=0"], "must be at least 1"),
    ],
)
def test_options_that_cannot_be(arguments, says):
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
