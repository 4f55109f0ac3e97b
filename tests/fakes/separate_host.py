"""A host of its own on this machine: a network namespace, which can vanish without a packet."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = count()


@dataclass(frozen=True)
class SeparateHost:
    name: str
    address: str  # as this host reaches it

    @property
    def command(self) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def vanish(self) -> None:
        """From now on it takes no packet and sends none; its processes go on."""
        for chain in ("INPUT", "OUTPUT"):
            _run(*self.command, "iptables", "-I", chain, "-j", "DROP")

    def return_(self) -> None:
        for chain in ("INPUT", "OUTPUT"):
            _run(*self.command, "iptables", "-D", chain, "-j", "DROP")


def why_not() -> str:
    """Why this machine cannot have one, or nothing."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "iptables"))):
        return "needs root, ip and iptables"
    try:
        with separate_host() as host:
            host.vanish()
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


@contextmanager
def separate_host() -> Iterator[SeparateHost]:
    """Raises CalledProcessError where the kernel or the rights for it are missing."""
    number = next(_NUMBERS)  # of one that was deleted, the device is there for a while
    name, ours = f"octavo-{os.getpid()}-{number}", f"oct{os.getpid()}-{number}"
    network = f"10.{200 + number % 50}.{os.getpid() // 64 % 256}"
    last = os.getpid() % 64 * 4
    here, there = f"{network}.{last + 1}", f"{network}.{last + 2}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "address", "add", f"{here}/30", "dev", ours)
        _run("ip", "link", "set", ours, "up")
        inside = ("ip", "netns", "exec", name, "ip")
        _run(*inside, "address", "add", f"{there}/30", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run(*inside, "link", "set", device, "up")
        yield SeparateHost(name, there)
    finally:
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
