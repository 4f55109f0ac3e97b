"""CUDA's side of captured graphs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from octavo_engine.backends.torch.memory import GRAPH_BYTES, device_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo_engine.backends.torch.graphs import Replay

    Results = tuple[Tensor, Tensor]

ROOM_BYTES = 16 * GRAPH_BYTES  # free memory without which nothing more is captured

logger = logging.getLogger(__name__)


class CudaRecorder:
    """Captures into one pool of memory that all graphs share: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0  # that captures took so far
        self._device = device
        self._pool: Any = None  # torch has no public name for its type
        self._is_full = False

    def capture(self, work: Callable[[], Results]) -> tuple[Results, Replay] | None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        free = device_memory(self._device).free_bytes
        try:
            # Other threads may allocate and copy meanwhile: only this one's calls are recorded.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            logger.warning(
                "A step could not be captured as a graph and is launched instead",
                extra={"reason": str(error)},
            )
            return None
        self.num_bytes += max(0, free - device_memory(self._device).free_bytes)
        return result, graph.replay

    def has_room(self) -> bool:
        has_room = device_memory(self._device).free_bytes > ROOM_BYTES
        if not has_room and not self._is_full:
            logger.warning(
                "Device memory is short: steps of further sizes are launched, not captured",
                extra={"graph_bytes": self.num_bytes},
            )
        self._is_full = not has_room
        return has_room

    def reset(self) -> None:
        """All that was captured is gone."""
        self._pool, self.num_bytes = None, 0
