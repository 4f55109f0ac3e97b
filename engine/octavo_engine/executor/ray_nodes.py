"""Stages that Ray places on the hosts of its cluster: `--distributed-executor-backend ray`.

Ray starts a task for each stage but ours. The task connects to us and is a node from then on, as a
host that was started with `--node-rank` is: steps and rows never go through Ray.
"""

from __future__ import annotations

import importlib
import secrets
import socket
from typing import TYPE_CHECKING

from octavo_engine import _native
from octavo_engine.errors import ConfigError, OctavoError, WorkerLost
from octavo_engine.executor.node import compute_for_leader
from octavo_engine.executor.rank_nodes import RankNodes
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from typing import Any

    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles


def import_ray() -> Any:
    """Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"--distributed-executor-backend ray needs Ray on all hosts: pip install ray ({error})"
        ) from None


class RayNodes(RankNodes):
    """Ranks 1 to size - 1, each a task of Ray; joins the cluster at hand, or starts one here."""

    def __init__(self, config: EngineConfig, patience_s: float, files: ModelFiles) -> None:
        self._ray = ray = import_ray()
        self._owns_ray = not ray.is_initialized()
        self._tasks: list[Any] = []
        if self._owns_ray:
            ray.init(logging_level="warning")
        try:
            size = config.pipeline_parallel_size
            hosts = sum(bool(host["Alive"]) for host in ray.nodes())
            threads = config.num_threads or threads_of_stage(
                _native.available_cores(), num_stages=size, num_hosts=hosts
            )
            # The key is checked where it is read, from a file; ours goes to the tasks by Ray.
            as_nodes = config.replace(
                distributed_executor_backend="auto",
                nnodes=size,
                node_key_file="",
                num_threads=threads,
            )
            super().__init__(as_nodes, patience_s, files, secrets.token_bytes(32))
        except BaseException:
            self._leave()
            raise

    def _listen(self) -> socket.socket:
        """And have Ray start what connects here."""
        ray = self._ray
        address: str = ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0))
        start = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(serve_stage)
        for rank in range(1, self.size):
            config = self.config.replace(
                node_rank=rank, master_addr=address, master_port=listener.getsockname()[1]
            )
            self._tasks.append(start.remote(config, self._secret))
        return listener

    def _check_missing(self) -> None:
        """Raises what ended a task before it connected."""
        ended, _ = self._ray.wait(self._tasks, timeout=0)
        for task in ended:
            rank = self._tasks.index(task) + 1
            try:
                self._ray.get(task)
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, OctavoError):
                    raise cause from None
                raise WorkerLost(f"rank {rank} of {self.size} failed in Ray: {cause}") from error
            except self._ray.exceptions.RayError as error:
                raise WorkerLost(f"rank {rank} of {self.size} is lost: {error}") from error

    def close(self) -> None:
        super().close()
        self._leave()

    def _leave(self) -> None:
        if self._owns_ray:
            self._owns_ray = False
            self._ray.shutdown()


def threads_of_stage(num_cores: int, *, num_stages: int, num_hosts: int) -> int:
    """An equal share of a host's cores for each stage there, if stages are spread evenly."""
    stages_a_host = -(-num_stages // max(1, num_hosts))
    return max(1, num_cores // stages_a_host)


def serve_stage(config: EngineConfig, secret: bytes) -> None:
    """The task of a stage: until the engine is gone."""
    files = resolve_model(
        config.model, revision=config.revision, download_dir=config.download_dir
    ).with_overrides(config.overrides)
    compute_for_leader(config, files, secret)
