"""What a connector of another package is: a place for KV blocks, under vLLM's method names.

A connector has two halves of one class, as in vLLM's KVConnectorBase_V1: one decides (role
SCHEDULER) and one moves bytes (role WORKER). Both live in the engine's process, and one thread
calls both of them, so neither has to lock anything and neither ever holds up a step.

What differs from vLLM: the worker half sees rows of a buffer in host memory instead of the paged
cache, each a whole block of one group of layers with all its layers. Blocks are named by
`block_hash`, which covers the tokens before them, the weights, the settings and the build, an
adapter, media and the cache salt; so a connector needs no tokens to find them, and blocks of
engines that differ never meet. A row ends in a checksum: bytes that are not those which were saved
under that name are computed again, whatever a connector says of them.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    KVCaches = dict[str, "NDArray[np.uint8]"]

KV_LAYER = "kv"  # the one layer of the buffer: its rows hold all layers of the model


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the deciding half hands to the other one for one load or save; subclass it."""


class KVTransferSettings(NamedTuple):
    """`--kv-transfer-config`, as it was given."""

    kv_connector: str
    kv_role: str
    engine_id: str
    kv_connector_extra_config: Mapping[str, Any]

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role != "kv_producer"

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)


class ConnectorConfig(NamedTuple):
    """In the place of vLLM's `vllm_config`."""

    kv_transfer_config: KVTransferSettings
    model: str


class KVCacheConfig(NamedTuple):
    """The buffer's rows. `page_size_bytes` is the length of a row, its checksum included."""

    num_blocks: int
    page_size_bytes: int
    block_size: int  # tokens of a block


class ConnectorRequest(NamedTuple):
    """A request whose blocks are looked for."""

    request_id: str
    all_token_ids: list[int]
    block_hashes: list[bytes]  # of its full blocks, in the first group of layers

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class ConnectorBlock(NamedTuple):
    block_hash: bytes
    block_id: int  # a row of the buffer


class ConnectorBlocks(NamedTuple):
    """Rows that are to be filled."""

    blocks: list[ConnectorBlock]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([block.block_id for block in self.blocks],)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the next metadata is about: blocks to save, unless blocks are to be loaded."""

    saved_blocks: list[ConnectorBlock]


class ForwardContext(NamedTuple):
    kv_caches: KVCaches


class KVConnectorBase_V1(ABC):
    """Subclass it, and name the subclass in `--kv-transfer-config`. A call that raises costs a
    computation; so does one that does not return in time, until it returns."""

    def __init__(
        self, vllm_config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raise ValueError with what to change where the settings cannot work."""
        self._vllm_config, self._role = vllm_config, role
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    # -- role SCHEDULER ----------------------------------------------------------------------------

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens behind those computed ones can be loaded, and whether a load goes on
        after `start_load_kv` returned. None: ask again soon. Only whole blocks are of use."""

    @abstractmethod
    def update_state_after_alloc(
        self, request: ConnectorRequest, blocks: ConnectorBlocks, num_external_tokens: int
    ) -> None:
        """These rows are to be filled with the blocks of these names. It may be called several
        times for one request, where the buffer is smaller than the prompt."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """For the worker half: what `update_state_after_alloc` noted, or `saved_blocks`."""

    def request_finished(
        self, request: ConnectorRequest, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request that was looked for has ended. No rows are held for it (`block_ids` is
        empty), so what is returned has no effect."""
        return False, None

    # -- role WORKER -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: KVCaches) -> None:  # noqa: B027  (it is optional)
        """The buffer, [rows, bytes of a row], once; `torch.from_numpy` gives it as a tensor."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "it is bound before each load and save"
        return self._connector_metadata

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin to fill the rows of the metadata."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when they are filled, unless the load is asynchronous."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: NDArray[np.uint8], attn_metadata: None, **kwargs: Any
    ) -> None:
        """Begin to save the rows of the metadata."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the rows may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks were sent, and those whose asynchronous load has ended; called
        again and again while one is under way."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Rows that could not be filled."""
        return set()

    # -- both --------------------------------------------------------------------------------------

    def shutdown(self) -> None:  # noqa: B027  (it is optional)
        """The engine ends."""
