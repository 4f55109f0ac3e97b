"""Stages that Ray places: the answers of one process, on a cluster of this host alone.

Runs where Ray is installed: `pip install -e '.[ray]'`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError
from octavo_engine.executor.ray_nodes import threads_of_stage
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.process import environment
from tests.fakes.rank_processes import CONFIG, PROMPT

if TYPE_CHECKING:
    from typing import Any

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"
)
# In a process of its own: Ray leaves threads and warnings where it was.
PROGRAM = """
import json, sys
import psutil
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import WorkerLost
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.rank_processes import CONFIG, PROMPT

def is_stage(process):
    try:
        return "octavo_engine.executor.worker" in process.cmdline()
    except psutil.Error:
        return False

params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)
config = CONFIG.replace(pipeline_parallel_size=2, distributed_executor_backend="ray", num_threads=1)
with LLM.from_config(config) as llm:
    answers = [one.outputs[0] for one in llm.generate([PROMPT, "Once"], params, use_tqdm=False)]
    print(json.dumps([[a.token_ids, a.text] for a in answers]), flush=True)
    for stage in filter(is_stage, psutil.Process().children(recursive=True)):
        stage.kill()
    try:
        llm.generate(PROMPT, params, use_tqdm=False)
    except WorkerLost as error:
        print(json.dumps(str(error)), flush=True)
"""


@needs_ray
@pytest.mark.slow
def test_answers_are_those_of_one_process_and_a_lost_stage_is_named() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM.from_config(CONFIG) as alone:
        outputs = alone.generate([PROMPT, "Once"], params, use_tqdm=False)
    expected = [[one.outputs[0].token_ids, one.outputs[0].text] for one in outputs]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line[:1] in '["']
    assert len(lines) == 2, done.stderr
    assert json.loads(lines[0]) == expected
    assert "rank 1 of 2" in json.loads(lines[1])


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray on all hosts: pip install ray "):
        LLM.from_config(
            CONFIG.replace(pipeline_parallel_size=2, distributed_executor_backend="ray")
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "which must be above 1"),
        ({"tensor_parallel_size": 2}, "ranks that share each layer need one host: use mp"),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, "needs --data-parallel-size 1"),
        (
            {"pipeline_parallel_size": 2, "nnodes": 2, "node_key_file": "secret"},
            "chooses the hosts itself: --nnodes must be 1",
        ),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(distributed_executor_backend="ray", **changes)


@pytest.mark.parametrize(
    ("stages", "hosts", "threads"), [(2, 1, 8), (2, 2, 16), (3, 2, 8), (4, 8, 16), (32, 1, 1)]
)
def test_stages_of_a_host_share_its_cores(stages: int, hosts: int, threads: int) -> None:
    assert threads_of_stage(16, num_stages=stages, num_hosts=hosts) == threads
