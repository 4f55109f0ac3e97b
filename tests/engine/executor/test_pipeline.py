"""Stages as processes: the answers of one process, and what is seen when one of them ends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.build import build_engine
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.process.process_client import ProcessClient
from octavo_engine.core.process.supervision import Timing
from octavo_engine.errors import ConfigError, WorkerLost
from octavo_engine.executor.leader import PipelineLeader, start_ranks
from octavo_engine.weights.source import resolve_model
from tests.fakes.rank_processes import (
    CONFIG,
    GREEDY,
    PROMPT,
    all_answers,
    all_fail,
    facts,
    served,
    serves,
    six_streams,
    tiny_config,
    until,
    workers_of,
)
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {"dtype": "float32", "quantization": "none"}),
        (2, {"pipeline_layer_partition": "measured"}),
        (
            2,
            {
                "quantization": "int8",
                "speculative_config": '{"method": "ngram"}',
                "pipeline_layer_partition": "20,10",
            },
        ),
    ],
    ids=["2 stages", "3 stages float32", "2 stages measured", "2 stages int8 speculation"],
)
def test_answers_are_those_of_one_process(size: int, options: dict[str, Any]) -> None:
    few = 15 * 368_640  # bytes: a step of several has fewer blocks than it comes to want
    config = CONFIG.replace(
        pipeline_parallel_size=size,
        kv_cache_memory_bytes=few * (1 + ("dtype" in options)),
        **options,
    )
    alone = config.replace(pipeline_parallel_size=1, pipeline_layer_partition=None)
    with LLM.from_config(alone) as llm:
        expected = all_answers(llm)
    with LLM.from_config(config) as llm:
        assert len(workers_of()) == size - 1
        assert all_answers(llm) == expected
        if size == 2:
            assert llm._engine.scheduler.stats().preemptions  # type: ignore[attr-defined]
        llm._engine.sleep(on=True)
        llm._engine.sleep(on=False)
        assert facts(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == expected[0]
    assert not workers_of()
    llm.close()


@pytest.mark.parametrize(
    "name", ["granite4-moe", "qwen3-next", "gemma3", "deepseek-v3", "gpt-oss", "bloom"]
)
def test_families_over_processes(name: str, tmp_path: Path) -> None:
    """Recurrent states with snapshots, windows, latent vectors, experts; random weights."""
    config = tiny_config(tmp_path, name)
    found = []
    for size in (1, 2):
        engine, _ = build_engine(config.replace(pipeline_parallel_size=size))
        answers: dict[str, Any] = {}
        for number in range(8):
            prompt = [token % 250 for token in make_prompt(280, first=number % 2)]
            engine.add(
                make_request(
                    prompt,
                    request_id=str(number),
                    max_tokens=12,
                    temperature=1.0,
                    seed=number,
                    logprobs=1,
                )
            )
        while engine.has_work:
            for output in engine.step().outputs:
                answer = answers.setdefault(output.request_id, [])
                answer += [*output.token_ids, *output.logprobs]
                assert output.finish_reason in (None, "length")
        assert engine.stats().prefix_hits
        engine.close()
        found.append(answers)
    assert found[0] == found[1]


def test_a_stage_that_is_killed_is_named() -> None:
    with LLM.from_config(CONFIG.replace(pipeline_parallel_size=3)) as llm:
        workers_of()[1].kill()
        with pytest.raises(WorkerLost, match="rank 2 of 3 was ended by SIGKILL"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert not workers_of()


def test_a_stage_that_hangs_is_named_and_ended() -> None:
    config = CONFIG.replace(pipeline_parallel_size=3)
    backend = start_ranks(config, resolve_model(config.model), patience_s=3.0)
    with LLM.from_config(config, backend=backend) as llm:
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        workers_of()[1].suspend()
        with pytest.raises(WorkerLost, match="rank 2 of 3 hangs: the others waited for it for 3 s"):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert not workers_of()


def test_a_step_that_a_stage_refuses_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages behind it hear of it, and compute the next step as if nothing was."""
    config = CONFIG.replace(pipeline_parallel_size=3)
    with LLM.from_config(config) as llm:
        expected = facts(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0])
        leader = llm._engine.executor._backend  # type: ignore[attr-defined]
        assert isinstance(leader, PipelineLeader)
        tell = leader._tell

        def spoilt(command: Any, body: bytes = b"") -> None:
            monkeypatch.undo()
            token = body.index(b"\0\0\0\0", 64)  # of the first sequence's positions
            tell(command, body[:token] + b"\xff\0\0\0" + body[token + 4 :])

        monkeypatch.setattr(leader, "_tell", spoilt)
        failed = llm.generate(PROMPT + " other", GREEDY, use_tqdm=False)[0]
        assert failed.outputs[0].finish_reason == "error"
        assert facts(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size must be from 1 to 64; got 0"),
        ({"device": "torch"}, "--pipeline-parallel-size 2 is computed by --device cpu only"),
        ({"tensor_parallel_size": 2}, "one of them must be 1"),
        ({"distributed_executor_backend": "uni"}, "is one process"),
        (
            {"pipeline_parallel_size": 1, "pipeline_layer_partition": "3,4"},
            "--pipeline-layer-partition goes with --pipeline-parallel-size",
        ),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(**{"pipeline_parallel_size": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 31}, "31 is more than the 30 layers of LlamaForCausalLM"),
        ({"pipeline_layer_partition": "30"}, "must be a number of layers for each of the 2 stages"),
        ({"pipeline_layer_partition": "10,10"}, "is of 20 layers; the model has 30"),
        ({"model": "demo://minilm"}, "is for models that generate"),
    ],
)
def test_models_that_cannot_be_cut_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM.from_config(CONFIG.replace(**{"pipeline_parallel_size": 2, **changes}))
    assert not workers_of()


def test_the_core_is_replaced_when_a_stage_is_lost() -> None:
    timing = Timing(first_delay=0.05, last_delay=0.1, fast_failure=0.0)
    config = CONFIG.replace(
        pipeline_parallel_size=2, max_model_len=2048, kv_cache_memory_bytes=None
    )

    async def test() -> None:
        engine = await AsyncEngine.start(config, connect=partial(ProcessClient, timing=timing))
        await engine.ready()
        streams = await six_streams(engine)
        core = psutil.Process(engine._client.pid)  # type: ignore[union-attr]
        workers_of(core)[0].kill()
        await until(lambda: "rank 1 of 2 was ended by SIGKILL" in engine.health().reason)
        await until(lambda: engine.health().state == "ready")
        await all_fail(streams)
        await serves(engine)
        await engine.stop()

    asyncio.run(test())
    assert not workers_of()


def test_the_server_gives_the_same_answer() -> None:
    assert served("--pipeline-parallel-size", "2") == served()
