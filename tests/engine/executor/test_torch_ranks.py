"""Ranks of the torch backend as processes: the answers of one, and what is seen when one ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from octavo_engine.core.build import build_engine
from octavo_engine.core.connect import choose_connect, connect_cores
from octavo_engine.core.process import wire
from octavo_engine.core.process.supervision import Timing
from octavo_engine.errors import ConfigError, WorkerLost
from octavo_engine.executor.leader import start_ranks
from octavo_engine.weights.source import resolve_model
from tests.fakes.heard import Heard
from tests.fakes.rank_processes import tiny_config, until, workers_of
from tests.fakes.requests import make_request
from tests.fakes.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from octavo_engine.core.engine import Engine

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As each rank has: a product by several threads is cut by their number."""
    with one_torch_thread():
        yield


SHARED = [7 * number % 250 for number in range(110)]  # longer than a step, so in chunks
WANTED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.8, "seed": 7, "min_p": 0.02, "frequency_penalty": 0.4},
)


def answers_of(engine: Engine, suffix: str = "") -> dict[str, Any]:
    """Tokens and log-probabilities of all requests at once."""
    for number, wanted in enumerate(WANTED):
        prompt = [*SHARED, 100 + number, *range(number)]
        name = f"{number}{suffix}"
        engine.add(make_request(prompt, request_id=name, max_tokens=10, **wanted))
    answers: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.finish_reason in (None, "length"), output.error
            answer = answers.setdefault(output.request_id[:1], [])
            answer += [*output.token_ids, *output.logprobs]
    return answers


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal tokens. A product's last digits may depend on how many outputs a rank has of it."""
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        for own, other in zip(answer, expected[name], strict=True):
            if isinstance(own, int):
                assert own == other
            else:
                assert own.token_id == other.token_id
                assert own.top_ids == other.top_ids
                scores = [own.logprob, *own.top_logprobs]
                assert scores == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "size"), [("llama", 2), ("qwen2", 4), ("qwen3", 4), ("gemma2", 2), ("gemma3", 3)]
)
def test_answers_are_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    """Prompts in chunks, a prefix that is cached, seeds and penalties; with two KV heads."""
    engine, _ = build_engine(tiny_config(tmp_path, name, device="torch"))
    expected = answers_of(engine)
    engine.close()
    engine, _ = build_engine(tiny_config(tmp_path, name, device="torch", tensor_parallel_size=size))
    assert len(workers_of()) == size - 1
    check(answers_of(engine), expected)
    check(answers_of(engine, " again"), expected)
    assert engine.scheduler.stats().prefix_hits
    engine.sleep(on=True)
    engine.sleep(on=False)
    check(answers_of(engine, " awake"), expected)
    engine.close()
    assert not workers_of()


def test_a_rank_that_is_killed_is_named_at_once(tmp_path: Path) -> None:
    engine, _ = build_engine(tiny_config(tmp_path, "llama", device="torch", tensor_parallel_size=4))
    answers_of(engine)
    engine.add(make_request(SHARED, request_id="x", max_tokens=100, temperature=0.0))
    engine.step()
    workers_of()[1].kill()
    began = time.monotonic()
    with pytest.raises(WorkerLost, match="rank 2 of 4 was ended by SIGKILL"):
        while engine.has_work:
            engine.step()
    assert time.monotonic() - began < 8
    engine.close()
    assert not workers_of()


def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "llama", device="torch", tensor_parallel_size=3)
    backend = start_ranks(config, resolve_model(config.model), patience_s=2.0)
    engine, _ = build_engine(config, backend=backend)
    answers_of(engine)
    workers_of()[1].suspend()
    with pytest.raises(WorkerLost, match="rank 2 of 3 hangs: the others waited for it for 2 s"):
        answers_of(engine, " again")
    engine.close()
    assert not workers_of()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {}, "mixtures of experts cannot be divided between ranks on --device torch"),
        ("deepseek-v2-lite", {}, "cannot be divided between ranks on --device torch yet"),
        ("llama", {"enable_lora": True}, r"LoRA adapters \(--enable-lora\) cannot be divided"),
        ("llama", {"kv_offloading_size": 0.1}, "a KV cache in several tiers cannot be divided"),
        ("llama", {"tensor_parallel_size": 5}, "5 is more than the model's 4 attention heads"),
    ],
)
def test_what_is_not_divided(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, name, device="torch", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=message):
        build_engine(config.replace(**changes))
    assert not workers_of()


def test_all_ranks_start_again_when_one_is_lost(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "llama", device="torch", tensor_parallel_size=2)
    timing = Timing(first_delay=0.05, last_delay=0.1, fast_failure=0.0)

    async def test() -> None:
        heard = Heard()
        client = connect_cores(config, heard, choose_connect(config, timing))
        await client.ready()
        (first,) = workers_of()
        request = make_request(20, request_id="x", max_tokens=290, ignore_eos=True)
        client.send(wire.AddRequests([request]))
        await until(lambda: len(heard.tokens.get("x", [])) > 2)
        first.kill()
        await until(lambda: bool(heard.refused))
        assert "rank 1 of 2 was ended by SIGKILL" in heard.refused[0]
        await until(lambda: client.health().is_ready and not client.health().reason)
        assert [worker.pid for worker in workers_of()] != [first.pid]
        client.send(wire.AddRequests([make_request(20, request_id="after", max_tokens=5)]))
        await until(lambda: len(heard.tokens.get("after", [])) == 5)
        await client.stop()

    asyncio.run(test())
    assert not workers_of()
