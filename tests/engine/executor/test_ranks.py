"""Ranks as processes: the answers of one process, and what is seen when one of them ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from typing import Any

import psutil
import pytest

from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.process.process_client import ProcessClient
from octavo_engine.core.process.supervision import Timing
from octavo_engine.errors import ConfigError, ModelError, WorkerLost
from octavo_engine.executor.leader import start_ranks
from octavo_engine.executor.rank_processes import RankProcesses
from octavo_engine.weights.source import resolve_model
from tests.fakes.rank_processes import (
    CONFIG,
    DRAWN,
    GREEDY,
    PROMPT,
    all_answers,
    all_fail,
    facts,
    served,
    serves,
    six_streams,
    until,
    workers_of,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {"dtype": "float32", "quantization": "none"}),
        (4, {"quantization": "int8", "speculative_config": '{"method": "ngram"}'}),
    ],
    ids=["2 ranks", "3 ranks float32", "4 ranks int8 speculation"],
)
def test_answers_are_those_of_one_process(size: int, options: dict[str, Any]) -> None:
    config = CONFIG.replace(**options)
    with LLM.from_config(config) as alone:
        expected = all_answers(alone)
    with LLM.from_config(config.replace(tensor_parallel_size=size)) as llm:
        assert len(workers_of()) == size - 1
        assert all_answers(llm) == expected
        if "dtype" not in options:
            assert llm._engine.scheduler.stats().preemptions  # type: ignore[attr-defined]
        llm._engine.sleep(on=True)
        llm._engine.sleep(on=False)
        assert facts(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == expected[0]
    assert not workers_of()
    llm.close()


def test_each_rank_replaces_the_same_fields_of_config_json() -> None:
    config = CONFIG.replace(hf_overrides='{"rope_theta": 500, "rms_norm_eps": 0.01}')
    with LLM.from_config(config) as alone:
        expected = facts(alone.generate(PROMPT, DRAWN, use_tqdm=False)[0])
    with LLM.from_config(CONFIG) as plain:
        assert facts(plain.generate(PROMPT, DRAWN, use_tqdm=False)[0]) != expected
    with LLM.from_config(config.replace(tensor_parallel_size=2)) as llm:
        assert facts(llm.generate(PROMPT, DRAWN, use_tqdm=False)[0]) == expected


def test_a_rank_that_is_killed_is_named() -> None:
    with LLM.from_config(CONFIG.replace(tensor_parallel_size=2)) as llm:
        (worker,) = workers_of()
        worker.kill()
        with pytest.raises(WorkerLost, match="rank 1 of 2 was ended by SIGKILL"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)


def test_a_rank_that_hangs_is_named_and_ended() -> None:
    config = CONFIG.replace(tensor_parallel_size=3)
    backend = start_ranks(config, resolve_model(config.model), patience_s=1.0)
    with LLM.from_config(config, backend=backend) as llm:
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        stopped = workers_of()[1]
        stopped.suspend()
        with pytest.raises(WorkerLost, match="rank 2 of 3 hangs: the others waited"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert not workers_of()


def test_a_rank_that_cannot_start_ends_the_start(tmp_path: Any) -> None:
    config = CONFIG.replace(tensor_parallel_size=2, model=str(resolve_model(CONFIG.model).path))
    failing = (sys.executable, "-c", "raise SystemExit(9)")
    processes = RankProcesses(config, 10.0, failing)
    with pytest.raises(WorkerLost, match="rank 1 of 2 ended with exit code 9"):
        processes.expect(object)  # type: ignore[arg-type]  # nothing is ever said
    processes.close()
    missing = config.replace(model=str(tmp_path))
    processes = RankProcesses(missing, 10.0)
    with pytest.raises(ModelError, match="is not a model"):
        processes.expect(object)  # type: ignore[arg-type]
    processes.close()
    assert not workers_of()


def test_nothing_is_left_when_rank_0_is_killed() -> None:
    program = (
        "import time\n"
        "from octavo_engine.core.offline.llm import LLM\n"
        "llm = LLM('demo://smollm2', tensor_parallel_size=3, max_model_len=64)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == b"ready\n"
        workers = workers_of(psutil.Process(leader.pid))
        assert len(workers) == 2
        leader.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be from 1 to 64; got 0"),
        (
            {"tensor_parallel_size": 2, "device": "plugin", "platform": "hpu"},
            "is computed by --device cpu, cuda and torch only; it must be 1 here, with an engine",
        ),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "is one process"),
        ({"distributed_executor_backend": "dask"}, "must be one of auto, uni, mp, ray; got dask"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**changes)


def test_models_that_cannot_be_shared_out_so() -> None:
    with pytest.raises(ConfigError, match="10 is more than the model's 9 attention heads"):
        LLM.from_config(CONFIG.replace(tensor_parallel_size=10))
    with pytest.raises(ConfigError, match="is for models that generate"):
        LLM("demo://minilm", tensor_parallel_size=2)
    assert not workers_of()


def test_the_core_is_replaced_when_a_rank_is_lost() -> None:
    """Under load, and when nothing is computed."""
    timing = Timing(first_delay=0.05, last_delay=0.1, fast_failure=0.0)
    config = CONFIG.replace(tensor_parallel_size=2, max_model_len=2048, kv_cache_memory_bytes=None)

    async def lose_rank(engine: AsyncEngine) -> None:
        core = psutil.Process(engine._client.pid)  # type: ignore[union-attr]
        workers_of(core)[0].kill()
        await until(lambda: "rank 1 of 2 was ended by SIGKILL" in engine.health().reason)
        await until(lambda: engine.health().state == "ready")

    async def test() -> None:
        engine = await AsyncEngine.start(config, connect=partial(ProcessClient, timing=timing))
        await engine.ready()
        streams = await six_streams(engine)
        await lose_rank(engine)
        await all_fail(streams)
        await lose_rank(engine)
        await serves(engine)
        await engine.stop()

    asyncio.run(test())
    assert not workers_of()


def test_the_server_gives_the_same_answer() -> None:
    assert served("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp") == served()
