"""llama.cpp over several processes: RPC servers with some of its layers and of the cores each.

    python -m benchmarks.peers.llama_rpc PEERS COUNT ARGUMENT...

becomes llama-server with these arguments; the RPC servers are its children.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.servers import free_port

READY_WITHIN_S: Final = 60.0


def main() -> None:
    folder, count = Path(sys.argv[1]) / "llamaserver" / "bin", int(sys.argv[2])
    cores = sorted(os.sched_getaffinity(0))
    addresses = [
        _start(folder / "ggml-rpc-server", cores[rank::count] or cores) for rank in range(count)
    ]
    server = str(folder / "llama-server")
    # All layers are on the servers: what is left here is tokens.
    os.execv(server, [server, *sys.argv[3:], "--rpc", ",".join(addresses), "-ngl", "999"])


def _start(program: Path, cores: list[int]) -> str:
    """Its address, once it listens."""
    port = free_port()
    process = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port), "-t", str(len(cores))],
        stdout=subprocess.DEVNULL,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )
    ends_at = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < ends_at and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"127.0.0.1:{port}"
        time.sleep(0.1)
    sys.exit(f"{program} does not listen at port {port}")


if __name__ == "__main__":
    main()
