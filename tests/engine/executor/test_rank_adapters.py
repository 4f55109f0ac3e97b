"""Adapters on ranks and stages as processes: the answers of one process; a load that fails fails
alone."""

from __future__ import annotations

import gc
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo import LLM, LoRARequest
from octavo_engine.core.build import build_engine
from octavo_engine.errors import InvalidRequest, ModelError, WorkerLost
from octavo_engine.executor import messages
from octavo_engine.executor.leader import NativeLeader, PipelineLeader, start_ranks
from octavo_engine.executor.rank_adapters import (
    FollowingAdapters,
    LeadingAdapters,
    RankedAdapter,
    placing,
)
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.weights.adapter import read_adapter
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.test_step_plan import make_step
from tests.engine.executor.test_expert_parallel import answers_of, config_of
from tests.engine.models.tiny import tiny_model
from tests.fakes.adapters import write_adapter
from tests.fakes.process import serving
from tests.fakes.rank_processes import CONFIG, GREEDY, PROMPT, facts, workers_of
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_engine.core.engine import Engine

TINY = {
    f"model.layers.{layer}.self_attn.{name}": size
    for layer in range(2)
    for name, size in {"q_proj": (64, 64), "v_proj": (64, 32), "o_proj": (64, 64)}.items()
}
SMOLLM2 = {
    f"model.layers.{layer}.{name}": size
    for layer in (0, 7, 15, 29)
    for name, size in {
        "self_attn.k_proj": (576, 192), "self_attn.o_proj": (576, 576), "mlp.up_proj": (576, 1536)
    }.items()
}  # fmt: skip
LORA = CONFIG.replace(enable_lora=True, max_loras=2, max_cpu_loras=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(n), SMOLLM2, seed=n, rank=3 + 9 * n) for n in range(4)]


def add_requests(engine: Engine, folders: list[Path]) -> None:
    """More adapters than slots, and every fifth request without one; prompts begin alike."""
    adapters = [
        AdapterRef(f"a{n}", str(folder), read_adapter(str(folder)).digest)
        for n, folder in enumerate(folders)
    ]
    for number in range(20):
        prompt = [token % 250 for token in make_prompt(60 + number, first=number % 2)]
        request = make_request(
            prompt, request_id=str(number), max_tokens=10, temperature=1.0, seed=number,
            logprobs=1, adapter=[*adapters, None][number % 5],
        )  # fmt: skip
        engine.add(request)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_answers_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Slots are given to others, adapters go from memory and are read again."""
    size = tiny_model(name).config["hidden_size"]
    assert size == 64
    folders = [write_adapter(tmp_path / f"a{n}", TINY, seed=n, rank=2 + n) for n in range(4)]
    config = config_of(
        tmp_path, name, enable_expert_parallel=False, enable_lora=True, max_loras=2, max_cpu_loras=3
    )
    found = []
    for changes in (
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4, "num_threads": 4, "enable_expert_parallel": name == "mixtral"},
        {"pipeline_parallel_size": 2},
    ):
        engine, _ = build_engine(config.replace(**changes))
        add_requests(engine, folders)
        first = answers_of(engine)
        add_requests(engine, folders)
        assert answers_of(engine) == first
        stats = engine.stats()
        assert stats.prefix_hits and stats.num_adapters_held == 3
        assert sum(stats.adapter_load_counts) > 4, "none was read again"
        found.append(first)
        engine.close()
    assert len(found[0]) == 20
    assert all(answers == found[0] for answers in found)
    assert not workers_of()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["rank", "stage"]
)
def test_a_load_that_fails_on_another_rank_fails_alone(
    changes: dict[str, Any], folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what rank 0 refuses itself; both can be loaded once they are whole."""
    one, other = (LoRARequest(f"a{n}", 1, str(folders[n])) for n in range(2))
    with LLM.from_config(LORA) as llm:
        expected = [
            facts(llm.generate(PROMPT, GREEDY, lora_request=each, use_tqdm=False)[0])
            for each in (one, other, None)
        ]
    with LLM.from_config(LORA.replace(**changes)) as llm:

        def answer(adapter: LoRARequest | None) -> Any:
            return facts(llm.generate(PROMPT, GREEDY, lora_request=adapter, use_tqdm=False)[0])

        assert answer(one) == expected[0]
        processes = llm._engine.executor._backend._processes  # type: ignore[attr-defined]
        send = processes.send

        def spoilt(message: messages.PackAdapter) -> None:
            send(messages.PackAdapter(message.number, message.path, "of something else"))

        monkeypatch.setattr(processes, "send", spoilt)
        with pytest.raises(InvalidRequest, match=r"rank 1 of 2: the files in .* are not those"):
            answer(other)
        assert answer(one) == expected[0]
        assert answer(None) == expected[2]
        monkeypatch.undo()
        broken = write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (8, 8)})
        with pytest.raises(InvalidRequest, match="the adapter is of another model"):
            answer(LoRARequest("broken", 1, str(broken)))
        assert answer(other) == expected[1]
    assert not workers_of()


def leading(folder: Path, **changes: Any) -> NativeLeader:
    """Ranks of a tiny model that are not prepared for steps."""
    config = config_of(folder, "llama", enable_expert_parallel=False, enable_lora=True, **changes)
    leader = start_ranks(config, resolve_model(config.model), patience_s=3.0)
    assert isinstance(leader, NativeLeader)
    return leader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, "rank 1 of 2 was ended by SIGKILL"),
        (signal.SIGSTOP, "rank 1 of 2 hangs: nothing was heard of it for 3 s"),
    ],
)
def test_a_rank_that_ends_or_hangs_ends_the_load(
    how: signal.Signals, message: str, tmp_path: Path
) -> None:
    backend = leading(tmp_path, tensor_parallel_size=2)
    files = read_adapter(str(write_adapter(tmp_path / "a", TINY)))
    (worker,) = workers_of()
    worker.send_signal(signal.SIGSTOP)  # what it is sent stays unread
    worker.send_signal(how)
    with pytest.raises(WorkerLost, match=message):
        backend.pack_adapter(files)
    backend.close()
    with pytest.raises(WorkerLost, match=r"was closed meanwhile|SIGKILL"):
        backend.pack_adapter(files)


class FakeProcesses:
    """Three ranks, of which the last answers with an error where there is one."""

    size = 3

    def name_of(self, rank: int) -> str:
        return f"rank {rank} of {self.size}"

    lost = on_lost = None

    def __init__(self) -> None:
        self.sent: list[messages.PackAdapter] = []
        self.error = ""

    def send(self, message: messages.PackAdapter) -> None:
        self.sent.append(message)

    def heard(self) -> list[int]:
        return [0] * self.size

    def answers(self, number: int) -> list[messages.AdapterPacked]:
        return [
            messages.AdapterPacked(number, 1),
            messages.AdapterPacked(number, 2, self.error),
        ]


def test_ranks_forget_what_nobody_refers_to(tmp_path: Path) -> None:
    """An adapter that went from memory, one that a rank could not read, one that rank 0 refused."""
    processes: Any = FakeProcesses()
    adapters = LeadingAdapters(processes)
    files = read_adapter(str(write_adapter(tmp_path, TINY)))
    first, second = (adapters.pack(files, lambda _: "own") for _ in range(2))  # type: ignore[arg-type,return-value]
    assert [sent.number for sent in processes.sent] == [0, 1]
    assert processes.sent[0].path == str(tmp_path) and processes.sent[0].digest == files.digest
    assert adapters.take_unused() == []
    del first
    assert adapters.take_unused() == [np.array([0], np.int32).tobytes()]
    processes.error = "no memory"
    with pytest.raises(ModelError, match="rank 2 of 3: no memory"):
        adapters.pack(files, lambda _: "own")  # type: ignore[arg-type,return-value]

    def refuse(files: Any) -> Any:
        raise ModelError("of another model")

    with pytest.raises(ModelError, match="of another model"):
        adapters.pack(files, refuse)
    gc.collect()
    assert adapters.take_unused() == [np.array([2, 3], np.int32).tobytes()]
    assert placing(1, second) == np.array([1, 1], np.int32).tobytes()


class FakeBackend:
    def __init__(self) -> None:
        self.slots: dict[int, Any] = {}

    def pack_adapter(self, files: Any) -> Any:
        if files.rank == 5:
            raise RuntimeError("unforeseen")
        return files.digest

    def set_adapter(self, slot: int, packed: Any) -> None:
        self.slots[slot] = packed


def test_a_rank_holds_what_it_is_told_to(tmp_path: Path) -> None:
    backend: Any = FakeBackend()
    adapters = FollowingAdapters(backend, 1, 8)
    folder = str(write_adapter(tmp_path / "a", TINY))
    digest = read_adapter(folder).digest
    assert adapters.pack(messages.PackAdapter(7, folder, digest)).error == ""
    adapters.place(np.array([2, 7], np.int32).tobytes())
    assert backend.slots == {2: digest}
    adapters.forget(np.array([7, 8], np.int32).tobytes())
    assert not adapters._held
    adapters.place(np.array([2, -1], np.int32).tobytes())
    assert backend.slots == {2: None}
    for number, (rank, reason) in enumerate(((5, "unforeseen"), (9, "above --max-lora-rank 8"))):
        folder = str(write_adapter(tmp_path / str(rank), TINY, rank=rank))
        wanted = messages.PackAdapter(number, folder, read_adapter(folder).digest)
        answer = adapters.pack(wanted)
        assert (answer.number, answer.rank) == (number, 1) and reason in answer.error
    assert not adapters._held


class FakeRing:
    def put(self, message: bytes, patience_s: float) -> bool:
        return True


class FakeStage:
    """The last stage: which adapters the steps were computed with."""

    laps = None

    def __init__(self) -> None:
        self.slots: dict[int, Any] = {}
        self.computed: list[dict[int, Any]] = []

    def set_adapter(self, slot: int, packed: Any) -> None:
        self.slots[slot] = packed

    def execute(self, step: Any, sampling: Any) -> Any:
        self.computed.append(dict(self.slots))

    def arrived(self, patience_s: float) -> bool:
        return True

    def drop(self) -> None:
        pass

    def put_into(self, step: Any) -> None:
        pass


def test_a_step_under_way_keeps_what_its_slots_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline, whose first stages are at the step behind it already."""
    stage, processes = FakeStage(), FakeProcesses()
    leader = PipelineLeader(stage, processes)  # type: ignore[arg-type]
    monkeypatch.setattr(leader, "_ring", FakeRing())
    monkeypatch.setattr(leader, "_rows", stage)
    adapters = [RankedAdapter(number) for number in range(3)]
    steps = []
    for number, adapter in enumerate(adapters):
        adapter.own = f"own {number}"  # type: ignore[assignment]
        leader.set_adapter(0, adapter)
        steps.append(leader.launch(make_step([1], [1]), None))  # type: ignore[arg-type]
    leader.set_adapter(0, None)
    assert not stage.slots
    steps[0].wait()
    steps[2].wait()  # nobody waits for the second one
    assert stage.computed == [{0: "own 0"}, {0: "own 2"}]
    leader.launch(make_step([1], [1]), None).wait()  # type: ignore[arg-type]
    assert stage.computed[2] == {0: None}


@pytest.mark.slow
def test_the_server_gives_the_same_answers(folders: list[Path]) -> None:
    """Also where each of two cores has two ranks, and of an adapter that is loaded meanwhile."""
    flags = ("demo://smollm2", "--device", "cpu", "--max-model-len", "128", "--enable-lora",
             "--allow-runtime-lora-updating", "--max-loras", "2",
             "--lora-modules", f"one={folders[0]}", f"two={folders[1]}")  # fmt: skip
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 4, "temperature": 1.0, "logprobs": 1}
    found = []
    for more in (
        (),
        ("--tensor-parallel-size", "2"),
        ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--num-threads", "4"),
    ):
        with serving(*flags, *more) as server, server.client() as client:
            missing = {"lora_name": "none", "lora_path": "/nowhere"}
            assert client.post("/v1/load_lora_adapter", json=missing).status_code == 404
            loaded = {"lora_name": "three", "lora_path": str(folders[2])}
            assert client.post("/v1/load_lora_adapter", json=loaded).status_code == 200
            answers = []
            for model in ("one", "two", "three", "demo://smollm2"):
                answer = client.post("/v1/completions", json={**body, "model": model})
                answers.append(answer.json()["choices"])
            assert client.post("/v1/unload_lora_adapter", json=loaded).status_code == 200
            found.append(answers)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert found[0] == found[1] == found[2]
    assert len({str(answer) for answer in found[0]}) == 4
