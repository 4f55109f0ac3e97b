"""KV blocks in an LMCache server: a connector for Octavo in one file, without further packages.

Start LMCache's server, then an engine that saves what it computes there, and another one that finds
it:

    python -m lmcache.v1.server 127.0.0.1 65432
    PYTHONPATH=examples/kv_connector octavo serve demo://smollm2 --kv-transfer-config \
      '{"kv_connector": "lmcache_connector:LMCacheConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"remote_url": "lm://127.0.0.1:65432"}}'

The server keeps all it gets in its memory until it ends.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo_engine.tiers.connector import KVConnectorBase_V1, KVConnectorMetadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.tiers.connector import (
        ConnectorBlock,
        ConnectorBlocks,
        ConnectorConfig,
        ConnectorRequest,
        ForwardContext,
        KVCacheConfig,
        KVCaches,
        KVConnectorRole,
        SchedulerOutput,
    )

PUT, GET, EXIST = 1, 2, 3  # commands
SUCCESS = 200
BINARY, UINT8 = 4, 6  # format and type of what is stored
CALL = struct.Struct("9i150s")  # command, length, format, type, location, shape, key
REPLY = struct.Struct("9i")  # code, length, format, type, shape, location
TIMEOUT_S = 5.0


class LMCacheClient:
    """One connection. Raises OSError."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        if address.scheme != "lm" or address.hostname is None or address.port is None:
            raise ValueError(f"remote_url must be lm://HOST:PORT, not {url!r}")
        self._address = (address.hostname, address.port)
        self._socket: socket.socket | None = None

    def exists(self, block_hash: bytes) -> bool:
        return self._ask(EXIST, block_hash)[0] == SUCCESS

    def put(self, block_hash: bytes, row: NDArray[np.uint8]) -> None:
        self._send(PUT, block_hash, row.nbytes)
        self._connected().sendall(row.data)

    def get(self, block_hash: bytes, row: NDArray[np.uint8]) -> bool:
        """Whether the row was filled."""
        code, length, *_ = self._ask(GET, block_hash)
        if code != SUCCESS:
            return False
        if length != row.nbytes:
            self.close()  # its bytes are on their way
            return False
        self._receive(memoryview(row.data))
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, command: int, block_hash: bytes) -> tuple[int, ...]:
        self._send(command, block_hash, 0)
        reply = bytearray(REPLY.size)
        self._receive(memoryview(reply))
        return REPLY.unpack(reply)

    def _send(self, command: int, block_hash: bytes, length: int) -> None:
        key = f"octavo@1@0@{block_hash.hex()}@uint8".encode().ljust(150)
        self._connected().sendall(
            CALL.pack(command, length, BINARY, UINT8, 0, length, 0, 0, 0, key)
        )

    def _receive(self, target: memoryview) -> None:
        connection = self._connected()
        while target:
            count = connection.recv_into(target)
            if count == 0:
                self.close()
                raise ConnectionError("LMCache's server closed the connection")
            target = target[count:]

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket


class Transfer(KVConnectorMetadata):
    def __init__(self, loads: list[ConnectorBlock], saves: list[ConnectorBlock]) -> None:
        self.loads, self.saves = loads, saves


class LMCacheConnector(KVConnectorBase_V1):
    """Each block is one entry of the server, under its hash."""

    def __init__(
        self, vllm_config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        url = self._kv_transfer_config.get_from_extra_config("remote_url", "")
        self._client = LMCacheClient(url)
        self._loads: list[ConnectorBlock] = []
        self._failed: set[int] = set()
        self._rows: NDArray[np.uint8] | None = None

    # The half that decides.

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        size = self._kv_cache_config.block_size
        first = num_computed_tokens // size
        end = first
        while end < len(request.block_hashes) and self._exists(request.block_hashes[end]):
            end += 1
        return (end - first) * size, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: ConnectorBlocks, num_external_tokens: int
    ) -> None:
        self._loads = blocks.blocks

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return Transfer(loads, scheduler_output.saved_blocks)

    def _exists(self, block_hash: bytes) -> bool:
        try:
            return self._client.exists(block_hash)
        except OSError:
            self._client.close()
            raise

    # The half that moves bytes.

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        (self._rows,) = kv_caches.values()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata, rows = self._get_connector_metadata(), self._rows
        assert isinstance(metadata, Transfer) and rows is not None
        self._failed = set()
        for block in metadata.loads:
            try:
                is_there = self._client.get(block.block_hash, rows[block.block_id])
            except OSError:
                self._client.close()
                raise
            if not is_there:
                self._failed.add(block.block_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All of it is loaded by then."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: NDArray[np.uint8], attn_metadata: None, **kwargs: Any
    ) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Transfer)
        try:
            for block in metadata.saves:
                self._client.put(block.block_hash, kv_layer[block.block_id])
        except OSError:
            self._client.close()
            raise

    def wait_for_save(self) -> None:
        """All of it is sent by then."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed

    def shutdown(self) -> None:
        self._client.close()
