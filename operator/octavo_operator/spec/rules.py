"""What must hold between fields of different sections, and what nothing can carry out yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_operator.errors import SpecInvalid

if TYPE_CHECKING:
    from octavo_operator.spec.deployment import LLMDeployment


def check_together(deployment: LLMDeployment) -> None:
    """Raises SpecInvalid. The schema says the same in CEL where CEL can."""
    _check_device(deployment)
    cache = deployment.cache
    if cache.is_of_one_node and deployment.most_replicas > 1:
        raise SpecInvalid(
            "spec.cache.accessMode",
            f"ReadWriteOnce is for the pods of one node, and there may be "
            f"{deployment.most_replicas} replicas; use ReadWriteMany where the StorageClass can, "
            "kind: EmptyDir, or one replica",
        )
    names = [adapter.name for adapter in deployment.adapters]
    if len(set(names)) < len(names) or set(names) & set(deployment.model.names):
        raise SpecInvalid("spec.adapters", "must have names unlike each other's and the model's")


def _check_device(deployment: LLMDeployment) -> None:
    engine, resources = deployment.engine, deployment.resources
    if engine.device in ("cpu", "sim") and (resources.has_gpu or resources.other_accelerator):
        raise SpecInvalid(
            "spec.resources.limits",
            f"asks for a GPU that device: {engine.device} would leave idle; use device: cuda or "
            "drop the GPU",
        )
    if engine.device == "cuda" and resources.num_gpus < 1 and not deployment.has_claims:
        raise SpecInvalid(
            "spec.resources.limits",
            "needs nvidia.com/gpu or a MIG slice such as nvidia.com/mig-1g.10gb for device: cuda",
        )
    unknown = resources.other_accelerator or ("a resource claim" if deployment.has_claims else "")
    if engine.device == "auto" and unknown and not resources.has_gpu:
        raise SpecInvalid(
            "spec.engine.device",
            f"must be named beside {unknown}, which does not tell it: cuda, torch (with "
            "spec.engine.image), or cpu where it is no GPU",
        )


def check_supported(deployment: LLMDeployment) -> None:
    """Raises SpecInvalid with reason Unsupported: it may be right, and it would not run."""
    engine = deployment.engine
    if engine.executor == "ray":
        raise _unsupported(
            "spec.engine.executor",
            "ray needs a Ray cluster, which this operator does not create; use uni, or run "
            "octavo serve on your own Ray cluster and give its URL to the router",
        )
    if engine.executor == "mp":
        raise _unsupported("spec.engine.executor", "mp is not in this version's engine; use uni")
    for name, size in (
        ("tensorParallelSize", engine.tensor_parallel_size),
        ("pipelineParallelSize", engine.pipeline_parallel_size),
    ):
        if size > 1:
            raise _unsupported(
                f"spec.engine.{name}",
                f"of {size} needs several ranks, which this version's engine does not have; use 1 "
                "and more replicas",
            )
    if deployment.adapters:
        raise _unsupported(
            "spec.adapters", "cannot be loaded by this version's engine; serve a merged model"
        )


def _unsupported(field: str, problem: str) -> SpecInvalid:
    return SpecInvalid(field, problem, reason="Unsupported")
