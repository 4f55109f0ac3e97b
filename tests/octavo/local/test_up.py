"""`octavo up` as people run it: real processes, real traffic, real kills."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from octavo_engine.weights.source import resolve_model
from tests.engine.models.tiny import tiny_model
from tests.fakes.process import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
YAML = """
apiVersion: octavo.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: sim}}
spec:
  model: {{uri: "demo://smollm2"}}
  engine:
    device: sim
    args: {{sim-decode-token-ms: "{decode_ms}"}}
  replicas: {replicas}
  rollout: {{drainTimeout: 20s}}
"""


MIXTURE = """
apiVersion: octavo.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: moe}}
spec:
  model: {{uri: "file://{model}"}}
  engine:
    device: cpu
    executor: mp
    tensorParallelSize: 2
    expertParallel: true
    maxModelLen: 128
    kvCacheMemory: 16Mi
    args: {{load-format: dummy, tokenizer: "{tokenizer}"}}
"""


DIVIDED = """
apiVersion: octavo.dev/v1alpha1
kind: LLMDeployment
metadata: {{name: divided}}
spec:
  model: {{uri: "file://{model}"}}
  engine:
    device: cpu
    maxModelLen: 128
    kvCacheMemory: 16Mi
    args: {{load-format: dummy, tokenizer: "{tokenizer}"}}
  group:
    size: 2
    secretRef: {{name: between}}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


ONE = YAML.format(replicas=1, decode_ms=1)


class Up:
    """`octavo up` on a file, its lines, and its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "llmdeployment.yaml"
        self.home = folder / "home"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self.env = environment(OCTAVO_HOME=str(self.home))

    def write(self, *, replicas: int = 2, decode_ms: float = 10.0) -> None:
        self.replace(YAML.format(replicas=replicas, decode_ms=decode_ms))

    def replace(self, text: str) -> None:
        """As editors do it."""
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)

    def start(self, *more: str) -> None:
        command = ["up", "-f", str(self.file), "--port", str(self.port), *more]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli", *command],
            stderr=subprocess.PIPE, text=True, env=self.env,
        )  # fmt: skip

    def read_until(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended without {pattern!r}:\n{''.join(self.lines)}\n{self.logs()}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "octavo.cli", *arguments],
            capture_output=True, text=True, env=self.env, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    def state(self, fact: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What `octavo status --json` would print, once this is true of it: it follows the lines
        after a moment."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            state: dict[str, Any] = json.loads((self.home / "state.json").read_text())
            if fact(state):
                return state
            assert time.monotonic() < deadline, f"{state}\n{''.join(self.lines)}\n{self.logs()}"
            time.sleep(0.02)

    def replicas(self, count: int, *restarts: int) -> list[dict[str, Any]]:
        """Once so many serve, with so many restarts."""

        def is_it(state: dict[str, Any]) -> bool:
            found = state["pools"][0]["replicas"]
            return (
                state["is_ready"]
                and len(found) == count
                and [replica["restarts"] for replica in found] == list(restarts or [0] * count)
            )

        found: list[dict[str, Any]] = self.state(is_it)["pools"][0]["replicas"]
        return found

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in self.home.glob("logs/*"))

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> int:
        assert self.process.stderr is not None
        self.lines += self.process.stderr
        return self.process.wait(TIMEOUT_S)


@contextmanager
def running(
    folder: Path, *, replicas: int = 2, decode_ms: float = 10.0, text: str = ""
) -> Iterator[Up]:
    up = Up(folder)
    up.replace(text or YAML.format(replicas=replicas, decode_ms=decode_ms))
    up.start("--plain")
    try:
        up.read_until("Octavo serves at")
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()  # the leash ends the rest
        up.process.wait(TIMEOUT_S)
        assert up.process.stderr is not None
        up.process.stderr.close()


class Traffic:
    """Streams without a pause from a few clients; remembers what went wrong."""

    def __init__(self, url: str, *, clients: int = 3, tokens: int = 24) -> None:
        self._url = url
        self._tokens = tokens
        self._stop = threading.Event()
        self.finished = 0
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                try:
                    problem = self._ask(client, f"client {number} turn {turn} " + "word " * 20)
                except httpx.HTTPError as error:
                    problem = repr(error)
                if problem:
                    self.problems.append(problem)
                else:
                    self.finished += 1

    def _ask(self, client: httpx.Client, text: str) -> str:
        body = {
            "model": "sim", "stream": True, "max_tokens": self._tokens, "ignore_eos": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        if answer.status_code != 200 or lines[-1] != "data: [DONE]":
            return f"{answer.status_code}: {lines[-1:]}"
        events = [json.loads(line[6:]) for line in lines[:-1]]
        if any("error" in event for event in events):
            return str(events[-1])
        tokens = events[-1]["usage"]["completion_tokens"]
        return "" if tokens == self._tokens else f"{tokens} tokens of {self._tokens}"

    def goes_on(self, count: int = 6) -> None:
        """Waits until so many more answers are through."""
        goal, deadline = self.finished + count, time.monotonic() + TIMEOUT_S
        while self.finished < goal:
            assert time.monotonic() < deadline, f"traffic stands still: {self.problems}"
            self._stop.wait(0.02)


def test_a_day_in_its_life(tmp_path):
    """Rolling change, kill, broken edit, scaling and the end, all under traffic."""
    with running(tmp_path) as up:
        first = {replica["id"] for replica in up.replicas(2)}
        with Traffic(up.url) as traffic:
            traffic.goes_on()

            up.write(decode_ms=9.0)
            up.read_until("rolls over to revision")
            up.read_until(f"({'|'.join(first)}) has left")
            up.read_until(f"({'|'.join(first)}) has left")
            traffic.goes_on()
            second = up.replicas(2)
            assert not first & {replica["id"] for replica in second}
            assert traffic.problems == []

            os.kill(second[0]["pid"], signal.SIGKILL)
            line = up.read_until(r"ended \(ended by SIGKILL\); starts again in 1 s")
            assert second[0]["id"] in line
            up.read_until(f"{second[0]['id']} is ready")
            traffic.goes_on()
            up.replicas(2, 1, 0)
            assert traffic.problems == []

            up.replace("spec: [not: closed")
            up.read_until(r"kept the running state: .*llmdeployment.yaml, line 1: is not valid")
            up.replace(YAML.format(replicas=2, decode_ms=9.0).replace("replicas:", "replica:"))
            up.read_until(r"kept the running state: .*spec has an unknown|spec.replica")
            up.state(lambda state: "spec" in state["problem"])
            assert {replica["id"] for replica in up.replicas(2, 1, 0)} == {r["id"] for r in second}

            up.write(replicas=1, decode_ms=9.0)
            up.read_until("the files are valid again")
            up.read_until("has left")
            up.state(lambda state: len(state["pools"][0]["replicas"]) == 1)
            up.write(replicas=3, decode_ms=9.0)
            up.read_until("is ready")
            up.read_until("is ready")
            up.state(lambda state: len(state["pools"][0]["replicas"]) == 3 and state["is_ready"])
            traffic.goes_on()
        assert traffic.problems == []

        children = up.processes()
        down = up.run("down")
        assert (down.returncode, down.stdout) == (0, "stopped\n"), down.stderr
        assert up.wait() == 0
        assert not [child for child in children if child.is_running()]
        assert up.run("status").returncode == 3


def test_ctrl_c_lets_a_stream_finish_and_ends_all(tmp_path):
    with running(tmp_path, replicas=1, decode_ms=20.0) as up:
        children = up.processes()
        with Traffic(up.url, clients=1, tokens=60) as traffic:
            traffic.goes_on(1)
            body = {"model": "sim", "prompt": "x", "max_tokens": 60, "stream": True}
            with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=30) as answer:
                lines = answer.iter_lines()
                next(lines)
                traffic._stop.set()
                up.process.send_signal(signal.SIGINT)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert up.wait() == 0
        assert not [child for child in children if child.is_running()]


def test_a_second_up_a_killed_router_and_a_killed_up(tmp_path):
    with running(tmp_path) as up:
        children = up.processes()
        assert len(children) >= 3
        second = up.run("up", "demo://smollm2", "--device", "sim", "--port", str(free_port()))
        assert second.returncode == 2
        assert second.stderr.startswith(f"octavo: octavo up (process {up.process.pid}) serves at")

        router = next(child for child in children if "router" in child.cmdline())
        router.kill()
        up.read_until(r"the router ended \(ended by SIGKILL\); starts again in 1 s")
        up.read_until("the router listens at")
        up.read_until("Octavo serves at")

        children = up.processes()
        up.process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        assert up.run("status").returncode == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: LLMDeployment", "document 1: apiVersion must be"),
        (YAML.format(replicas=-1, decode_ms=1), "document 1: spec.replicas must be"),
        (ONE.replace("demo://smollm2", "pvc://claim/x"), "file:///PATH"),
        (f"{ONE}---{ONE}", "default/sim is there twice"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_served_is_one_sentence(tmp_path, text, says):
    up = Up(tmp_path)
    up.replace(text)
    done = up.run("up", "-f", str(up.file))

    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_mixture_of_experts_on_two_ranks_one_of_which_is_killed(tmp_path):
    """The log names the rank, and the same answer comes from the ranks that are started again."""
    model, tokenizer = tmp_path / "model", resolve_model("demo://smollm2").path
    model.mkdir()
    config = {**tiny_model("qwen3-moe").config, "vocab_size": 49152}
    (model / "config.json").write_text(json.dumps(config))
    body = {"model": "moe", "prompt": "a b c", "max_tokens": 4, "seed": 1, "ignore_eos": True}
    with running(tmp_path, text=MIXTURE.format(model=model, tokenizer=tokenizer)) as up:

        def answer() -> str:
            found = httpx.post(f"{up.url}/v1/completions", json=body, timeout=TIMEOUT_S)
            text: str = found.json()["choices"][0]["text"]
            return text

        def ranks() -> list[psutil.Process]:
            name = "octavo_engine.executor.worker"
            return [each for each in up.processes() if name in " ".join(each.cmdline())]

        first = answer()
        (rank,) = ranks()
        rank.kill()
        deadline = time.monotonic() + TIMEOUT_S
        while "rank 1 of 2 was ended by SIGKILL" not in up.logs():
            assert time.monotonic() < deadline, up.logs()
            time.sleep(0.02)
        assert answer() == first
        assert [each.pid for each in ranks()] != [rank.pid]
        assert len(up.replicas(1, 0)) == 1, "the server lived on"
        assert up.run("down").returncode == 0
        assert up.wait() == 0


def test_a_group_of_pods_is_one_engine_with_a_process_for_each(tmp_path):
    """From the same document as in a cluster, whose Secret need not be there."""
    model, tokenizer = tmp_path / "model", resolve_model("demo://smollm2").path
    model.mkdir()
    config = {**tiny_model("llama").config, "vocab_size": 49152}
    (model / "config.json").write_text(json.dumps(config))
    body = {"model": "divided", "prompt": "a b c", "max_tokens": 4, "ignore_eos": True}
    with running(tmp_path, text=DIVIDED.format(model=model, tokenizer=tokenizer)) as up:
        found = httpx.post(f"{up.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert found.status_code == 200, found.text
        name = "octavo_engine.executor.worker"
        stages = [each for each in up.processes() if name in " ".join(each.cmdline())]
        assert len(stages) == 1  # beside the engine core, which is the other one
        assert len(up.replicas(1, 0)) == 1
        assert up.run("down").returncode == 0
        assert up.wait() == 0
