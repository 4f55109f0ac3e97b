"""spec.engine and spec.resources: how the engine runs, and on what."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from octavo_engine.protocol.vllm_options import UNSUPPORTED_OPTIONS, refusal
from octavo_operator.errors import SpecInvalid
from octavo_operator.objects.quantities import parse_quantity
from octavo_operator.spec.fields import FieldReader, show
from octavo_operator.spec.model import OBJECT_NAME
from octavo_operator.spec.shared_secret import read_shared_secret

if TYPE_CHECKING:
    from collections.abc import Mapping

Device = Literal["auto", "cpu", "cuda", "torch", "sim"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["auto", "none", "int8", "int4"]
Executor = Literal["uni", "mp", "ray"]

MAX_TOKENS = 16_777_216
# What the CUDA backend computes on: whole GPUs, shared ones, and slices of them (MIG).
WHOLE_GPU = "nvidia.com/gpu"
_CUDA_RESOURCE = re.compile(r"nvidia\.com/(gpu|mig-).*")
# Devices of others: which backend and image they need is not for us to guess.
_OTHER_ACCELERATOR = re.compile(
    r"(amd\.com/gpu|gpu\.intel\.com/|habana\.ai/|aws\.amazon\.com/neuron|google\.com/tpu).*"
)

# Flags of `octavo serve` that have a field of their own, or that the operator must decide.
RESERVED_ARGS: Mapping[str, str] = {
    "model": "spec.model.uri",
    "served-model-name": "spec.model.servedName and aliases",
    "revision": "spec.model.revision",
    "device": "spec.engine.device",
    "dtype": "spec.engine.dtype",
    "quantization": "spec.engine.quantization",
    "max-model-len": "spec.engine.maxModelLen",
    "max-num-seqs": "spec.engine.maxNumSeqs",
    "max-num-batched-tokens": "spec.engine.maxNumBatchedTokens",
    "kv-cache-memory-bytes": "spec.engine.kvCacheMemory",
    "enable-prefix-caching": "spec.engine.prefixCaching",
    "tensor-parallel-size": "spec.engine.tensorParallelSize",
    "pipeline-parallel-size": "spec.engine.pipelineParallelSize",
    "distributed-executor-backend": "spec.engine.executor",
    "shutdown-timeout": "spec.rollout.drainTimeout",
    "num-threads": "spec.resources.limits.cpu",
    "nnodes": "spec.group.size",
    "node-rank": "the operator, in the pods of spec.group",
    "kv-transfer-config": "spec.prefill, whose pods compute prompts for those that answer",
    "host": "the operator",
    "port": "the operator",
    "config": "the operator",
    "api-key": "a Secret through spec.engine.env, as OCTAVO_API_KEY",
}
TIER_ARGS = (  # of spec.engine.kvTiers
    "kv-offloading-size", "kv-disk-path", "kv-disk-size", "kv-shared-store", "kv-shared-size",
)  # fmt: skip
DATA_ARG = "data-parallel-size"  # of spec.engine.dataParallelSize, which came after it
ENCRYPTION_ARG = "encryption-key-file"  # of spec.engine.encryption
EXPERTS_ARG = "enable-expert-parallel"  # of spec.engine.expertParallel, likewise
RESERVED_ENV = frozenset(
    ("OCTAVO_POD_UID", "OCTAVO_POD_IP", "OCTAVO_CONFIG", "OCTAVO_HOST", "OCTAVO_PORT")
)


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: a value, or a key of a Secret or ConfigMap in the same namespace."""

    name: str
    value: str = ""
    source: Literal["", "secretKeyRef", "configMapKeyRef"] = ""
    source_name: str = ""
    source_key: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class KVTiersSpec:
    """Where KV blocks stay beside the KV cache."""

    host_memory: str | None = None  # a quantity; None: none
    disk_size: str | None = None  # None: no folder on disk
    disk_claim: str = ""  # "": the folder ends with the pod
    shared_size: str | None = None  # None: no store that engines share
    shared_claim: str = ""  # it is a folder on this one
    shared_uri: str = ""  # or a bucket
    shared_secret: str = ""  # with keys for that; "": the ServiceAccount's own

    @property
    def is_empty(self) -> bool:
        return self.host_memory is None and not self.has_files

    @property
    def has_files(self) -> bool:
        return self.disk_size is not None or self.shared_size is not None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How `octavo serve` is called. None: the engine's own default."""

    device: Device = "auto"
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory: str | None = None  # a quantity
    kv_tiers: KVTiersSpec = field(default_factory=KVTiersSpec)
    encryption_secret: str = ""  # with the keys for files on disk; "": they are in clear
    prefix_caching: bool = True
    tensor_parallel_size: int = 1
    expert_parallel: bool = False  # ranks have whole experts
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    executor: Executor = "uni"
    startup_timeout_s: float | None = None  # None: from the memory that weights may fill
    image: str = ""  # "": the operator's for the device
    args: Mapping[str, str] = field(default_factory=dict)  # flag without dashes → value
    env: tuple[EnvVar, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Processes that hold the model once."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class ResourcesSpec:
    """Of the engine container: quantities by resource, as written."""

    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """One that CUDA computes on."""
        return any(map(_CUDA_RESOURCE.fullmatch, self._names))

    @property
    def num_gpus(self) -> int:
        found = filter(_CUDA_RESOURCE.fullmatch, self._names)
        return int(sum(parse_quantity(self.limits.get(name, "0")) for name in found))

    @property
    def other_accelerator(self) -> str:
        """The name of a device that CUDA does not compute on, or ''."""
        return next(filter(_OTHER_ACCELERATOR.fullmatch, self._names), "")

    @property
    def _names(self) -> list[str]:
        return sorted({*self.limits, *self.requests})


def read_engine(fields: FieldReader) -> EngineSpec:
    engine = EngineSpec(
        device=fields.choice("device", get_args(Device), "auto"),
        dtype=fields.choice("dtype", get_args(DType), "auto"),
        quantization=fields.choice("quantization", get_args(Quantization), "auto"),
        max_model_len=fields.maybe_integer("maxModelLen", least=16, most=MAX_TOKENS),
        max_num_seqs=fields.maybe_integer("maxNumSeqs", least=1, most=65536),
        max_num_batched_tokens=fields.maybe_integer(
            "maxNumBatchedTokens", least=16, most=1_048_576
        ),
        kv_cache_memory=fields.maybe_quantity("kvCacheMemory"),
        kv_tiers=_read_tiers(fields.section("kvTiers")),
        encryption_secret=_read_encryption(fields),
        prefix_caching=fields.flag("prefixCaching", default=True),
        tensor_parallel_size=fields.integer("tensorParallelSize", 1, least=1, most=64),
        expert_parallel=fields.flag("expertParallel", default=False),
        pipeline_parallel_size=fields.integer("pipelineParallelSize", 1, least=1, most=64),
        data_parallel_size=fields.integer("dataParallelSize", 1, least=1, most=64),
        executor=fields.choice("executor", get_args(Executor), "uni"),
        startup_timeout_s=fields.maybe_duration("startupTimeout", least_s=10, most_s=86400),
        image=fields.text("image", longest=512, pattern=r"(\S+)?", form="an image without spaces"),
        args=read_args(fields),
        env=fields.objects("env", _variable, most=64),
    )
    check_fields_beside(engine, engine.args, fields.at("args"))
    names = [variable.name for variable in engine.env]
    for name in names:
        if names.count(name) > 1:
            raise fields.fail("env", f"has {name} more than once")
    fields.end()
    return engine


def read_args(fields: FieldReader) -> Mapping[str, str]:
    """`args`: flags of octavo serve, without those that have a field of their own."""
    args = fields.mapping("args", _argument, most=64)
    for name, value in args.items():
        path = f"{fields.at('args')}.{name[:80]}"
        _check_argument_name(name, path)
        advice = refusal(name, value, UNSUPPORTED_OPTIONS)
        if advice is not None:
            raise SpecInvalid(path, f"is not supported: {advice}")
    return args


def check_fields_beside(engine: EngineSpec, args: Mapping[str, str], path: str) -> None:
    """Raises SpecInvalid where a flag is also set by a field of `engine` that came after it."""
    for name in args:
        if name == DATA_ARG and engine.data_parallel_size > 1:
            raise SpecInvalid(
                f"{path}.{name}", "is set by spec.engine.dataParallelSize; use one of the two"
            )
        if name in (EXPERTS_ARG, f"no-{EXPERTS_ARG}") and engine.expert_parallel:
            raise SpecInvalid(
                f"{path}.{name}", "is set by spec.engine.expertParallel; use one of the two"
            )
        if name in TIER_ARGS and not engine.kv_tiers.is_empty:
            raise SpecInvalid(f"{path}.{name}", "is set by spec.engine.kvTiers; use one of the two")
        if name == ENCRYPTION_ARG and engine.encryption_secret:
            raise SpecInvalid(
                f"{path}.{name}", "is set by spec.engine.encryption; use one of the two"
            )


def _read_encryption(fields: FieldReader) -> str:
    section = fields.optional("encryption")
    if section is None:
        return ""
    name = read_shared_secret(
        section, "files and KV blocks on disk are encrypted", form="lines of 32 bytes in base64"
    )
    section.end()
    return name


_BUCKET_URI = r"s3://[A-Za-z0-9][A-Za-z0-9._-]{1,254}(/[A-Za-z0-9._/-]*)?"


def _read_tiers(fields: FieldReader) -> KVTiersSpec:
    disk = fields.optional("disk")
    tiers = KVTiersSpec(
        host_memory=fields.maybe_quantity("hostMemory"),
        disk_size=None if disk is None else disk.maybe_quantity("size") or "10Gi",
        disk_claim=""
        if disk is None
        else disk.text(
            "existingClaim", longest=253, pattern=f"({OBJECT_NAME})?", form="the name of a claim"
        ),
    )
    if disk is not None:
        disk.end()
    shared = fields.optional("shared")
    if shared is not None:
        tiers = _read_shared(shared, tiers)
    fields.end()
    return tiers


def _read_shared(fields: FieldReader, tiers: KVTiersSpec) -> KVTiersSpec:
    reference = fields.optional("secretRef")
    secret = ""
    if reference is not None:
        secret = reference.required_text(
            "name", longest=253, pattern=OBJECT_NAME, form="the name of a Secret"
        )
        reference.end()
    tiers = replace(
        tiers,
        shared_size=fields.maybe_quantity("size") or "100Gi",
        shared_claim=fields.text(
            "existingClaim", longest=253, pattern=f"({OBJECT_NAME})?", form="the name of a claim"
        ),
        shared_uri=fields.text(
            "uri", longest=1024, pattern=f"({_BUCKET_URI})?", form="like s3://bucket/prefix"
        ),
        shared_secret=secret,
    )
    if bool(tiers.shared_claim) == bool(tiers.shared_uri):
        raise fields.fail("existingClaim", "or uri must be set, and not both")
    if secret and not tiers.shared_uri:
        raise fields.fail("secretRef", "needs uri; leave it out")
    fields.end()
    return tiers


def read_resources(fields: FieldReader) -> ResourcesSpec:
    resources = ResourcesSpec(
        requests=fields.mapping("requests", _quantity, most=16),
        limits=fields.mapping("limits", _quantity, most=16),
    )
    for part, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            if len(name) > 253 or not re.fullmatch(_RESOURCE_NAME, name):
                raise fields.fail(
                    part,
                    "must have names of resources as keys, such as cpu, memory or "
                    f"nvidia.com/gpu; got {show(name)}",
                )
            if "/" in name and parse_quantity(amount) % 1:
                raise fields.fail(f"{part}.{name}", f"must be a whole number; got {amount}")
    for name, amount in resources.requests.items():
        _check_request(fields, name, amount, resources.limits.get(name))
    fields.end()
    return resources


_RESOURCE_NAME = (
    r"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i"
    r"|[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
)


def _check_request(fields: FieldReader, name: str, amount: str, limit: str | None) -> None:
    is_device = "/" in name
    if is_device and (limit is None or parse_quantity(amount) != parse_quantity(limit)):
        raise fields.fail(
            f"requests.{name}", f"must equal its limit; leave it out of requests; got {amount}"
        )
    if limit is not None and parse_quantity(amount) > parse_quantity(limit):
        raise fields.fail(f"requests.{name}", f"must be at most the limit {limit}; got {amount}")


def _quantity(value: object, path: str) -> str:
    owner, _, name = path.rpartition(".")
    return FieldReader({}, owner).check_quantity(name, value)


def _argument(value: object, path: str) -> str:
    """A flag's value. YAML's numbers and booleans are taken for what they look like."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise SpecInvalid(path, f"must be a string or a number; got {show(value)}")
    if len(value) > 1024:
        raise SpecInvalid(path, f"must have at most 1024 characters; got {len(value)}")
    if "\0" in value:
        raise SpecInvalid(path, "must not have a null character")
    return value


def _check_argument_name(name: str, path: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name):
        raise SpecInvalid(
            path, f"must be a flag of octavo serve without dashes in front; got {show(name)}"
        )
    plain = name.removeprefix("no-")
    for reserved in (name, plain):
        if reserved in RESERVED_ARGS:
            raise SpecInvalid(path, f"is set by {RESERVED_ARGS[reserved]}; leave it out here")


def _variable(fields: FieldReader) -> EnvVar:
    name = fields.required_text(
        "name", longest=128, pattern=r"[A-Za-z_][A-Za-z0-9_]*", form="a variable's name"
    )
    if name in RESERVED_ENV:
        raise fields.fail("name", f"{name} is set by the operator; leave it out")
    text = fields.raw("value")
    if text is not None and (not isinstance(text, str) or len(text) > 4096 or "\0" in text):
        raise fields.fail("value", f"must be a string of at most 4096 characters; got {show(text)}")
    source = fields.optional("valueFrom")
    fields.end()
    if source is None:
        return EnvVar(name=name, value=text or "")
    if text:
        raise fields.fail("value", "and valueFrom exclude each other; keep one")
    return _variable_from(name, source)


def _variable_from(name: str, source: FieldReader) -> EnvVar:
    found: list[tuple[Literal["secretKeyRef", "configMapKeyRef"], FieldReader]] = []
    for kind in ("secretKeyRef", "configMapKeyRef"):
        reference: Any = source.optional(kind)
        if reference is not None:
            found.append((kind, reference))
    source.end()
    if len(found) != 1:
        raise SpecInvalid(source.path, "must have one of secretKeyRef and configMapKeyRef")
    kind, reference = found[0]
    variable = EnvVar(
        name=name,
        source=kind,
        source_name=reference.required_text(
            "name", longest=253, pattern=OBJECT_NAME, form="the name of a Secret or ConfigMap"
        ),
        source_key=reference.required_text(
            "key", longest=253, pattern=r"[A-Za-z0-9._-]+", form="a key: letters, digits and . _ -"
        ),
        optional=reference.flag("optional", default=False),
    )
    reference.end()
    return variable
