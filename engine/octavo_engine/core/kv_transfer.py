"""From `--kv-transfer-config` to a server of this engine's blocks and a client of others'."""

from __future__ import annotations

import hashlib
import logging
import uuid
from typing import TYPE_CHECKING

from octavo_engine.config import split_address
from octavo_engine.core.kv_peers import PeerEngines
from octavo_engine.errors import ConfigError
from octavo_engine.shared_secret import read_secret
from octavo_engine.state.kv_source import KVSource
from octavo_engine.tiers.block_server import BlockServer
from octavo_engine.tiers.peer_engine import PeerAddress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import KVTransferConfig
    from octavo_engine.core.kv_source import OwnBlocks
    from octavo_engine.core.kv_tiers import KVTiers

logger = logging.getLogger(__name__)


def use_transfer(
    config: KVTransferConfig, tiers: KVTiers, identity: Mapping[str, str], page_bytes: int
) -> KVSource | None:
    """Serve blocks and get them, as the role says. Returns where they are served. Raises
    ConfigError."""
    secret = b""
    if config.secret_file is not None:
        secret = read_secret(config.secret_file, "--kv-transfer-config: secret_file")
    own = server = peers = source = None
    if config.produces:
        own = tiers.own_blocks()
        server = _listen(config, own, identity, page_bytes, secret)
        source = KVSource(config.kv_ip, server.port, config.engine_id or uuid.uuid4().hex)
        logger.info("KV blocks are served on %s", PeerAddress(config.kv_ip, server.port))
    if config.consumes:
        peers = PeerEngines(
            [PeerAddress(*split_address(text)) for text in config.peers],
            identity=identity,
            page_bytes=page_bytes,
            secret=secret,
            woken=tiers.woken,
        )
    tiers.use_peers(peers, own, server)
    return source


def kv_identity(parts: Mapping[str, str], backend: Backend, build_digest: bytes) -> dict[str, str]:
    """By name, a digest of each thing that makes blocks of two engines differ."""
    layout = repr((backend.cache_layout, backend.kv_bytes_per_block))
    own = {"backend": backend.name.encode(), "layout": layout.encode(), "build": build_digest}
    return {**parts, **{name: hashlib.sha256(fact).hexdigest()[:32] for name, fact in own.items()}}


def _listen(
    config: KVTransferConfig,
    own: OwnBlocks,
    identity: Mapping[str, str],
    page_bytes: int,
    secret: bytes,
) -> BlockServer:
    address = PeerAddress(config.kv_ip, config.kv_port)
    try:
        return BlockServer(*address, own, identity=identity, page_bytes=page_bytes, secret=secret)
    except OSError as error:
        raise ConfigError(
            f"--kv-transfer-config: blocks cannot be served on {address}: "
            f"{error.strerror or error}; set kv_ip and kv_port"
        ) from None
