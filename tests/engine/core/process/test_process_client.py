"""A real child process: killed, stopped, hung, babbling, orphaned; each is seen and put right."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.process import wire
from octavo_engine.core.process.child import EXIT_PARENT_GONE
from octavo_engine.core.process.process_client import ProcessClient
from octavo_engine.core.process.spawn import CORE_COMMAND
from octavo_engine.core.process.supervision import Timing
from octavo_engine.errors import (
    ConfigError,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    OctavoError,
)
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.generate import generate
from tests.fakes.requests import make_request

pytestmark = pytest.mark.slow

FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_core.py")))
HANG, EXIT, NOISE, RAISE = 500, 501, 502, 503  # as in faulty_core.py
CONFIG = EngineConfig(
    device="sim",
    max_model_len=512,
    scheduler=SchedulerConfig(max_num_seqs=8),
    sim=SimConfig(kv_blocks=256, step_base_ms=5.0),
)
# Restarts at once. On a busy machine a core that is well may be silent for long: where nothing
# hangs, nothing is killed for it.
PATIENT = Timing(
    ping=0.1, patience=30.0, kill_after=0.3, first_delay=0.05, last_delay=0.1, stop=10.0
)
# The real times in small, so that tests of hangs are quick.
QUICK = dataclasses.replace(PATIENT, patience=1.2, stop=2.0)
PARAMS = SamplingParams(max_tokens=10, seed=1)
ENDLESS = SamplingParams(max_tokens=500, seed=1)


class Running:
    """`async with Running() as engine`: a core in a child process, ready on entry."""

    def __init__(self, timing=PATIENT, command=FAULTY, config=CONFIG):
        self.connect = partial(ProcessClient, timing=timing, command=command)
        self.config = config

    async def __aenter__(self):
        self.engine = await AsyncEngine.start(self.config, connect=self.connect)
        await self.engine.ready()
        return self.engine

    async def __aexit__(self, *_):
        await self.engine.stop()


def run(test):
    asyncio.run(asyncio.wait_for(test, 150))


def pid_of(engine):
    client = engine._client
    assert isinstance(client, ProcessClient)
    return client.pid


async def until(fact, seconds=60):
    """Seconds that it took for the fact to be one, but for those when others had the processor."""
    took = 0.0
    async with asyncio.timeout(seconds):
        while not fact():
            started, used = time.monotonic(), time.process_time()
            await asyncio.sleep(0.01)  # facts of another process
            took += min(time.monotonic() - started, time.process_time() - used + 0.05)
    return took


async def text_of(engine, prompt="hello", params=PARAMS):
    stream = generate(engine, prompt, params, request_id="r")
    return "".join([o.text async for output in stream for o in output.outputs])


async def restarted(engine, old_pid):
    await until(lambda: pid_of(engine) not in (None, old_pid))
    await until(lambda: engine.health().state == "ready")


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_child_process_serves_as_a_thread_does(new_event_loop):
    async def test():
        async with Running() as engine:
            whole = await text_of(engine)
            answers = await asyncio.gather(*(text_of(engine) for _ in range(200)))
            assert set(answers) == {whole}
            await until(lambda: engine.stats.num_running == 0)
            assert engine.stats.generation_tokens == 201 * 10
            pid = pid_of(engine)
        assert not psutil.pid_exists(pid)
        inside = await AsyncEngine.start(CONFIG)
        await inside.ready()
        assert await text_of(inside) == whole
        await inside.stop()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 150))


def test_closing_a_stream_frees_it_in_the_child():
    async def test():
        async with Running() as engine:
            stream = generate(engine, "hi", ENDLESS, request_id="r")
            await anext(stream)
            assert engine.stats.num_running == 1
            await stream.aclose()
            await until(lambda: engine.stats.num_running == 0)
            assert engine.stats.kv_blocks_used == 0

    run(test())


def test_a_killed_core_is_reported_at_once_and_started_again():
    async def test():
        async with Running(Timing(first_delay=0.3)) as engine:
            streams = [generate(engine, "hi", ENDLESS, request_id=str(i)) for i in range(3)]
            for stream in streams:
                await anext(stream)
            pid = pid_of(engine)
            os.kill(pid, signal.SIGKILL)
            assert await until(lambda: engine.health().state == "dead") < 5.0
            for stream in streams:
                with pytest.raises(EngineDead, match="SIGKILL") as caught:
                    async for _ in stream:
                        pass
                assert caught.value.retry_after_s is not None
            with pytest.raises(EngineDead):
                await text_of(engine)
            assert "it is started again in 0.3 s" in engine.health().reason
            await restarted(engine, pid)
            assert len(await text_of(engine)) == 10

    run(test())


def test_a_stopped_core_is_stalled_within_five_seconds():
    async def test():
        async with Running(Timing()) as engine:
            pid = pid_of(engine)
            os.kill(pid, signal.SIGSTOP)
            try:
                took = await until(lambda: engine.health().state == "stalled")
                assert took < 5.0
                assert not engine.health().is_live
                with pytest.raises(EngineDead, match="has not answered"):
                    await text_of(engine)
            finally:
                os.kill(pid, signal.SIGCONT)
            await until(lambda: engine.health().state == "ready")
            assert pid_of(engine) == pid  # it came back in time: nothing was lost
            assert len(await text_of(engine)) == 10

    run(test())


@contextlib.contextmanager
def stderr_in(path):
    """Standard error of this process and of those it starts: a file that is read as it grows."""
    before = os.dup(2)
    try:
        with path.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_a_core_that_hangs_in_a_step_is_stalled_within_five_seconds_and_says_where(tmp_path):
    async def test():
        async with Running(Timing(stop=0.1)) as engine:
            stuck = asyncio.ensure_future(text_of(engine, [HANG]))
            took = await until(lambda: engine.health().state == "stalled")
            assert took < 5.0
            assert "stuck in a step" in engine.health().reason
            # The line of faulty_core that sleeps.
            where = re.compile(r"faulty_core\.py.* in execute")
            await until(lambda: where.search(stderr.read_text(errors="replace")))
            stuck.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stuck

    stderr = tmp_path / "stderr"
    with stderr_in(stderr):
        run(test())


@pytest.mark.parametrize("how", ["stopped", "hanging", "talking nonsense"])
def test_a_core_that_does_not_come_back_is_killed_and_replaced(how):
    async def test():
        async with Running(QUICK) as engine:
            pid = pid_of(engine)
            prompt = {"stopped": [1], "hanging": [HANG], "talking nonsense": [NOISE]}[how]
            lost = asyncio.ensure_future(text_of(engine, prompt, ENDLESS))
            if how == "stopped":
                await until(lambda: engine.stats.num_running == 1)
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineDead):
                await lost
            await restarted(engine, pid)
            assert not psutil.pid_exists(pid)
            assert len(await text_of(engine)) == 10

    run(test())


def test_a_step_that_may_take_long_is_no_hang():
    async def test():
        slow = EngineConfig(
            device="sim", max_model_len=512, sim=SimConfig(kv_blocks=256, prefill_token_ms=9.0)
        )
        async with Running(QUICK, config=slow) as engine:
            pid = pid_of(engine)
            # 300 tokens take 2.7 s, more than twice the patience: known from the warm-up's pace.
            assert len(await text_of(engine, [1] * 300)) == 10
            assert pid_of(engine) == pid

    run(test())


def test_a_core_that_keeps_failing_is_given_up_with_its_reason():
    async def test():
        async with Running() as engine:
            for _ in range(4):
                pid = pid_of(engine)
                with pytest.raises(EngineDead, match="exit code 7"):
                    await text_of(engine, [EXIT])
                await restarted(engine, pid)
            with pytest.raises(EngineDead, match="given up after 5 failures in a row"):
                await text_of(engine, [EXIT])
            assert engine.health().state == "dead"
            assert "exit code 7" in engine.health().reason
            assert pid_of(engine) is None

    run(test())


def test_a_restart_that_cannot_load_reports_its_own_error(tmp_path, monkeypatch):
    async def test():
        flag = tmp_path / "fail"
        monkeypatch.setenv("OCTAVO_TEST_FAIL_IF_THERE", str(flag))
        async with Running() as engine:
            flag.touch()
            with pytest.raises(EngineDead):
                await text_of(engine, [EXIT])
            await until(lambda: "truncated" in engine.health().reason)
            flag.unlink()
            await until(lambda: engine.health().state == "ready")
            assert len(await text_of(engine)) == 10

    run(test())


def test_a_start_that_fails_is_one_sentence_and_leaves_no_process(tmp_path, monkeypatch):
    async def test():
        flag = tmp_path / "fail"
        flag.touch()
        monkeypatch.setenv("OCTAVO_TEST_FAIL_IF_THERE", str(flag))
        engine = await AsyncEngine.start(CONFIG, connect=Running().connect)
        with pytest.raises(ModelError, match=r"^model\.safetensors: truncated$"):
            await engine.ready()
        assert engine.health().state == "dead" and pid_of(engine) is None
        await engine.stop()

    run(test())


def test_settings_that_cannot_work_are_refused_by_the_real_core():
    async def test():
        config = EngineConfig(device="sim", max_model_len=5000, sim=SimConfig(kv_blocks=10))
        engine = await AsyncEngine.start(config, connect=ProcessClient)
        with pytest.raises(ConfigError, match="the simulated KV pool holds 10"):
            await engine.ready()
        await engine.stop()

    run(test())


def test_a_core_that_dies_while_it_loads_fails_the_start():
    async def test():
        connect = partial(ProcessClient, timing=QUICK, command=(sys.executable, "-c", "1/0"))
        engine = await AsyncEngine.start(CONFIG, connect=connect)
        with pytest.raises(Exception, match="ended with exit code 1 while it loaded"):
            await engine.ready()
        await engine.stop()

    run(test())


def test_stopping_while_the_core_loads_leaves_no_process():
    async def test():
        engine = await AsyncEngine.start(CONFIG, connect=Running().connect)
        await until(lambda: engine._client is not None and pid_of(engine) is not None)
        pid = pid_of(engine)
        await engine.stop()
        assert not psutil.pid_exists(pid)

    run(test())


def test_an_idle_core_costs_nothing():
    async def test():
        async with Running(Timing()) as engine:
            await text_of(engine)
            child = psutil.Process(pid_of(engine))
            before, started = child.cpu_times(), time.monotonic()
            await until(lambda: time.monotonic() - started > 2.0)
            after = child.cpu_times()
            used = after.user + after.system - before.user - before.system
            assert used <= 0.02, f"{used:.3f} s of CPU in two idle seconds"

    run(test())


def test_ctrl_c_does_not_reach_the_core_and_sigterm_lets_it_finish():
    async def test():
        async with Running() as engine:
            pid = pid_of(engine)
            os.kill(pid, signal.SIGINT)
            running = asyncio.ensure_future(text_of(engine, params=SamplingParams(max_tokens=80)))
            await until(lambda: engine.stats.num_running == 1)
            os.kill(pid, signal.SIGTERM)
            assert len(await running) == 80
            await restarted(engine, pid)

    run(test())


def test_a_failed_step_is_not_the_end_of_the_core():
    async def test():
        async with Running() as engine:
            pid = pid_of(engine)
            with pytest.raises(GenerationFailed, match="failed to compute a step: RuntimeError"):
                await text_of(engine, [RAISE])
            assert len(await text_of(engine)) == 10
            assert pid_of(engine) == pid

    run(test())


def test_a_reply_that_no_frame_holds_ends_its_request_and_not_the_core(monkeypatch):
    monkeypatch.setenv("OCTAVO_TEST_MAX_FRAME", "3000")

    async def test():
        async with Running() as engine:
            pid = pid_of(engine)
            beside = asyncio.ensure_future(text_of(engine))
            wide = msgspec.structs.replace(PARAMS, logprobs=-1)  # a row of 512 alternatives
            with pytest.raises(InvalidRequest, match="ask for fewer log-probabilities"):
                await text_of(engine, params=wide)
            assert len(await beside) == 10
            await until(lambda: engine.stats.num_running == 0)
            assert pid_of(engine) == pid

    run(test())


def spawn_core(*command):
    """A core and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        core = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    ours.settimeout(20)
    return core, ours


def wait_for(ours, reader, wanted):
    """Read until a message is wanted."""
    while not any(wanted(message) for message in reader.feed(ours.recv(1 << 16))):
        pass


@pytest.mark.parametrize("when", ["before the settings", "when ready", "by nonsense", "in a step"])
def test_a_core_whose_parent_is_gone_ends(when):
    core, ours = spawn_core(*FAULTY)
    reader = wire.MessageReader(wire.FROM_CORE)
    with ours:
        if when != "before the settings":
            ours.sendall(wire.encode(wire.Configure(CONFIG, 30)))
            wait_for(ours, reader, lambda m: isinstance(m, wire.Ready))
        if when == "by nonsense":
            ours.sendall(b"\xff" * 100)
            assert core.wait(60) == EXIT_PARENT_GONE
        if when == "in a step":
            ours.sendall(wire.encode(wire.AddRequests([make_request([HANG])])))
            age = 0.0
            while age < 0.02:
                ours.sendall(wire.encode(wire.CorePing(1)))
                pongs = [m for m in reader.feed(ours.recv(1 << 16)) if isinstance(m, wire.Pong)]
                age = max((pong.step_age_s for pong in pongs), default=0.0)
    assert core.wait(60) == EXIT_PARENT_GONE


def test_a_core_is_given_its_settings_first_or_ends():
    core, ours = spawn_core(*CORE_COMMAND)
    with ours:
        ours.sendall(wire.encode(wire.Abort(["x"])))
        assert core.wait(60) == EXIT_PARENT_GONE


def test_a_limit_of_the_machine_is_one_sentence_without_a_traceback(monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def start():
        engine = await AsyncEngine.start(CONFIG, connect=partial(ProcessClient, timing=PATIENT))
        try:
            with pytest.raises(OctavoError, match=r"cannot be started: Too many open files; raise"):
                await engine.ready()
        finally:
            await engine.stop()

    monkeypatch.setattr(subprocess, "Popen", refuse)
    asyncio.run(start())
    assert all(record.exc_info is None for record in caplog.records)
