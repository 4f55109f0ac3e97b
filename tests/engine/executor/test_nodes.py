"""Stages on several hosts, here over loopback: the answers of one process, and what is seen when a
host is lost."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest

from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.offline.lora_request import LoRARequest
from octavo_engine.errors import ConfigError, InvalidRequest, WorkerLost
from octavo_engine.executor.node_wire import HANDSHAKE_S
from octavo_engine.executor.rank_nodes import MAX_HANDSHAKES
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.executor.test_rank_adapters import SMOLLM2
from tests.fakes.adapters import write_adapter
from tests.fakes.process import environment
from tests.fakes.rank_processes import CONFIG, GREEDY, PROMPT, all_answers, facts, workers_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from octavo_engine.config import EngineConfig

pytestmark = pytest.mark.slow

SCORED = SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True, logprobs=1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def settings(tmp_path: Path) -> EngineConfig:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of more than sixteen bytes")
    return CONFIG.replace(
        pipeline_parallel_size=2,
        nnodes=2,
        num_threads=1,
        master_port=free_port(),
        node_key_file=str(secret),
    )


@contextlib.contextmanager
def node(
    config: EngineConfig, rank: int = 1, key_file: str | None = None, folder: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Another host of that engine, started in that folder."""
    flags: dict[str, Any] = {
        "device": "cpu",
        "num-threads": 1,
        "pipeline-parallel-size": config.pipeline_parallel_size,
        "nnodes": config.nnodes,
        "node-rank": rank,
        "master-port": config.master_port,
        "node-key-file": key_file or config.node_key_file,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "octavo.cli", "serve", config.model, *words]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=folder
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def check_refused(config: EngineConfig, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LLM.from_config(config)


@pytest.mark.parametrize("size", [2, 3])
def test_answers_are_those_of_one_process(settings: EngineConfig, size: int) -> None:
    config = settings.replace(nnodes=size, pipeline_parallel_size=size)
    alone = config.replace(nnodes=1, pipeline_parallel_size=1)
    with LLM.from_config(alone) as llm:
        expected = all_answers(llm)
    with contextlib.ExitStack() as nodes:
        processes = [nodes.enter_context(node(config, rank)) for rank in range(1, size)]
        for _ in range(2):  # nodes wait for the next leader
            with LLM.from_config(config) as llm:
                assert not workers_of_leader(processes)
                assert all_answers(llm) == expected
                llm._engine.sleep(on=True)
                llm._engine.sleep(on=False)
                assert facts(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == expected[0]


def workers_of_leader(nodes: list[subprocess.Popen[str]]) -> list[psutil.Process]:
    theirs = {worker.pid for process in nodes for worker in workers_of(psutil.Process(process.pid))}
    return [worker for worker in workers_of() if worker.pid not in theirs]


def all_adapted(llm: LLM, folders: list[Path]) -> Any:
    """More adapters than slots and than memory has room for, twice, beside prompts without one."""
    adapters = [LoRARequest(folder.name, 1, str(folder)) for folder in folders]
    wanted = [*adapters, None] * 2
    prompts = [PROMPT] * len(wanted)
    return [
        [facts(one) for one in llm.generate(prompts, SCORED, lora_request=wanted, use_tqdm=False)]
        for _ in range(2)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_adapters_are_loaded_by_all_hosts(
    settings: EngineConfig, size: int, tmp_path: Path
) -> None:
    folders = [write_adapter(tmp_path / f"a{n}", SMOLLM2, seed=n, rank=3 + 9 * n) for n in range(4)]
    config = settings.replace(
        nnodes=size, pipeline_parallel_size=size, enable_lora=True, max_loras=2, max_cpu_loras=3
    )
    with LLM.from_config(config.replace(nnodes=1, pipeline_parallel_size=1)) as llm:
        expected = all_adapted(llm, folders)
    assert len({str(answer) for answer in expected[0][:5]}) == 5
    with contextlib.ExitStack() as nodes:
        for rank in range(1, size):
            nodes.enter_context(node(config, rank))
        with LLM.from_config(config) as llm:
            assert all_adapted(llm, folders) == expected


def test_a_host_without_an_adapters_files_fails_its_requests_only(
    settings: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host reads its own files; here they differ by the folder that the process runs in."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for host in (ours, theirs):
        write_adapter(host / "both", SMOLLM2, seed=1)
    write_adapter(ours / "missing", SMOLLM2, seed=2)
    write_adapter(ours / "other", SMOLLM2, seed=3)
    write_adapter(theirs / "other", SMOLLM2, seed=4)
    config = settings.replace(enable_lora=True)
    monkeypatch.chdir(ours)
    with node(config, folder=theirs), LLM.from_config(config) as llm:

        def answer(name: str) -> Any:
            adapter = LoRARequest(name, 1, f"/proc/self/cwd/{name}") if name else None
            return facts(llm.generate(PROMPT, GREEDY, lora_request=adapter, use_tqdm=False)[0])

        plain, adapted = answer(""), answer("both")
        assert plain != adapted
        for name, reason in (
            ("missing", "/proc/self/cwd/missing"),
            ("other", "the files in /proc/self/cwd/other are not those that rank 0 read"),
        ):
            with pytest.raises(InvalidRequest, match=rf"rank 1 of 2 on 127\.0\.0\.1: .*{reason}"):
                answer(name)
            assert (answer(""), answer("both")) == (plain, adapted)
        shutil.copytree(ours / "missing", theirs / "missing")
        assert answer("missing") not in (plain, adapted)


def test_a_lost_host_is_named_and_its_process_ends_with_it(settings: EngineConfig) -> None:
    with node(settings) as process, LLM.from_config(settings) as llm:
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
        workers = workers_of(psutil.Process(process.pid))
        assert len(workers) == 1
        process.kill()
        with pytest.raises(WorkerLost, match=r"rank 1 of 2 on 127\.0\.0\.1 is lost: "):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive


def test_a_stage_that_dies_on_its_host_is_a_lost_host(settings: EngineConfig) -> None:
    with node(settings) as process:
        with LLM.from_config(settings) as llm:
            workers_of(psutil.Process(process.pid))[0].kill()
            with pytest.raises(WorkerLost, match=r"rank 1 of 2 on 127\.0\.0\.1 is lost: "):
                llm.generate(PROMPT, GREEDY, use_tqdm=False)
        with LLM.from_config(settings) as llm:  # the node itself is there still
            llm.generate(PROMPT, GREEDY, use_tqdm=False)


def test_who_is_no_node_hears_so_and_does_not_hold_up_those_that_are(
    settings: EngineConfig, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"another secret, as long as that")
    with ThreadPoolExecutor(1) as thread:
        making = thread.submit(LLM.from_config, settings)
        with node(settings, key_file=str(other)) as stranger:
            assert stranger.wait(60) != 0
            assert stranger.stderr is not None
            assert "the leader refused this node: the secrets differ" in stranger.stderr.read()
        with node(settings), making.result(60) as llm:
            llm.generate(PROMPT, GREEDY, use_tqdm=False)


def test_strangers_that_say_nothing_hold_up_no_node(settings: EngineConfig) -> None:
    address = ("127.0.0.1", settings.master_port)
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as strangers:
        making = thread.submit(LLM.from_config, settings)
        while not making.done():
            with contextlib.suppress(ConnectionRefusedError):
                strangers.enter_context(socket.create_connection(address))
                break
        for _ in range(MAX_HANDSHAKES - 2):
            strangers.enter_context(socket.create_connection(address))
        begun = time.monotonic()
        with node(settings), making.result(60) as llm:
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
        # One after the other, they would be waited for that many times HANDSHAKE_S.
        assert time.monotonic() - begun < 10 * HANDSHAKE_S


def test_a_secret_must_be_long_and_there(settings: EngineConfig, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"short")
    check_refused(settings.replace(node_key_file=str(short)), "must have at least 16 bytes")
    check_refused(settings.replace(node_key_file=str(tmp_path / "no")), "No such file")


def test_an_address_that_is_not_ours(settings: EngineConfig) -> None:
    check_refused(settings.replace(master_addr="203.0.113.9"), "cannot listen there")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1"),
        ({"nnodes": 3}, "it must be --pipeline-parallel-size"),
        ({"node_rank": 2}, "--node-rank must be below --nnodes"),
        ({"master_port": 0}, "--master-port must be from 1 to 65535"),
        ({"node_key_file": None}, "--nnodes needs --node-key-file"),
        ({"data_parallel_size": 2}, "--nnodes needs --data-parallel-size 1"),
    ],
)
def test_settings_that_cannot_work(
    settings: EngineConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.replace(**changes)
