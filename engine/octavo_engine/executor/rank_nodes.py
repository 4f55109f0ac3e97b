"""Ranks on other hosts: they connect to rank 0, prove that they have the secret, and then look as
if they were here."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError
from octavo_engine.executor.node_bridge import BridgeFiles, NodeBridge
from octavo_engine.executor.node_wire import NodeChannel, NodeError, admit
from octavo_engine.executor.rank_processes import RankProcesses
from octavo_engine.shared_secret import read_secret

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)


def node_secret(config: EngineConfig) -> bytes:
    """What all hosts of the engine share. Raises ConfigError."""
    assert config.node_key_file is not None, "several nodes have one"
    return read_secret(config.node_key_file, "--node-key-file")


def model_digest(config_json: Mapping[str, Any]) -> str:
    """By which hosts see that they have the same model."""
    return hashlib.sha256(json.dumps(config_json, sort_keys=True).encode()).hexdigest()


class RankNode:
    """A rank on another host, behind a bridge."""

    def __init__(self, bridge: NodeBridge, host: str) -> None:
        self._bridge, self._host = bridge, host

    def kill(self) -> None:
        self._bridge.close("it was cut off")

    def end(self) -> None:
        self._bridge.close()
        self._bridge.join()

    def ending(self) -> str:
        return f"on {self._host} is lost: {self._bridge.why}"


class RankNodes(RankProcesses):
    """Ranks 1 to nnodes - 1, a host for each."""

    def __init__(self, config: EngineConfig, patience_s: float, files: ModelFiles) -> None:
        self._secret = node_secret(config)
        self._digest = model_digest(files.config)
        super().__init__(config, patience_s)

    def _start(self, command: Sequence[str]) -> None:
        """Wait for all nodes. What connects and is none is turned away."""
        config = self.config
        found: dict[int, tuple[NodeChannel, str]] = {}
        try:
            with _listen(config) as listener:
                while missing := set(range(1, self.size)) - found.keys():
                    logger.info("Waiting for nodes %s of %d", sorted(missing), self.size)
                    connection, (host, *_) = listener.accept()
                    channel = NodeChannel(connection)
                    try:
                        rank = admit(channel, self._secret, self._digest, missing)
                    except NodeError as error:
                        logger.warning("Turned %s away: %s", host, error)
                        channel.close()
                        continue
                    found[rank] = channel, host
        except BaseException:
            for channel, _ in found.values():
                channel.close()
            raise
        for rank in range(1, self.size):
            channel, host = found[rank]
            ours, theirs = socket.socketpair()
            place = BridgeFiles(self.ring_file, (rank, self.size), self.row_files)
            end = Connection(theirs.detach())
            bridge = NodeBridge(channel, end, place, rank, self.size, is_leader=True)
            self.processes.append(RankNode(bridge, host))
            self._connections.append(Connection(ours.detach()))


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
