"""LLMDeployment: the custom resource as typed, fully defaulted, immutable values.

`parse` takes a body from the API server or a file on a laptop: nothing has to be defaulted before.
`parse_stored` takes what an API server stores, whose schema may be newer than this operator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import (
    ENGINE_COMPONENT,
    GROUP,
    KIND,
    PREFILL_COMPONENT,
    VERSION,
)
from octavo_operator.errors import SpecInvalid
from octavo_operator.objects.names import ENGINE_CONTAINER
from octavo_operator.objects.quantities import parse_quantity
from octavo_operator.spec.adapters import (
    MAX_ADAPTERS,
    AdapterSpec,
    LoraSpec,
    check_canaries,
    read_adapter,
    read_lora,
)
from octavo_operator.spec.autoscaling import AutoscalingSpec, read_autoscaling
from octavo_operator.spec.cache import CacheSpec, read_cache
from octavo_operator.spec.engine import (
    DATA_ARG,
    WHOLE_GPU,
    EngineSpec,
    ResourcesSpec,
    check_fields_beside,
    read_engine,
    read_resources,
)
from octavo_operator.spec.fields import FieldReader, show
from octavo_operator.spec.group import GroupSpec, read_group
from octavo_operator.spec.model import ModelSpec, read_model
from octavo_operator.spec.pod_template import GANG_KEYS, read_pod_template
from octavo_operator.spec.prefill import PrefillSpec, read_prefill
from octavo_operator.spec.traffic import RolloutSpec, RoutingSpec, read_rollout, read_routing

if TYPE_CHECKING:
    from collections.abc import Mapping

API_VERSION = f"{GROUP}/{VERSION}"
MAX_REPLICAS = 1000
_NAME = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMDeployment:
    """One served model, as its spec describes it."""

    name: str
    namespace: str
    uid: str  # "" outside a cluster
    generation: int
    model: ModelSpec
    engine: EngineSpec = field(default_factory=EngineSpec)
    replicas: int = 1
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    autoscaling: AutoscalingSpec | None = None
    cache: CacheSpec = field(default_factory=CacheSpec)
    lora: LoraSpec | None = None  # as written; see `room_for_adapters`
    adapters: tuple[AdapterSpec, ...] = ()
    pod_template: Mapping[str, Any] = field(default_factory=dict)  # as written, nulls removed
    prefill: PrefillSpec | None = None  # None: each engine computes the prompts it answers
    group: GroupSpec | None = None  # None: a replica is one pod
    suspend: bool = False
    is_prefill: bool = False  # it speaks of the prefill pods; see `prefill_side`
    unknown: tuple[str, ...] = ()  # fields that this version does not support, and ignores

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> LLMDeployment:
        """Raises SpecInvalid and nothing else, whatever `body` is."""
        return _checked(_read(body, None))

    @classmethod
    def parse_stored(cls, body: Mapping[str, Any]) -> LLMDeployment:
        """The same, but unknown fields are no error. The API server prunes those that its schema
        does not have; what is left belongs to a newer version, during an upgrade or a rollback."""
        unknown: list[str] = []
        return replace(_checked(_read(body, unknown)), unknown=tuple(unknown))

    @property
    def room_for_adapters(self) -> LoraSpec | None:
        """None: its engines take no adapters."""
        return self.lora or (LoraSpec() if self.adapters else None)

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients may ask for by this spec."""
        return (*self.model.names, *(adapter.name for adapter in self.adapters))

    @property
    def pool(self) -> str:
        """What routers call the set of its engines."""
        return f"{self.namespace}/{self.name}"

    @property
    def device(self) -> str:
        """auto resolved: a requested GPU is meant to be used."""
        if self.engine.device != "auto":
            return self.engine.device
        return "cuda" if self.resources.has_gpu else "cpu"

    @property
    def has_claims(self) -> bool:
        """Whether the engine gets devices by resource claims (DRA), whichever they are."""
        containers = self.pod_template.get("spec", {}).get("containers", ())
        return any(
            container["name"] == ENGINE_CONTAINER and container.get("resources", {}).get("claims")
            for container in containers
        )

    @property
    def most_pods(self) -> int:
        """The most that the spec allows, an autoscaler's included."""
        most = max(self.replicas, self.autoscaling.max_replicas if self.autoscaling else 0)
        most *= 1 if self.group is None else self.group.size
        return most + (self.prefill.most_replicas if self.prefill is not None else 0)

    @property
    def num_ranks(self) -> int:
        """Of one replica: processes of its pod, or one in each pod of its group."""
        return self.engine.num_ranks if self.group is None else self.group.size

    @property
    def flips(self) -> bool:
        """Whether its pods change between both sides."""
        return self.prefill is not None and self.prefill.flip is not None

    @property
    def component(self) -> str:
        """What its pods are, as their label says."""
        return PREFILL_COMPONENT if self.is_prefill else ENGINE_COMPONENT

    def prefill_side(self) -> LLMDeployment:
        """The same with the settings of its prefill pods. Needs spec.prefill."""
        prefill = self.prefill
        assert prefill is not None
        engine = self.engine
        engine = replace(
            engine,
            args={**engine.args, **prefill.args},
            max_num_seqs=prefill.max_num_seqs or engine.max_num_seqs,
            max_num_batched_tokens=prefill.max_num_batched_tokens or engine.max_num_batched_tokens,
            kv_cache_memory=prefill.kv_cache_memory or engine.kv_cache_memory,
        )
        return replace(
            self,
            engine=engine,
            resources=self.resources if prefill.resources is None else prefill.resources,
            replicas=prefill.replicas,
            autoscaling=None,
            is_prefill=True,
        )

    @property
    def wanted_replicas(self) -> int:
        """Before any autoscaler: none while suspended."""
        return 0 if self.suspend else self.replicas

    def is_woken_by_requests(self, replicas: int) -> bool:
        """Whether requests at this number of replicas are held until there are some."""
        scaling = self.autoscaling
        may_sleep = scaling is not None and scaling.scale_to_zero_after_s is not None
        return may_sleep and replicas == 0 and not self.suspend


def _checked(deployment: LLMDeployment) -> LLMDeployment:
    _check_together(deployment)
    _check_supported(deployment)
    return deployment


def _read(body: object, unknown: list[str] | None) -> LLMDeployment:
    top = FieldReader(body, "LLMDeployment", unknown)
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if (found := top.raw(name)) != expected:
            raise SpecInvalid(
                name, f"must be {expected}; got {show(found)}", reason="UnsupportedVersion"
            )
    metadata = FieldReader({} if (found := top.raw("metadata")) is None else found, "metadata")
    top.raw("status")
    name = metadata.required_text(
        "name", longest=63, pattern=_NAME,
        form="lower-case letters, digits, - and ., with a letter or digit at both ends",
    )  # fmt: skip
    uid, generation = metadata.raw("uid"), metadata.raw("generation")
    namespace = metadata.text("namespace", "default", longest=63)
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", namespace):
        raise metadata.fail("namespace", f"must be a namespace's name; got {show(namespace)}")
    spec_value = top.raw("spec")
    if spec_value is None:
        raise SpecInvalid("spec", "is required, with at least model.uri")
    top.end()
    spec = top.inside(spec_value, "spec")
    model = spec.optional("model")
    if model is None:
        raise SpecInvalid("spec.model", "is required, with at least uri")
    autoscaling, lora = spec.optional("autoscaling"), spec.optional("lora")
    prefill, group = spec.optional("prefill"), spec.optional("group")
    deployment = LLMDeployment(
        name=name,
        namespace=namespace,
        uid=uid if isinstance(uid, str) else "",
        generation=generation if isinstance(generation, int) else 0,
        model=read_model(model, deployment_name=name),
        engine=read_engine(spec.section("engine")),
        replicas=spec.integer("replicas", 1, least=0, most=MAX_REPLICAS),
        resources=read_resources(spec.section("resources")),
        routing=read_routing(spec.section("routing")),
        rollout=read_rollout(spec.section("rollout")),
        autoscaling=None if autoscaling is None else read_autoscaling(autoscaling),
        cache=read_cache(spec.section("cache")),
        lora=None if lora is None else read_lora(lora),
        adapters=spec.objects("adapters", read_adapter, most=MAX_ADAPTERS),
        pod_template=read_pod_template(spec.section("podTemplate")),
        prefill=None if prefill is None else read_prefill(prefill, most_replicas=MAX_REPLICAS),
        group=None if group is None else read_group(group),
        suspend=spec.flag("suspend", default=False),
    )
    spec.end()
    return deployment


def _check_together(deployment: LLMDeployment) -> None:
    """Raises SpecInvalid. The schema says the same in CEL where CEL can."""
    _check_device(deployment)
    cache = deployment.cache
    if cache.is_of_one_node and deployment.most_pods > 1:
        raise SpecInvalid(
            "spec.cache.accessMode",
            f"ReadWriteOnce is for the pods of one node, and there may be "
            f"{deployment.most_pods} replicas; use ReadWriteMany where the StorageClass can, "
            "kind: EmptyDir, or one replica",
        )
    _check_prefill(deployment)
    names = [adapter.name for adapter in deployment.adapters]
    if len(set(names)) < len(names) or set(names) & set(deployment.model.names):
        raise SpecInvalid("spec.adapters", "must have names unlike each other's and the model's")
    check_canaries(deployment.adapters)
    room = deployment.room_for_adapters
    num_pinned = sum(adapter.is_everywhere for adapter in deployment.adapters)
    if room is not None and num_pinned > room.slots:
        raise SpecInvalid(
            "spec.adapters",
            f"has {num_pinned} pinned ones and canaries, and an engine has room for {room.slots}",
        )


def _check_prefill(deployment: LLMDeployment) -> None:
    prefill, engine = deployment.prefill, deployment.engine
    if prefill is None:
        return
    check_fields_beside(engine, prefill.args, "spec.prefill.args")
    if deployment.routing.policy != "prefix-load":
        raise SpecInvalid(
            "spec.routing.policy",
            "must be prefix-load beside spec.prefill, where routers pick both pods of a request; "
            "leave it out",
        )
    scaling = deployment.autoscaling
    if prefill.flip is not None and scaling is not None and scaling.provider != "octavo":
        raise SpecInvalid(
            "spec.autoscaling.provider",
            "must be octavo beside spec.prefill.flip: an HPA and KEDA do not see on which side a "
            "pod is",
        )
    own = prefill.resources
    if own is not None and engine.device != "torch" and (own.has_gpu or own.other_accelerator):
        raise SpecInvalid(
            "spec.prefill.resources.limits",
            "requests a GPU, on which only device: torch computes prompts for other pods; drop it",
        )
    has_cores = engine.data_parallel_size > 1 or DATA_ARG in engine.args
    is_cuda = deployment.device == "cuda"
    if is_cuda or deployment.num_ranks > 1 or has_cores or not engine.prefix_caching:
        raise _unsupported(
            "spec.prefill",
            "needs device: cpu, torch or sim, tensorParallelSize: 1, pipelineParallelSize: 1, "
            "dataParallelSize: 1, prefixCaching and no group; leave it out",
        )


def _check_group(deployment: LLMDeployment) -> None:
    engine = deployment.engine
    if deployment.group is None:
        return
    if deployment.device != "cpu":
        raise _unsupported("spec.group", "needs device: cpu; leave it out")
    if engine.num_ranks > 1 or engine.data_parallel_size > 1 or DATA_ARG in engine.args:
        raise _unsupported(
            "spec.group",
            "has one process in each pod, with some of the layers: leave out tensorParallelSize, "
            "pipelineParallelSize, dataParallelSize and expertParallel, and use more replicas in "
            "place of data-parallel ranks",
        )
    metadata = deployment.pod_template.get("metadata", {})
    for part in ("labels", "annotations"):
        if gang := GANG_KEYS & metadata.get(part, {}).keys():
            raise _unsupported(
                f"spec.podTemplate.metadata.{part}",
                f"has {min(gang)}, which would have the pod that serves wait for its workers, and "
                "they are made once it runs; use the label kueue.x-k8s.io/queue-name, with which "
                "the workers of a group start together",
            )


def _check_device(deployment: LLMDeployment) -> None:
    engine, resources = deployment.engine, deployment.resources
    if engine.device in ("cpu", "sim") and (resources.has_gpu or resources.other_accelerator):
        raise SpecInvalid(
            "spec.resources.limits",
            f"requests a GPU that device: {engine.device} would leave idle; use device: cuda or "
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
            f"must be set beside {unknown}, from which it cannot be derived: cuda, torch (with "
            "spec.engine.image), or cpu where it is no GPU",
        )


def _check_supported(deployment: LLMDeployment) -> None:
    """Raises SpecInvalid with reason Unsupported: it may be right, and it would not run."""
    engine = deployment.engine
    if engine.executor == "ray":
        raise _unsupported(
            "spec.engine.executor",
            "ray needs a Ray cluster, which this operator does not create; use uni, or run "
            "octavo serve on your own Ray cluster and give its URL to the router",
        )
    _check_parallel(deployment)
    _check_group(deployment)
    if not engine.kv_tiers.is_empty and (
        deployment.device == "cuda" or deployment.num_ranks > 1 or not engine.prefix_caching
    ):
        raise _unsupported(
            "spec.engine.kvTiers",
            "needs device: cpu, torch or sim, tensorParallelSize: 1, pipelineParallelSize: 1, "
            "prefixCaching and no group; leave it out",
        )
    if engine.kv_tiers.has_files and engine.data_parallel_size > 1:
        name = "shared" if engine.kv_tiers.disk_size is None else "disk"
        raise _unsupported(
            f"spec.engine.kvTiers.{name}",
            "needs dataParallelSize: 1; leave it out, or use more replicas in its place",
        )


def _check_parallel(deployment: LLMDeployment) -> None:
    engine = deployment.engine
    for name, size, devices in (
        ("tensorParallelSize", engine.tensor_parallel_size, ("cpu", "cuda")),
        ("pipelineParallelSize", engine.pipeline_parallel_size, ("cpu",)),
    ):
        path = f"spec.engine.{name}"
        if size > 1 and (deployment.device not in devices or engine.executor != "mp"):
            raise _unsupported(
                path,
                f"of {size} needs device: {' or '.join(devices)} and executor: mp; use 1 and more "
                "replicas elsewhere",
            )
    _check_gpus(deployment)
    if engine.tensor_parallel_size > 1 and engine.pipeline_parallel_size > 1:
        raise _unsupported(
            "spec.engine.pipelineParallelSize",
            "above 1 cannot be combined with tensorParallelSize above 1; set one of them to 1",
        )
    if engine.expert_parallel and engine.tensor_parallel_size == 1:
        raise _unsupported(
            "spec.engine.expertParallel",
            "needs tensorParallelSize above 1, whose ranks the experts are divided between; set "
            "it, or leave expertParallel out",
        )
    if engine.expert_parallel and deployment.device != "cpu":
        raise _unsupported("spec.engine.expertParallel", "needs device: cpu; leave it out")
    _check_processors(deployment)
    if engine.data_parallel_size > 1 and deployment.device != "cpu":
        raise _unsupported(
            "spec.engine.dataParallelSize",
            f"of {engine.data_parallel_size} needs device: cpu; use 1 and more replicas elsewhere",
        )


def _check_gpus(deployment: LLMDeployment) -> None:
    """A rank computes on a GPU of its own. What a resource claim brings is not known here."""
    size = deployment.engine.tensor_parallel_size
    if size == 1 or deployment.device != "cuda" or deployment.has_claims:
        return
    limit = deployment.resources.limits.get(WHOLE_GPU, "0")
    if parse_quantity(limit) != size:
        raise SpecInvalid(
            "spec.resources.limits",
            f"must have {WHOLE_GPU}: {size}, a GPU for each rank of tensorParallelSize, and no MIG "
            f"slices, between which ranks cannot exchange; got {limit}",
        )


def _check_processors(deployment: LLMDeployment) -> None:
    """Ranks wait for each other in every step: one that is throttled stops all."""
    engine = deployment.engine
    limit = deployment.resources.limits.get("cpu")
    ranks = engine.num_ranks * engine.data_parallel_size
    if engine.num_ranks > 1 and limit is not None and parse_quantity(limit) < ranks:
        raise _unsupported(
            "spec.resources.limits.cpu",
            f"of {limit} is too little for {ranks} ranks, which wait for each other in every step; "
            f"set at least {ranks}, or leave it out",
        )


def _unsupported(field: str, problem: str) -> SpecInvalid:
    return SpecInvalid(field, problem, reason="Unsupported")
