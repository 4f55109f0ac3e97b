"""Ranks with experts of their own as processes: equal answers, and the one that ends is named."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import psutil
import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.core.build import build_engine
from octavo_engine.core.build_core import build_core
from octavo_engine.core.connect import choose_connect, connect_cores
from octavo_engine.core.data_parallel.core_group import CoreGroup
from octavo_engine.core.process import wire
from octavo_engine.core.process.supervision import Timing
from octavo_engine.errors import ConfigError, OctavoError, WorkerLost
from tests.engine.models.tiny import tiny_model
from tests.fakes.heard import Heard
from tests.fakes.rank_processes import started_by, tiny_config, until, workers_of
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from octavo_engine.core.engine import Engine


def config_of(folder: Path, name: str, **changes: Any) -> EngineConfig:
    return tiny_config(folder, name, **{"enable_expert_parallel": True} | changes)


def add_requests(engine: Engine | CoreGroup, count: int = 8) -> None:
    for number in range(count):
        prompt = [token % 250 for token in make_prompt(280, first=number % 2)]
        request = make_request(
            prompt, request_id=str(number), max_tokens=12, temperature=1.0, seed=number, logprobs=1
        )
        engine.add(request)


def answers_of(engine: Engine | CoreGroup) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            answer = answers.setdefault(output.request_id, [])
            answer += [*output.token_ids, *output.logprobs]
            assert output.finish_reason in (None, "length")
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_answers_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Chunks of prompts, the prefix cache, experts chosen by groups and with biases."""
    config = config_of(tmp_path, name, expert_metrics=True)
    found = []
    loads: dict[str, list[list[int]]] = {}
    for size, spreads in ((1, False), (1, True), (2, True), (4, True)):
        changed = config.replace(tensor_parallel_size=size, enable_expert_parallel=spreads)
        engine, _ = build_engine(changed)
        assert len(workers_of()) == size - 1
        add_requests(engine)
        found.append(answers_of(engine))
        assert engine.stats().prefix_hits
        counts = engine.stats().expert_rank_tokens
        assert len(counts) == (size if size > 1 and spreads else 0)
        assert all(counts)
        by_layer = engine.stats().expert_layer_tokens
        assert by_layer == loads.setdefault(name, by_layer)  # however they are computed
        assert sum(counts) in (0, sum(map(sum, by_layer)))
        engine.close()
    assert all(answers == found[0] for answers in found)
    assert not workers_of()
    layers = [bool(layer) for layer in loads[name]]
    if name == "qwen3-moe":
        assert layers == [True, False, True]  # one of its layers is an MLP


EPLB = '{"window_size": 2, "step_interval": 3, "num_redundant_experts": 2}'


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 2)], ids=["ranks", "cores", "both"])
def test_answers_stay_the_same_while_experts_move(sizes: tuple[int, int], tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3-moe", enable_eplb=True, eplb_config=EPLB, num_threads=4)
    engine, _ = build_engine(config)  # with nowhere to move them
    add_requests(engine)
    expected = answers_of(engine)
    engine.close()
    ranks, cores = sizes
    changed = config.replace(tensor_parallel_size=ranks, data_parallel_size=cores)
    several = CoreGroup.build(changed)[0] if cores > 1 else build_engine(changed)[0]
    add_requests(several)
    assert answers_of(several) == expected
    several.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_stages_count_the_experts_of_their_layers(size: int, tmp_path: Path) -> None:
    """One of the three layers has none."""
    config = config_of(tmp_path, "qwen3-moe", enable_expert_parallel=False, expert_metrics=True)
    found = []
    for stages in (1, size):
        engine, _ = build_engine(config.replace(pipeline_parallel_size=stages))
        add_requests(engine)
        answers = answers_of(engine)
        found.append((answers, engine.stats().expert_layer_tokens))
        assert [bool(layer) for layer in found[-1][1]] == [True, False, True]
        assert not any(engine.stats().expert_rank_tokens), "none has experts of its own"
        engine.close()
    assert found[1] == found[0]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    engine, _ = build_engine(config_of(tmp_path, "qwen3-moe", tensor_parallel_size=3))
    add_requests(engine)
    engine.step()
    workers_of()[1].kill()
    with pytest.raises(WorkerLost, match="rank 2 of 3 was ended by SIGKILL"):
        answers_of(engine)
    engine.close()
    assert not workers_of()


def cores_of() -> list[psutil.Process]:
    """The engine cores that this process has started."""
    return started_by(psutil.Process(), "octavo_engine.core.process.child")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_cores_that_share_the_experts_answer_as_one_process(name: str, tmp_path: Path) -> None:
    """Each has requests of its own, and at the end some have none."""
    config = config_of(tmp_path, name, expert_metrics=True)
    engine, _ = build_engine(config.replace(enable_expert_parallel=False))
    add_requests(engine)
    expected = answers_of(engine)
    engine.close()
    for size in (2, 3):
        group, _ = CoreGroup.build(config.replace(data_parallel_size=size, num_threads=size))
        assert len(cores_of()) == size
        add_requests(group)
        assert answers_of(group) == expected
        counts = group._stats.expert_rank_tokens
        assert len(counts) == size
        assert all(counts)
        for rank, core in enumerate(group._stats.cores):  # its own experts, for all cores
            sums = [sum(layer) for layer in core.expert_layer_tokens if layer]
            assert sum(sums) == counts[rank]
        group.close()
        assert not cores_of()


@pytest.mark.slow
def test_a_core_that_is_killed_is_named(tmp_path: Path) -> None:
    group, _ = CoreGroup.build(config_of(tmp_path, "qwen3-moe", data_parallel_size=2))
    add_requests(group)
    answers_of(group)
    cores_of()[1].kill()
    with pytest.raises(WorkerLost, match="data-parallel rank 1 of 2"):
        for _ in range(1000):  # until it is seen
            add_requests(group)
            answers_of(group)
    assert not cores_of()


@pytest.mark.slow
def test_all_cores_are_started_again_when_one_is_lost(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3-moe", data_parallel_size=2)
    timing = Timing(first_delay=0.05, last_delay=0.1, fast_failure=0.0)

    async def test() -> None:
        heard = Heard()
        client = connect_cores(config, heard, choose_connect(config, timing))
        await client.ready()
        before = {core.pid for core in cores_of()}
        for number in range(4):
            request = make_request(20, request_id=str(number), max_tokens=250)
            client.send(wire.AddRequests([request]))
        await until(lambda: len(heard.tokens) == 4)
        cores_of()[0].kill()
        await until(lambda: len(heard.refused) >= 4)
        assert any("rank 0 of 2" in error and "SIGKILL" in error for error in heard.refused)
        assert any("rank 0 of 2, which has some of the experts" in e for e in heard.refused)
        await until(lambda: len({core.pid for core in cores_of()} - before) == 2)
        await until(lambda: client.health().is_ready and not client.health().reason)
        client.send(wire.AddRequests([make_request(20, request_id="after", max_tokens=5)]))
        await until(lambda: len(heard.tokens.get("after", [])) == 5)
        await client.stop()

    asyncio.run(test())
    assert not cores_of()


@pytest.mark.slow
def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    fields = {**tiny_model("mixtral").config, "num_local_experts": 3}
    config = config_of(tmp_path, "mixtral", tensor_parallel_size=4)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="has 3 experts for 4 ranks; lower --tensor-parallel-siz"):
        build_engine(config)
    assert not workers_of()
    cores = config.replace(tensor_parallel_size=1, data_parallel_size=4, num_threads=4)
    with pytest.raises(ConfigError, match="has 3 experts for 4 ranks; lower --data-parallel-size"):
        CoreGroup.build(cores)
    assert not cores_of()


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_without_experts_is_refused(tmp_path: Path, size: int) -> None:
    config = config_of(tmp_path, "llama", tensor_parallel_size=size)
    rule = "--enable-expert-parallel is for mixtures of experts, and this model, LlamaForCausalLM, "
    with pytest.raises(ConfigError, match=rule):
        build_engine(config)
    assert not workers_of()


def test_a_model_that_pools_is_refused() -> None:
    config = EngineConfig(model="demo://minilm", device="cpu", enable_expert_parallel=True)
    with pytest.raises(ConfigError, match="is for models that generate, and this one pools"):
        build_core(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size must be 1; got 2"),
        (
            {"device": "sim"},
            "is computed by --device cpu only; leave it out here; got --device sim",
        ),
        ({"device": "cuda"}, "is computed by --device cpu only"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OctavoError, match=f"--enable-expert-parallel .*{message}"):
        EngineConfig(enable_expert_parallel=True, **changes)
