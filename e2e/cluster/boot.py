"""The first process of the cluster's namespaces: makes its network, starts the node, and stays.

When a part of the node dies, this process ends, and the kernel ends all others with it.
"""

from __future__ import annotations

import os
import secrets
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster import components, dns
from e2e.cluster.layout import NODE_ADDRESS, NODE_NAME, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 90.0
# The kubelet sets these for the whole machine; it shall write into files that only it sees.
TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


class Boot:
    """From empty namespaces to a ready node."""

    def __init__(self, layout: Layout, pause: Path) -> None:
        self._layout = layout
        self._pause = pause
        self._names: dict[int, str] = {}  # of the node's processes, by number
        self._environment = {
            **os.environ,
            "PATH": f"{layout.bin}:{os.environ['PATH']}",
            "KUBECONFIG": str(layout.kubeconfig),
        }

    def run(self) -> None:
        began_at = time.monotonic()
        self._make_private()
        self._make_network()
        self._write_files()
        self._start("containerd", components.containerd(self._layout))
        importing = threading.Thread(target=self._import_pause)
        importing.start()
        for name, arguments in components.control_plane(self._layout).items():
            self._start(name, [name, *arguments])
            if name == "kube-apiserver":
                self._wait_for("the API server", self._api_answers)
        importing.join()
        for name, arguments in components.node(self._layout).items():
            self._start(name, [name, *arguments])
        self._start("policies", [sys.executable, "-m", "e2e.cluster.policies"])
        self._kubectl("apply", "--server-side", "-f", "-", text=dns.manifest(self._layout))
        self._wait_for("the node", self._is_node_ready)
        self._wait_for("the default ServiceAccount", self._has_service_account)
        self._wait_for("DNS", self._is_dns_ready)
        print(f"Ready after {time.monotonic() - began_at:.1f} s", flush=True)
        self._layout.ready.touch()

    def stay(self) -> str:
        """Buries the dead, and returns the name of the first of the node's own among them."""
        while True:
            pid, status = os.wait()
            if pid in self._names:
                return f"{self._names[pid]} ended with {os.waitstatus_to_exitcode(status)}"

    def _make_private(self) -> None:
        """What is written to the machine's folders stays in this run's."""
        upper, work = self._layout.root / "var", self._layout.root / "var.work"
        for folder in (upper, work):
            folder.mkdir()
        options = f"lowerdir=/var,upperdir={upper},workdir={work}"
        self._do("mount", "-t", "overlay", "overlay", "-o", options, "/var")
        self._do("mount", "-t", "tmpfs", "tmpfs", "/run")
        for name, value in TUNABLES.items():
            own = self._layout.root / "sysctl" / name
            own.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(f"{value}\n")
            self._do("mount", "--bind", str(own), f"/proc/sys/{name}")

    def _make_network(self) -> None:
        self._do("ip", "link", "set", "lo", "up")
        self._do("ip", "link", "add", "node0", "type", "bridge")
        self._do("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "node0")
        self._do("ip", "link", "set", "node0", "up")
        # There is no way out; but kubelet and API server take their address from this route.
        self._do("ip", "route", "add", "default", "via", f"{NODE_ADDRESS[:-2]}1", "dev", "node0")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
        if bridged.exists():  # else traffic between two pods of a node meets no rules
            bridged.write_text("1")

    def _write_files(self) -> None:
        for name, text in components.files(self._layout, secrets.token_hex(16)).items():
            (self._layout.root / name).write_text(text)
        key, public = str(self._layout.pki / "sa.key"), str(self._layout.pki / "sa.pub")
        self._do("openssl", "genrsa", "-out", key, "2048")
        self._do("openssl", "rsa", "-in", key, "-pubout", "-out", public)

    def _import_pause(self) -> None:
        socket = self._layout.containerd_socket
        self._wait_for("containerd", socket.exists)
        command = ["ctr", "--address", str(socket), "--namespace", "k8s.io", "images", "import"]
        self._do(*command, str(self._pause))

    def _start(self, name: str, command: list[str]) -> None:
        with self._layout.log(name).open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        self._names[process.pid] = name

    def _do(self, *command: str) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=self._environment)

    def _kubectl(self, *arguments: str, text: str | None = None) -> str:
        done = subprocess.run(
            ["kubectl", *arguments],
            input=text,
            capture_output=True,
            text=True,
            env=self._environment,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def _wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come up in {WAIT_S:.0f} s")
            time.sleep(0.1)

    def _api_answers(self) -> bool:
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        token = (self._layout.root / "tokens.csv").read_text().partition(",")[0]
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{components.API}/readyz", headers=headers)
        try:
            return bool(urllib.request.urlopen(request, timeout=5, context=unchecked))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _is_node_ready(self) -> bool:
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self._kubectl("get", "node", NODE_NAME, "-o", path) == "True"

    def _has_service_account(self) -> bool:
        return bool(self._kubectl("get", "serviceaccount", "default", "-o", "name"))

    def _is_dns_ready(self) -> bool:
        path = "jsonpath={.status.readyReplicas}"
        return self._kubectl("-n", "kube-system", "get", "deployment", "coredns", "-o", path) == "1"


def main(root: str, pause: str) -> int:
    boot = Boot(Layout(Path(root)), Path(pause))
    boot.run()
    print(boot.stay(), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
