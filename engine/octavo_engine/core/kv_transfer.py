"""From `--kv-transfer-config` to a server of this engine's blocks and a client of others', or to a
connector of another package."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import uuid
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from octavo_engine.config import split_address
from octavo_engine.core.kv_peers import PeerEngines
from octavo_engine.errors import ConfigError
from octavo_engine.shared_secret import read_secret
from octavo_engine.state.kv_source import KVSource
from octavo_engine.tiers.block_server import BlockServer
from octavo_engine.tiers.connector import ConnectorConfig, KVConnectorBase_V1, KVTransferSettings
from octavo_engine.tiers.connector_blocks import ConnectorStore
from octavo_engine.tiers.page import PageSizes
from octavo_engine.tiers.peer_engine import PeerAddress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import KVTransferConfig
    from octavo_engine.core.kv_source import OwnBlocks
    from octavo_engine.core.kv_tiers import KVTiers

logger = logging.getLogger(__name__)

GROUP = "octavo.kv_connectors"  # the entry point's name is the connector's, its object the class


def use_transfer(
    config: KVTransferConfig, tiers: KVTiers, identity: Mapping[str, str], sizes: PageSizes
) -> KVSource | None:
    """Serve blocks and get them, as the role says. Returns where they are served. Raises
    ConfigError."""
    secret = b""
    if config.secret_file is not None:
        secret = read_secret(config.secret_file, "--kv-transfer-config: secret_file")
    own = server = peers = source = None
    if config.produces:
        own = tiers.own_blocks()
        server = _listen(config, own, identity, sizes, secret)
        source = KVSource(config.kv_ip, server.port, config.engine_id or uuid.uuid4().hex)
        logger.info("KV blocks are served on %s", PeerAddress(config.kv_ip, server.port))
    if config.consumes:
        peers = PeerEngines(
            [PeerAddress(*split_address(text)) for text in config.peers],
            identity=identity,
            sizes=sizes,
            secret=secret,
            woken=tiers.woken,
        )
    tiers.use_peers(peers, own, server)
    return source


def use_connector(
    config: KVTransferConfig, tiers: KVTiers, *, key: bytes, page_bytes: int, model: str
) -> None:
    """Give blocks to a connector of another package and get them, as the role says. `key`
    separates engines whose blocks differ. Raises ConfigError."""
    kind = _find_connector(config.kv_connector)
    settings = KVTransferSettings(
        config.kv_connector,
        config.kv_role,
        config.engine_id or uuid.uuid4().hex,
        config.extra_config,
    )
    try:
        store = ConnectorStore(
            kind, ConnectorConfig(settings, model), key=key, page_bytes=page_bytes
        )
    except Exception as error:  # the connector's own code: anything may happen
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"--kv-transfer-config: the connector {config.kv_connector} cannot be used: {text}"
        ) from error
    peers = None
    if config.consumes:
        peers = PeerEngines(
            [], identity={}, sizes=PageSizes(page_bytes), woken=tiers.woken, connector=store
        )
    tiers.use_connector(store, peers)
    logger.info("KV blocks go through the connector %s", config.kv_connector)


def _find_connector(name: str) -> type[KVConnectorBase_V1]:
    """By MODULE:CLASS, or the name of an entry point. Raises ConfigError."""
    flag = "--kv-transfer-config: kv_connector"
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            found = getattr(importlib.import_module(module), attribute)
        else:
            installed = {point.name: point for point in entry_points(group=GROUP)}
            if name not in installed:
                known = ", ".join(["OctavoConnector", *sorted(installed)])
                raise ConfigError(
                    f"{flag} {name} is not installed; there are: {known}, and any class as "
                    "MODULE:CLASS"
                )
            found = installed[name].load()
    except ConfigError:
        raise
    except Exception as error:  # the package's own code: it may raise anything
        raise ConfigError(
            f"{flag} {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not inspect.isclass(found) or not issubclass(found, KVConnectorBase_V1):
        base = f"{KVConnectorBase_V1.__module__}.{KVConnectorBase_V1.__name__}"
        raise ConfigError(f"{flag} {name} must be a subclass of {base}")
    if abstract := sorted(found.__abstractmethods__):
        raise ConfigError(f"{flag} {name} lacks the methods {', '.join(abstract)}")
    return found


def kv_identity(parts: Mapping[str, str], backend: Backend, build_digest: bytes) -> dict[str, str]:
    """By name, a digest of each thing that makes blocks of two engines differ."""
    layout = repr((backend.cache_layout, backend.kv_bytes_per_block))
    own = {"backend": backend.name.encode(), "layout": layout.encode(), "build": build_digest}
    return {**parts, **{name: hashlib.sha256(fact).hexdigest()[:32] for name, fact in own.items()}}


def _listen(
    config: KVTransferConfig,
    own: OwnBlocks,
    identity: Mapping[str, str],
    sizes: PageSizes,
    secret: bytes,
) -> BlockServer:
    address = PeerAddress(config.kv_ip, config.kv_port)
    try:
        return BlockServer(*address, own, identity=identity, sizes=sizes, secret=secret)
    except OSError as error:
        raise ConfigError(
            f"--kv-transfer-config: blocks cannot be served on {address}: "
            f"{error.strerror or error}; set kv_ip and kv_port"
        ) from None
