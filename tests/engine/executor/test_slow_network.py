"""Stages on three hosts, with a network between them that takes 10 ms each way and loses one packet
in a hundred: the answers of one process, and a step costs one way from stage to stage."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError
from tests.fakes.process import environment
from tests.fakes.rank_processes import CONFIG, DRAWN, PROMPT
from tests.fakes.slow_network import slow_hosts, why_not

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.separate_host import SeparateHost

pytestmark = pytest.mark.slow

SIZE = 3
DELAY_S, LOSS = 0.010, 0.01
PORT = 29501
LEADER = """
import json, sys, time
from octavo_engine.core.offline.llm import LLM
from tests.fakes.rank_processes import CONFIG, DRAWN, PROMPT

with LLM.from_config(CONFIG.replace(**json.loads(sys.argv[1]))) as llm:
    begin = time.monotonic()
    answers = [one.outputs[0] for one in llm.generate([PROMPT, "Once"], DRAWN, use_tqdm=False)]
    took_s = time.monotonic() - begin
print(json.dumps([took_s, [[a.token_ids, a.text] for a in answers]]))
"""


def start_node(host: SeparateHost, leader: str, rank: int, secret: Path) -> subprocess.Popen[str]:
    flags = {
        "device": "cpu",
        "num-threads": 1,
        "pipeline-parallel-size": SIZE,
        "nnodes": SIZE,
        "node-rank": rank,
        "master-addr": leader,
        "master-port": PORT,
        "node-key-file": secret,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "octavo.cli", "serve", CONFIG.model, *words]
    return subprocess.Popen(
        [*host.command, *command], stderr=subprocess.DEVNULL, text=True, env=environment()
    )


def test_stages_over_a_slow_network_that_loses_packets(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of more than sixteen bytes")
    with LLM.from_config(CONFIG) as alone:
        outputs = alone.generate([PROMPT, "Once"], DRAWN, use_tqdm=False)
    expected = [[one.outputs[0].token_ids, one.outputs[0].text] for one in outputs]
    with ExitStack() as ends:
        network, hosts = ends.enter_context(slow_hosts(SIZE, delay_s=DELAY_S, loss=LOSS))
        settings: dict[str, Any] = {
            "pipeline_parallel_size": SIZE,
            "nnodes": SIZE,
            "num_threads": 1,
            "master_addr": hosts[0].address,
            "master_port": PORT,
            "node_key_file": str(secret),
        }
        for rank in range(1, SIZE):
            process = start_node(hosts[rank], hosts[0].address, rank, secret)
            ends.callback(process.wait)
            ends.callback(process.kill)
        leader = [*hosts[0].command, sys.executable, "-c", LEADER, json.dumps(settings)]
        done = subprocess.run(
            leader, capture_output=True, text=True, env=environment(), timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        took_s, answers = json.loads(done.stdout)
        assert answers == expected
        assert network.num_lost > 0
    # A token comes after its step went to the first stage, and its rows to the second and the last
    # by way of the leader: four times one way. Lost packets are sent again by the system.
    steps = len(answers[0][0])
    assert took_s > 4 * DELAY_S * steps


def test_layers_shared_over_hosts_are_refused_with_what_they_would_cost() -> None:
    with pytest.raises(
        ConfigError, match=r"0\.1 ms one way would add about 0\.9 ms for each layer"
    ):
        CONFIG.replace(tensor_parallel_size=2, nnodes=2, node_key_file="secret")
