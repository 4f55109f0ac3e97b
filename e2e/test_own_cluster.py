"""Our own cluster: it leaves nothing, starts again, and never runs twice in one place."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.cluster import packages
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.own import OwnCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="our own cluster needs root")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[OwnCluster]:
    """Beside the cluster of the other tests, whatever that is."""
    chosen = OwnCluster(tmp_path / "run")
    try:
        yield chosen
    finally:
        chosen.stop()


def test_nothing_is_left_and_it_starts_again(alone: OwnCluster, tmp_path: Path) -> None:
    before = traces(tmp_path)
    for _ in range(2):
        alone.start()
        assert nodes(alone) == "node0 True\n"
        assert traces(tmp_path) != before
        alone.stop()
        assert not alone.is_up()
        assert traces(tmp_path) == before


def test_a_second_start_is_refused_and_disturbs_nothing(alone: OwnCluster, tmp_path: Path) -> None:
    alone.start()
    with pytest.raises(ClusterError, match="is up already"):
        OwnCluster(tmp_path / "run").start()
    assert nodes(alone) == "node0 True\n"


def test_what_a_killed_run_left_is_cleared(alone: OwnCluster, tmp_path: Path) -> None:
    """Its processes died with the first of them; its folder and control groups did not."""
    before = traces(tmp_path)
    alone.start()
    (first,) = processes(tmp_path, "e2e.cluster.boot")
    os.kill(first, 9)
    alone.stop()
    assert traces(tmp_path) == before


def test_a_machine_that_cannot_hold_it_says_why(
    alone: OwnCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alone.why_not() == ""
    monkeypatch.setattr(packages, "missing", lambda: ["runc"])
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert alone.why_not() == "install these Debian packages: runc"
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    with pytest.raises(ClusterError, match="needs root; or install kind and Docker"):
        alone.build(())


def test_there_is_none_to_stop(alone: OwnCluster) -> None:
    alone.stop()
    assert not alone.is_up()
    with pytest.raises(ClusterError, match="no cluster is up"):
        alone.command(["true"])


def nodes(cluster: OwnCluster) -> str:
    path = (
        "jsonpath={range .items[*]}{.metadata.name} "
        "{.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"
    )
    command = cluster.command(["kubectl", "get", "nodes", "--output", path])
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def traces(place: Path) -> list[str]:
    """Whatever of this place's clusters is seen on the machine."""
    group = Layout(place / "run").control_group
    found = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{group}")]
    found += [str(pid) for pid in processes(place, "")]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if group in line]
    found += [f"{name}={Path(f'/proc/sys/{name}').read_text()}" for name in SETTINGS]
    found += sorted(os.listdir("/sys/class/net"))
    found += [path.name for path in place.iterdir() if path.suffix != ".lock"]
    return found


SETTINGS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")


def processes(place: Path, word: str) -> list[int]:
    """Numbers of those that name the place, and are not about to be buried."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        is_boot = word in words and words[0] != "unshare"
        if any(str(place) in each for each in words) and (is_boot or not word):
            found.append(int(folder.name))
    return found
