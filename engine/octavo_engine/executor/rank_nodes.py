"""Ranks on other hosts: they connect to rank 0, prove that they have the secret, and then look as
if they were here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError
from octavo_engine.executor.node_bridge import BridgeFiles, NodeBridge
from octavo_engine.executor.node_wire import NodeChannel, NodeError, admit
from octavo_engine.executor.rank_processes import RankProcesses
from octavo_engine.shared_secret import read_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)
MAX_HANDSHAKES = 32  # at a time
ACCEPT_S = 0.1  # how soon it is seen that no node is missing any more


def node_secret(config: EngineConfig) -> bytes:
    """What all hosts of the engine share. Raises ConfigError."""
    assert config.node_key_file is not None, "several nodes have one"
    return read_secret(config.node_key_file, "--node-key-file")


def model_digest(config_json: Mapping[str, Any]) -> str:
    """By which hosts see that they have the same model."""
    return hashlib.sha256(json.dumps(config_json, sort_keys=True).encode()).hexdigest()


class _NodeAdmission:
    """The handshakes of an engine that waits for its nodes: each in a thread of its own, so that
    what connects and says nothing holds up no node."""

    def __init__(self, secret: bytes, digest: str, size: int) -> None:
        self._secret, self._digest = secret, digest
        self._lock = threading.Lock()  # guards the other three
        self._missing = set(range(1, size))
        self._found: dict[int, tuple[NodeChannel, str]] = {}
        self._begun: set[NodeChannel] = set()

    def wait(
        self, listener: socket.socket, check: Callable[[], None]
    ) -> dict[int, tuple[NodeChannel, str]]:
        """The connection and the host of each rank, once all are there. `check` is called now and
        then, and raises where one will never be."""
        logger.info("Waiting for ranks %s", sorted(self._missing))
        listener.settimeout(ACCEPT_S)
        with ThreadPoolExecutor(MAX_HANDSHAKES, "octavo-handshake") as threads:
            try:
                while self._missing:
                    check()
                    with contextlib.suppress(TimeoutError):
                        connection, (host, *_) = listener.accept()
                        channel = NodeChannel(connection)
                        with self._lock:
                            self._begun.add(channel)
                        threads.submit(self._admit, channel, host)
            except BaseException:
                for channel, _ in self._found.values():
                    channel.close()
                raise
            finally:
                with self._lock:
                    for channel in self._begun:
                        channel.shut()
        return self._found

    def _admit(self, channel: NodeChannel, host: str) -> None:
        try:
            rank = admit(channel, self._secret, self._digest, self._missing)
            with self._lock:
                if rank not in self._missing:  # two of one rank at the same time
                    raise NodeError(f"no node of rank {rank} is missing")
                self._begun.remove(channel)
                self._missing.remove(rank)
                self._found[rank] = channel, host
                logger.info("Rank %d is %s; missing: %s", rank, host, sorted(self._missing))
        except (NodeError, OSError) as error:
            logger.warning("Turned %s away: %s", host, error)
            with self._lock:
                self._begun.remove(channel)
            channel.close()


class RankNode:
    """A rank on another host, behind a bridge."""

    def __init__(self, bridge: NodeBridge, host: str) -> None:
        self._bridge, self.host = bridge, host

    def kill(self) -> None:
        self._bridge.close("it was cut off")

    def end(self) -> None:
        self._bridge.close()
        self._bridge.join()

    def ending(self) -> str:
        return f"is lost: {self._bridge.why}"


class RankNodes(RankProcesses):
    """Ranks 1 to nnodes - 1, a host for each."""

    def __init__(
        self,
        config: EngineConfig,
        patience_s: float,
        files: ModelFiles,
        secret: bytes | None = None,
    ) -> None:
        self._secret = secret or node_secret(config)
        self._digest = model_digest(files.config)
        super().__init__(config, patience_s)

    def _start(self, command: Sequence[str]) -> None:
        """Wait for all nodes. What connects and is none is turned away."""
        with self._listen() as listener:
            admission = _NodeAdmission(self._secret, self._digest, self.size)
            found = admission.wait(listener, self._check_missing)
        for rank in range(1, self.size):
            channel, host = found[rank]
            ours, theirs = socket.socketpair()
            place = BridgeFiles(self.ring_file, (rank, self.size), self.row_files)
            end = Connection(theirs.detach())
            bridge = NodeBridge(channel, end, place, rank, self.size, is_leader=True)
            self.processes.append(RankNode(bridge, host))
            self._connections.append(Connection(ours.detach()))

    def _listen(self) -> socket.socket:
        return _listen(self.config)

    def _check_missing(self) -> None:
        """Raises where a node that is not there will never be: of ours, any may still come."""


def _listen(config: EngineConfig) -> socket.socket:
    address = (config.master_addr, config.master_port)
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            f"--master-addr {address[0]}, --master-port {address[1]}: cannot listen there: "
            f"{error.strerror or error}"
        ) from None
