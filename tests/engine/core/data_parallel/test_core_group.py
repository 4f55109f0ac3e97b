"""`LLM` over several cores: the answers of one, in order; nothing is left however it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from octavo_engine.config import SimConfig
from octavo_engine.core.beam_search import BeamSearchParams
from octavo_engine.core.data_parallel.core_group import CoreGroup
from octavo_engine.core.info import CoreHealth
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.offline.lora_request import LoRARequest
from octavo_engine.core.process import wire
from octavo_engine.errors import ConfigError, InvalidRequest, ModelError, OctavoError, WorkerLost
from octavo_engine.state.grammar import GrammarSpec
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.adapters import write_adapter
from tests.fakes.backend import FakeBackend
from tests.fakes.data_parallel import real_config, sim_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.state.outputs import StepOutput

SIM = sim_config(4, time_scale=0.0)
REAL = real_config(4)
TWO = REAL.replace(data_parallel_size=2)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=8, n=2, logprobs=2, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
CODE = SamplingParams(
    temperature=1.0, seed=6, max_tokens=20, grammar=GrammarSpec(kind="regex", text="[0-9]{3}-[a-z]")
)
ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True)
PROMPTS = [f"{number}. The capital of France is" for number in range(24)]


class Earlier:
    """Processes that other tests' fixtures keep."""

    pids: frozenset[int] = frozenset()


@pytest.fixture(autouse=True)
def note_earlier_processes() -> None:
    Earlier.pids = frozenset(child.pid for child in psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    """Of this test."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.pid not in Earlier.pids]


def workers() -> list[psutil.Process]:
    """The ranks of the cores."""
    found = []
    for child in children():
        with contextlib.suppress(psutil.Error):
            if "octavo_engine.executor.worker" in child.cmdline():
                found.append(child)
    return found


def until(fact: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def facts(outputs: list[RequestOutput]) -> Any:
    return [
        (output.prompt, output.request_id, answer.index, answer.token_ids, answer.logprobs)
        for output in outputs
        for answer in output.outputs
    ]


def generated(llm: LLM) -> list[float]:
    """Tokens, by core."""
    return [
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "octavo_generation_tokens_total"
    ]


def interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


# ── on simulated cores, in threads ──


def test_answers_are_in_the_order_of_the_prompts_and_made_by_both() -> None:
    with LLM.from_config(SIM) as llm, LLM.from_config(SIM.replace(data_parallel_size=1)) as alone:
        outputs = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
        assert facts(outputs) == facts(alone.generate(PROMPTS, DRAWN, use_tqdm=False))
        assert llm.info.num_blocks == 2 * alone.info.num_blocks
        counts = generated(llm)
        assert sum(counts) == len(PROMPTS) * 2 * 8
        assert min(counts) >= sum(counts) / 8  # the core that has less to do gets the next one
        assert llm.generate([], DRAWN, use_tqdm=False) == []


def test_of_many_prompts_only_some_wait_at_the_cores() -> None:
    with LLM.from_config(SIM) as llm:
        group: Any = llm._engine
        placed: list[int] = []
        step = group.step

        def noted_step() -> StepOutput:
            output: StepOutput = step()
            placed.append(len(group._placed))
            return output

        group.step = noted_step
        llm.generate(PROMPTS * 8, SHORT, use_tqdm=False)
        assert 8 < max(placed) <= 2 * 2 * 4


def test_the_answers_to_one_prompt_are_sent_together() -> None:
    with LLM.from_config(SIM) as llm:
        cores: Any = llm._engine._cores  # type: ignore[attr-defined]
        sent: list[int] = []
        send = cores.send

        def noted_send(message: wire.AddRequests, request_ids: list[str]) -> None:
            sent.append(len(message.requests))
            send(message, request_ids)

        cores.send = noted_send
        llm.generate(PROMPTS, DRAWN, use_tqdm=False)
        assert sent == [2] * len(PROMPTS)
        sent.clear()
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
        assert sent == [1] * len(PROMPTS)


def test_an_adapter_is_loaded_into_all_cores(tmp_path: Path) -> None:
    layers = {"model.layers.0.self_attn.q_proj": (64, 64)}
    path = str(write_adapter(tmp_path / "poet", layers))
    with LLM.from_config(SIM.replace(enable_lora=True)) as llm:
        poet = LoRARequest("poet", 1, path)
        plain, styled = (
            facts(llm.generate(PROMPTS, DRAWN, use_tqdm=False, lora_request=each))
            for each in (None, poet)
        )
        assert len(plain) == len(styled)
        assert [stats.num_adapters_held for stats in llm._engine.report([]).stats.cores] == [1, 1]  # type: ignore[union-attr]
        with pytest.raises(OctavoError, match="gone"):
            gone = LoRARequest("gone", 2, str(tmp_path / "gone"))
            llm.generate("a", DRAWN, use_tqdm=False, lora_request=gone)


def test_steps_of_each_core_are_recorded(tmp_path: Path) -> None:
    with LLM.from_config(SIM) as llm:
        with pytest.raises(InvalidRequest, match="start_profile comes first"):
            llm.stop_profile()
        llm.start_profile()
        llm.generate(PROMPTS, SHORT, use_tqdm=False)
        llm.stop_profile(tmp_path / "steps.json")
        for name in ("steps.json", "steps-rank1.json"):
            assert json.loads((tmp_path / name).read_text())["traceEvents"]
        llm.start_profile()
        with pytest.raises(InvalidRequest, match="cannot be written"):
            llm.stop_profile(tmp_path / "no" / "folder")


def test_texts_are_divided_between_cores() -> None:
    config = SIM.replace(sim=SimConfig(task="embed", time_scale=0.0))
    with (
        LLM.from_config(config) as llm,
        LLM.from_config(config.replace(data_parallel_size=1)) as one,
    ):
        for _ in range(2):
            both = [each.outputs.embedding.tolist() for each in llm.embed(PROMPTS)]
            assert both == [each.outputs.embedding.tolist() for each in one.embed(PROMPTS)]
        stats = llm._engine.report([]).stats
        assert stats is not None and all(core.prompt_tokens for core in stats.cores)


def test_a_backend_of_the_caller_has_one_core() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be 1 with a backend"):
        LLM.from_config(SIM, backend=FakeBackend(256))


def test_a_closed_one_leaves_no_thread_also_where_it_is_only_forgotten() -> None:
    before = set(threading.enumerate())
    llm = LLM.from_config(SIM)
    llm.generate("a", SHORT, use_tqdm=False)
    assert set(threading.enumerate()) - before
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before
    llm = LLM.from_config(SIM)
    del llm
    gc.collect()
    until(lambda: set(threading.enumerate()) <= before)


class _DeafClient:
    """Cannot be sent to."""

    async def ready(self) -> Any:
        return None

    def health(self) -> CoreHealth:
        return CoreHealth("ready")

    def send(self, message: wire.ToEngine) -> None:
        raise wire.WireError("a message of 80 bytes is above the limit of 8")

    async def stop(self) -> None:
        pass


def test_a_request_that_cannot_be_sent_is_refused() -> None:
    config = SIM.replace(data_parallel_size=1)
    group, _ = CoreGroup.build(config, connect=lambda _config, _listener: _DeafClient())
    with contextlib.closing(group):
        group.add(EngineRequest(request_id="a", prompt_token_ids=[1], params=SHORT))
        group.step()
        ((request_id, error),) = group.take_refused()
        assert request_id == "a"
        assert "cannot be sent to the engine: a message of 80 bytes" in error.message
        assert not group.has_work


# ── on real ones, in processes ──


@pytest.mark.slow
def test_answers_are_those_of_one_core() -> None:
    chats = [[{"role": "user", "content": f"Say {word}."}] for word in ("hello", "bye", "yes")]

    def all_answers(llm: LLM) -> Any:
        first = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
        coded = llm.generate(PROMPTS[:4], CODE, use_tqdm=False)
        beams = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=2, max_tokens=3))
        texts = [[beam.text for beam in found.sequences] for found in beams]
        chatted = llm.chat(chats, DRAWN, use_tqdm=False)
        return facts(first), facts(coded), texts, facts(chatted)

    with LLM.from_config(REAL) as alone:
        expected = all_answers(alone)
    with LLM("demo://smollm2", device="cpu", data_parallel_size=2, max_model_len=128,
             kv_cache_memory_bytes=64 << 20, num_threads=2, max_num_seqs=4) as llm:  # fmt: skip
        assert len(children()) == 2
        assert all_answers(llm) == expected
        assert min(generated(llm)) > 0
        llm.sleep()
        with pytest.raises(OctavoError, match="sleeps"):
            llm.generate("a", SHORT)
        llm.wake_up()
        assert llm.reset_prefix_cache()
        assert facts(llm.generate(PROMPTS, DRAWN, use_tqdm=False)) == expected[0]
    assert not children()
    with pytest.raises(OctavoError, match="was closed"):
        llm.generate("a", SHORT)


@pytest.mark.slow
def test_vectors_are_those_of_one_core() -> None:
    with LLM("demo://minilm", num_threads=1) as alone:
        expected = [each.outputs.embedding.tolist() for each in alone.embed(PROMPTS)]
    with LLM("demo://minilm", data_parallel_size=2, num_threads=2) as llm:
        assert [each.outputs.embedding.tolist() for each in llm.embed(PROMPTS)] == expected


@pytest.mark.slow
def test_ctrl_c_ends_a_batch_and_leaves_the_cores() -> None:
    with LLM.from_config(TWO) as llm:
        expected = facts(llm.generate(PROMPTS[:2], SHORT, use_tqdm=False))
        interrupt_after(0.3)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, ENDLESS, use_tqdm=False)
        assert len(children()) == 2
        assert facts(llm.generate(PROMPTS[:2], SHORT, use_tqdm=False)) == expected
    assert not children()


@pytest.mark.slow
def test_ctrl_c_while_loading_ends_all_processes() -> None:
    interrupt_after(0.6)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(50):
            LLM.from_config(TWO).close()
    assert not children()


@pytest.mark.slow
def test_a_core_that_is_killed_is_named_and_ends_all() -> None:
    with LLM.from_config(TWO) as llm:
        cores = [core.client.pid for core in llm._engine._cores._client._cores]  # type: ignore[attr-defined]
        threading.Timer(0.3, psutil.Process(cores[1]).kill).start()
        reason = "data-parallel rank 1 of 2: the engine core was ended by SIGKILL"
        with pytest.raises(WorkerLost, match=reason) as lost:
            llm.generate(PROMPTS, ENDLESS, use_tqdm=False)
        assert "started again" not in str(lost.value) and "given up" not in str(lost.value)
        assert not children()
        with pytest.raises(WorkerLost, match=reason):
            llm.generate(PROMPTS, SHORT, use_tqdm=False)


@pytest.mark.slow
def test_a_rank_of_a_core_that_is_lost_meanwhile_is_named() -> None:
    with LLM.from_config(TWO.replace(tensor_parallel_size=2, num_threads=4)) as llm:
        with LLM.from_config(REAL) as alone:
            expected = facts(alone.generate(PROMPTS[:4], SHORT, use_tqdm=False))
        assert facts(llm.generate(PROMPTS[:4], SHORT, use_tqdm=False)) == expected
        assert len(children()) == 4
        workers()[0].kill()
        until(lambda: len(children()) <= 2)
        with pytest.raises(
            WorkerLost, match=r"data-parallel rank . of 2: .*rank 1 of 2 was ended by SIGKILL"
        ):
            llm.generate(PROMPTS[:4], SHORT, use_tqdm=False)
        assert not children()


@pytest.mark.slow
def test_what_cannot_be_loaded_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="10 is more than the model's 9 attention heads"):
        LLM.from_config(TWO.replace(tensor_parallel_size=10))
    assert not children()
    with pytest.raises(ModelError):
        LLM.from_config(TWO.replace(model=str(tmp_path)))
    assert not children()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "import os; os.kill(os.getpid(), 9)"])
def test_cores_end_with_a_program_that_never_closes(end: str) -> None:
    program = (
        "from octavo import LLM\n"
        "llm = LLM('demo://smollm2', data_parallel_size=2, max_model_len=64)\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program + end], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        cores = psutil.Process(process.pid).children(recursive=True)
        assert len(cores) == 2
        _, errors = process.communicate(b"\n", timeout=30)
    assert process.returncode == (0 if end == "pass" else -9)
    assert b"Traceback" not in errors
    _, alive = psutil.wait_procs(cores, timeout=10)
    assert not alive
