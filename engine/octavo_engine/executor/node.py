"""A host that computes one stage for an engine elsewhere: `octavo serve --node-rank 1`.

It serves no requests. It connects to the leader, has a rank's process compute, and when the leader
is lost it waits for the next one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError
from octavo_engine.executor import messages
from octavo_engine.executor.node_bridge import BridgeFiles, NodeBridge
from octavo_engine.executor.node_wire import NodeChannel, NodeError, NodeRefused, join
from octavo_engine.executor.rank_nodes import model_digest, node_secret
from octavo_engine.executor.rank_processes import WORKER_COMMAND, SharedFiles, spawn

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)

RETRY_S = 1.0


def run_node(config: EngineConfig, files: ModelFiles) -> None:
    """For one leader after another, until the process is ended. Raises ConfigError where the leader
    will not have this node."""
    secret, digest = node_secret(config), model_digest(files.config)
    is_waiting = False
    while True:
        try:
            channel = _connect(config)
            try:
                join(channel, secret, digest, config.node_rank)
            except NodeError:
                channel.close()
                raise
        except NodeRefused as error:
            if "is missing" not in str(error):  # else one that was cut off is not given up yet
                raise ConfigError(f"the leader refused this node: {error}") from None
            time.sleep(RETRY_S)
            continue
        except (OSError, NodeError) as error:
            if not is_waiting:
                where = f"{config.master_addr}:{config.master_port}"
                logger.info("Waiting for the leader at %s: %s", where, error)
            is_waiting = True
            time.sleep(RETRY_S)
            continue
        is_waiting = False
        logger.info("Computing for the leader as rank %d of %d", config.node_rank, config.nnodes)
        serve_leader(config, files, channel)


def compute_for_leader(config: EngineConfig, files: ModelFiles, secret: bytes) -> None:
    """For one leader, which waits already. Raises ConfigError where it will not have this node, and
    OSError or NodeError where it is gone."""
    channel = _connect(config)
    try:
        join(channel, secret, model_digest(files.config), config.node_rank)
    except NodeRefused as error:
        channel.close()
        raise ConfigError(f"rank {config.node_rank} was refused: {error}") from None
    except NodeError:
        channel.close()
        raise
    serve_leader(config, files, channel)


def serve_leader(config: EngineConfig, files: ModelFiles, channel: NodeChannel) -> None:
    """Until one of both ends."""
    own_path = str(files.path.absolute())

    def change(message: messages.ToWorker) -> messages.ToWorker:
        """The leader's settings, over what is this host's own."""
        if not isinstance(message, messages.StartWorker):
            return message
        settings = message.config.replace(
            model=own_path,
            revision=None,
            num_threads=config.num_threads,
            node_key_file=config.node_key_file,
        )
        return messages.StartWorker(
            settings,
            config.node_rank,
            config.nnodes,
            (1, 2),
            message.patience_s,
            message.log_level,
            message.log_format,
        )

    opened = [os.memfd_create("octavo-node") for _ in range(1 + config.nnodes)]
    shared = SharedFiles(opened[0], opened[1], opened[2:])
    try:
        process, connection = spawn(WORKER_COMMAND, shared)
        bridge = NodeBridge(
            channel,
            connection,
            BridgeFiles(shared.ring, (0, 2), shared.rows),
            config.node_rank,
            config.nnodes,
            is_leader=False,
            change=change,
        )
        try:
            bridge.closed.wait()
            logger.warning("The leader is lost: %s", bridge.why)
        finally:
            bridge.close()
            bridge.join()
            process.end()
    finally:
        for file in opened:
            os.close(file)


def _connect(config: EngineConfig) -> NodeChannel:
    connection = socket.create_connection((config.master_addr, config.master_port), timeout=5.0)
    return NodeChannel(connection)
