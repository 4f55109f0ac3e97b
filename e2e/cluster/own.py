"""Our own cluster, from outside: starts its namespaces, finds them again, and ends them.

All its processes live in one pid namespace: when the first of them dies, the kernel ends the
others, and with the last goes every mount and address. What lives elsewhere are its control groups
and the folder of this run, which `stop` removes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from e2e.cluster import cache, control_groups, images, node_program, packages, pause
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import NODE_ADDRESS, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_CLONE_NEWNET = 0x40000000
_NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


@dataclass(frozen=True, slots=True)
class _Running:
    """The first process of the cluster's namespaces, as this machine numbers it."""

    pid: int
    started: str  # in clock ticks since boot: a number that is used again starts at another time


class OwnCluster:
    """See choose.Cluster."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: the folder of its runs; two clusters at once need two."""
        self._layout = Layout(root or cache.folder() / "run")
        self._parent: subprocess.Popen[bytes] | None = None  # where this process started it

    @property
    def kubeconfig(self) -> Path:
        return self._layout.kubeconfig

    @property
    def node_address(self) -> str:
        return NODE_ADDRESS

    def why_not(self) -> str:
        if os.geteuid() != 0:
            return "our own cluster needs root; or install kind and Docker"
        allowed = subprocess.run(
            [*_NAMESPACES, "true"], capture_output=True, text=True, check=False
        )
        if allowed.returncode:
            return f"no namespaces may be made here ({allowed.stderr.strip()}); run it as real root"
        return node_program.why_not() or packages.why_not() or control_groups.why_not()

    def build(self, names: Iterable[str]) -> None:
        if reason := self.why_not():
            raise ClusterError(reason)
        packages.install_missing()
        node_program.built()
        pause.archive()
        images.build(names)

    def archives(self, names: Iterable[str]) -> list[Path]:
        return images.build(names)

    def start(self) -> None:
        self.build(())
        lock = self._lock()
        self._clear()  # of a run that was killed
        programs = node_program.built()
        self._layout.make(programs)
        control_groups.create(self._layout.control_group)
        boot = ["-m", "e2e.cluster.boot", str(self._layout.root), str(pause.archive())]
        with self._layout.log("boot").open("w") as log:
            parent = subprocess.Popen(
                [*_NAMESPACES, sys.executable, *boot],
                cwd=cache.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock.fileno()],  # it is held for as long as the cluster lives
            )
        try:
            self._await_ready(parent)
        except BaseException:
            self._end(parent.pid)
            parent.wait()
            self._clear()
            raise
        finally:
            lock.close()
        self._parent = parent

    def stop(self) -> None:
        running = self._running()
        if running is not None:
            descriptor = os.pidfd_open(running.pid)
            if _started(running.pid) != running.started:
                raise ClusterError(f"process {running.pid} is not the cluster any more")
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            if not select.select([descriptor], [], [], STOP_TIMEOUT_S)[0]:
                raise ClusterError(f"process {running.pid} did not end")
            os.close(descriptor)
        if self._parent is not None:
            self._parent.wait(STOP_TIMEOUT_S)
        with self._lock(wait_s=STOP_TIMEOUT_S):
            self._clear()

    def is_up(self) -> bool:
        return self._running() is not None

    def load(self, names: Iterable[str]) -> None:
        for archive in images.build(names):
            loaded = self._layout.loaded / archive.name  # whose name is its content
            if not loaded.exists():
                self._ctr("images", "import", str(archive))
                loaded.touch()

    def kill(self, container: str) -> None:
        self._ctr("tasks", "kill", "--signal=SIGKILL", "--all", container)

    def _ctr(self, *words: str) -> None:
        socket = str(self._layout.containerd_socket)
        command = ["ctr", "--address", socket, "--namespace", "k8s.io", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed: {done.stderr[-1000:]}")

    def command(self, words: Sequence[str]) -> list[str]:
        environment = [
            f"KUBECONFIG={self.kubeconfig}",
            f"PATH={self._layout.bin}:{os.environ['PATH']}",
        ]
        network = f"--net=/proc/{self._up().pid}/ns/net"
        return ["nsenter", network, "--", "env", *environment, *words]

    def enter(self) -> None:
        with Path(f"/proc/{self._up().pid}/ns/net").open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                raise ClusterError(f"setns: {os.strerror(ctypes.get_errno())}")

    def _up(self) -> _Running:
        running = self._running()
        if running is None:
            raise ClusterError("no cluster is up: python -m e2e.cluster up")
        return running

    def _lock(self, *, wait_s: float = 0.0) -> TextIO:
        """Held: no other cluster can be. Raises ClusterError where one is up."""
        lock = self._layout.lock.open("w")
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    raise ClusterError(
                        "a cluster is up already, or starts just now: python -m e2e.cluster down"
                    ) from None
                time.sleep(0.05)
            else:
                return lock

    def _running(self) -> _Running | None:
        try:
            running = _Running(**json.loads(self._layout.state.read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return running if _started(running.pid) == running.started else None

    def _await_ready(self, parent: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._layout.ready.exists():
            if not self._layout.state.exists() and (first := _child(parent.pid)):
                running = _Running(first, _started(first))
                self._layout.state.write_text(json.dumps(asdict(running)))
            if parent.poll() is not None:
                raise ClusterError(f"it ended as it started:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"it is not ready after {START_TIMEOUT_S:.0f} s:\n{self._last_words()}"
                )
            time.sleep(0.05)

    def _last_words(self) -> str:
        said = self._layout.log("boot").read_text()[-3000:]
        kept = self._layout.failed
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self._layout.logs, kept)
        return f"{said}\nAll logs are in {kept}"

    def _end(self, parent: int) -> None:
        if first := _child(parent):
            os.kill(first, signal.SIGKILL)

    def _clear(self) -> None:
        control_groups.remove(self._layout.control_group)
        shutil.rmtree(self._layout.root, ignore_errors=True)
        if self._layout.root.exists():
            raise ClusterError(f"{self._layout.root} cannot be removed")


def _child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def _started(pid: int) -> str:
    """'' where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
