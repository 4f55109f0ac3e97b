"""The options of `octavo serve` for a spec: the same for a pod and for a process on a laptop."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from octavo_operator.objects.quantities import parse_quantity, plain, whole
from octavo_operator.spec.engine import DATA_ARG, EXPERTS_ARG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_operator.spec import LLMDeployment

KV_DISK_MOUNT = "/var/lib/octavo/kv"
KV_SHARED_MOUNT = "/var/lib/octavo/kv-shared"

Option = str | int | float | bool | list[str]


def engine_options(
    deployment: LLMDeployment,
    *,
    model: str,
    kv_disk_path: str = KV_DISK_MOUNT,
    kv_shared_path: str = KV_SHARED_MOUNT,
) -> dict[str, Option]:
    """Keys of the engine's configuration file. What the spec leaves open is left to the engine.

    `model` is where the weights are, and the two paths where KV blocks may lie, as seen by the
    engine: its own, and those of a claim that engines share.
    """
    engine = deployment.engine
    options: dict[str, Option] = {
        "model": model,
        "served-model-name": list(deployment.model.names),
        "device": deployment.device,
        "shutdown-timeout": plain(deployment.rollout.drain_timeout_s),
    }
    if engine.dtype != "auto":
        options["dtype"] = engine.dtype
    if engine.quantization != "auto":
        options["quantization"] = engine.quantization
    if not engine.prefix_caching:
        options["enable-prefix-caching"] = False
    sizes = {
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
    }
    options.update({name: size for name, size in sizes.items() if size is not None})
    if engine.kv_cache_memory is not None:
        options["kv-cache-memory-bytes"] = whole(parse_quantity(engine.kv_cache_memory))
    tiers = engine.kv_tiers
    if tiers.host_memory is not None:
        options["kv-offloading-size"] = _gib(tiers.host_memory)
    if tiers.disk_size is not None:
        options["kv-disk-path"] = kv_disk_path
        options["kv-disk-size"] = _gib(tiers.disk_size)
    if tiers.shared_size is not None:
        options["kv-shared-store"] = tiers.shared_uri or kv_shared_path
        options["kv-shared-size"] = _gib(tiers.shared_size)
    processes = {
        "tensor-parallel-size": engine.tensor_parallel_size,
        "pipeline-parallel-size": engine.pipeline_parallel_size,
        DATA_ARG: engine.data_parallel_size,
    }
    if deployment.group is not None:
        processes["pipeline-parallel-size"] = deployment.group.size
    options.update({name: count for name, count in processes.items() if count > 1})
    if engine.expert_parallel:
        options[EXPERTS_ARG] = True
    executor = "mp" if deployment.group is not None else engine.executor
    if executor != "uni":
        options["distributed-executor-backend"] = executor
    if (room := deployment.room_for_adapters) is not None:
        options |= {
            "enable-lora": True,
            "allow-runtime-lora-updating": True,  # routers load them
            "max-loras": room.max_loras,
            "max-cpu-loras": room.slots,
            "max-lora-rank": room.max_rank,
        }
    cpu_limit = deployment.resources.limits.get("cpu")
    if cpu_limit is not None and deployment.device == "cpu":
        # NOTE: a limit is a share of time, not fewer cores: as many threads as the node has cores
        # would be throttled in the middle of each step.
        options["num-threads"] = max(1, whole(parse_quantity(cpu_limit)))
    return options


def _gib(quantity: str) -> float:
    return float(parse_quantity(quantity) / (1 << 30))


def extra_arguments(deployment: LLMDeployment) -> list[str]:
    """`engine.args` as one item each: `--max-queue=64`, `--vllm-metrics`, `--no-access-log`."""
    arguments = []
    for name, value in sorted(deployment.engine.args.items()):
        match value:
            case "true":
                arguments.append(f"--{name}")
            case "false":
                arguments.append(f"--no-{name}")
            case _:
                arguments.append(f"--{name}={value}")
    return arguments


def to_toml(options: Mapping[str, Option]) -> str:
    """One line an option. JSON's strings, numbers and lists are TOML's too."""
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items()
    )
