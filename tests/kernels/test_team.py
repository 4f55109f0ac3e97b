"""Teams of threads: their number, their instruction set, their life."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels.harness import pack

if TYPE_CHECKING:
    from pathlib import Path


def num_threads_here() -> int:
    return len(os.listdir("/proc/self/task"))


def test_available_isas_end_with_generic_and_the_best_is_the_default() -> None:
    isas = _native.available_isas()
    assert isas[-1] == "generic"
    assert _native.Team(1).isa == os.environ.get("OCTAVO_CPU_ISA", isas[0])
    for isa in isas:
        assert _native.Team(1, isa).isa == isa


def test_features_and_isas_agree() -> None:
    features = _native.cpu_features()
    assert ("avx2" in _native.runnable_isas()) == (features["avx2"] and features["fma"])


def test_every_set_that_runs_here_was_built() -> None:
    """Kernel tests compare the sets that are there: one that is not would pass unseen."""
    missing = set(_native.runnable_isas()) - set(_native.available_isas())
    assert not missing, "this build is for users; `make test` builds with OCTAVO_ISAS=runnable"


def test_cores_are_within_the_affinity() -> None:
    assert 1 <= _native.available_cores() <= len(os.sched_getaffinity(0))
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from octavo_engine import _native; print(_native.available_cores())"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


POD = "0::/kubepods/pod1/engine\n"
POD_V1 = "5:memory:/kubepods/pod1\n4:cpu,cpuacct:/kubepods/pod1/engine\n1:name=systemd:/else\n"
QUOTAS: dict[str, tuple[str, dict[str, str], float]] = {
    "no limit": (POD, {"kubepods/pod1/engine/cpu.max": "max 100000"}, math.inf),
    "one core": (POD, {"kubepods/pod1/engine/cpu.max": "100000 100000"}, 1),
    "half a core": (POD, {"kubepods/pod1/engine/cpu.max": "50000 100000"}, 1),
    "a core and a half": (POD, {"kubepods/pod1/engine/cpu.max": "75000 50000"}, 2),
    "of the pod": (
        POD,
        {
            "kubepods/pod1/cpu.max": "100000 100000",
            "kubepods/pod1/engine/cpu.max": "6400000 100000",
            "kubepods/cpu.max": "max 100000",
        },
        1,
    ),
    "of a neighbour": (POD, {"kubepods/pod2/engine/cpu.max": "100000 100000"}, math.inf),
    "within a container": ("0::/\n", {"cpu.max": "100000 100000"}, 1),
    "from outside of the container": (POD, {"cpu.max": "100000 100000"}, 1),
    "unreadable": (POD, {"kubepods/pod1/engine/cpu.max": "many"}, math.inf),
    "version 1": (
        POD_V1,
        {
            "cpu/kubepods/pod1/engine/cpu.cfs_quota_us": "80000",
            "cpu/kubepods/pod1/engine/cpu.cfs_period_us": "100000",
        },
        1,
    ),
    "version 1 without limit": (
        POD_V1,
        {
            "cpu/kubepods/pod1/engine/cpu.cfs_quota_us": "-1",
            "cpu/kubepods/pod1/engine/cpu.cfs_period_us": "100000",
        },
        math.inf,
    ),
    "version 1 within a container": (
        POD_V1,
        {"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "100000"},
        1,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_cores_are_within_the_quota(name: str, tmp_path: Path) -> None:
    membership, files, quota = QUOTAS[name]
    write_files(tmp_path, {"membership": membership, **files})
    cores = _native.available_cores(str(tmp_path), str(tmp_path / "membership"))
    assert cores == min(quota, len(os.sched_getaffinity(0)))


def test_environment_names_the_instruction_set() -> None:
    code = "from octavo_engine import _native; print(_native.Team(1).isa)"

    def run(isa: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OCTAVO_CPU_ISA": isa}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run("generic").stdout == "generic\n"
    failed = run("sse9")
    assert failed.returncode == 1
    assert "instruction set 'sse9' is not available here" in failed.stderr


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0; it must be between 1 and 1024"):
        _native.Team(0)
    with pytest.raises(ValueError, match="instruction set 'mmx' is not available here"):
        _native.Team(1, "mmx")


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads by /proc")
def test_threads_live_as_long_as_the_team() -> None:
    before = num_threads_here()
    team = _native.Team(4)
    assert team.num_threads == 4
    assert num_threads_here() == before + 3
    del team
    gc.collect()
    assert num_threads_here() == before


def test_an_idle_team_costs_nothing() -> None:
    team = _native.Team(3)
    pack(team, np.ones((64, 64), np.float32), "f32")
    done = threading.Event()
    used = [1.0]
    while min(used) >= 0.03 and len(used) < 20:  # workers spin for a moment, then park
        start = time.process_time()
        done.wait(0.3)
        used.append(time.process_time() - start)
    assert min(used) < 0.03
    pack(team, np.ones((64, 64), np.float32), "f32")  # and they wake again


@pytest.mark.parametrize("threads", [2, 5])
def test_workers_come_back_after_any_pause(threads: int) -> None:
    """Whether they still spin, yield or have parked; more of them than cores, too."""
    team = _native.Team(threads)
    matrix = np.arange(200 * 64, dtype=np.float32).reshape(200, 64)
    for pause_s in [0.0, 1e-5, 3e-4, 4e-3, 0.0, 2e-2, 0.0] * 12:
        threading.Event().wait(pause_s)
        np.testing.assert_array_equal(pack(team, matrix, "f32").unpack(), matrix)


def test_two_callers_take_turns() -> None:
    team = _native.Team(2)
    matrices = [np.full((200, 64), i, np.float32) for i in range(4)]
    results: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        for _ in range(50):
            results[index] = pack(team, matrices[index], "f32").unpack()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, matrix in enumerate(matrices):
        np.testing.assert_array_equal(results[index], matrix)
