"""Hosts of their own on this machine, with a network between them that takes its time and loses
packets: network namespaces whose devices end in this process, which passes packets on.

Kernels without netem have it so, too. What is lost is whole packets, so TCP is the system's own.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING

from tests.fakes.separate_host import SeparateHost

if TYPE_CHECKING:
    from collections.abc import Iterator

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_MAX_PACKET = 1 << 16
_LOOK_S = 0.1  # so often it looks whether it is closed
_NETWORK = "10.99.0"  # its addresses are known inside the namespaces only
_NUMBERS = count()


class SlowNetwork:
    """Passes on IPv4 packets between devices, each `delay_s` later, but for a share of them that
    is lost. `num_lost` and `num_passed` count them."""

    def __init__(self, delay_s: float, loss: float, seed: int = 1) -> None:
        self.num_lost = self.num_passed = 0
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(seed)
        self._devices: dict[bytes, int] = {}  # by address
        self._queue: deque[tuple[float, int, bytes]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="slow-network", daemon=True)

    def add(self, name: str, address: str) -> None:
        """A device of that name, in this namespace until it is moved."""
        device = os.open(_TUN, os.O_RDWR)
        self._devices[socket.inet_aton(address)] = device
        request = struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)

    def start(self) -> None:
        """All devices are there."""
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join()
        for device in self._devices.values():
            os.close(device)

    def _run(self) -> None:
        while not self._is_closed:
            wait_s = self._queue[0][0] - time.monotonic() if self._queue else _LOOK_S
            ready, _, _ = select.select([*self._devices.values()], [], [], max(0.0, wait_s))
            for device in ready:
                self._take(os.read(device, _MAX_PACKET))
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, device, packet = self._queue.popleft()
                os.write(device, packet)

    def _take(self, packet: bytes) -> None:
        device = self._devices.get(packet[16:20])
        if packet[0] >> 4 != 4 or device is None:
            return
        if self._random.random() < self._loss:
            self.num_lost += 1
            return
        self.num_passed += 1
        self._queue.append((time.monotonic() + self._delay_s, device, packet))


def why_not() -> str:
    """Why this machine cannot have one, or nothing."""
    if os.geteuid() != 0 or not shutil.which("ip") or not os.path.exists(_TUN):
        return "needs root, ip and /dev/net/tun"
    try:
        with slow_hosts(1, delay_s=0.0, loss=0.0):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    except OSError as error:
        return f"{_TUN}: {error.strerror}"


@contextmanager
def slow_hosts(
    num_hosts: int, *, delay_s: float, loss: float
) -> Iterator[tuple[SlowNetwork, list[SeparateHost]]]:
    """Hosts that reach each other, and nothing else, over such a network."""
    hosts: list[SeparateHost] = []
    with ExitStack() as ends:
        network = SlowNetwork(delay_s, loss)
        for index in range(num_hosts):
            number = next(_NUMBERS)
            host = SeparateHost(f"octavo-slow-{os.getpid()}-{number}", f"{_NETWORK}.{index + 1}")
            device = f"ost{os.getpid()}-{number}"
            network.add(device, host.address)
            _run("ip", "netns", "add", host.name)
            ends.callback(_run, "ip", "netns", "delete", host.name)
            _run("ip", "link", "set", device, "netns", host.name)
            inside = ("ip", "-n", host.name)
            _run(*inside, "address", "add", f"{host.address}/24", "dev", device)
            for name in ("lo", device):
                _run(*inside, "link", "set", name, "up")
            hosts.append(host)
        network.start()
        ends.callback(network.close)
        yield network, hosts


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
