"""One spec that each rule of the CRD accepts, and one that it refuses."""

from __future__ import annotations

from typing import Any, NamedTuple

GPU = {"limits": {"nvidia.com/gpu": "1"}}
TWO_GPUS = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
GPU_LIMIT = {"resources": GPU}


class Case(NamedTuple):
    """`message` is part of what the API server says when it refuses `bad`."""

    rule: str
    good: dict[str, Any]
    bad: dict[str, Any]
    message: str


def model(**fields: Any) -> dict[str, Any]:
    return {"model": {"uri": "hf://org/name", **fields}}


def uri(text: str) -> dict[str, Any]:
    return {"model": {"uri": text}}


def adapter(uri: str) -> dict[str, Any]:
    return {"adapters": [{"name": "lora", "uri": uri}]}


def canaries(*of: str, **fields: Any) -> dict[str, Any]:
    """Of adapters `law` and `tax`."""
    tried = [
        {"name": f"next-{n}", "uri": "hf://a/c", "canary": {"of": name, **fields}}
        for n, name in enumerate(of)
    ]
    return {"adapters": [*({"name": name, "uri": "hf://a/b"} for name in ("law", "tax")), *tried]}


def engine(**fields: Any) -> dict[str, Any]:
    return {"engine": fields}


def env(**fields: Any) -> dict[str, Any]:
    return {"engine": {"env": [fields]}}


def rollout(**fields: Any) -> dict[str, Any]:
    return {"rollout": fields}


def canary(*weights: int) -> dict[str, Any]:
    steps = [{"weight": weight} for weight in weights]
    return rollout(strategy="Canary", canary={"steps": steps})


def scaling(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 4, **fields}}


def cache(**fields: Any) -> dict[str, Any]:
    return {"cache": fields}


def claim(**fields: Any) -> dict[str, Any]:
    return cache(kind="PersistentVolumeClaim", **fields)


def claimed(name: str) -> dict[str, Any]:
    """An engine with a device by a resource claim."""
    container = {"name": "engine", "resources": {"claims": [{"name": name}]}}
    claims = [{"name": name, "resourceClaimTemplateName": "one-gpu"}]
    return {"podTemplate": {"spec": {"resourceClaims": claims, "containers": [container]}}}


def pod_labels(key: str) -> dict[str, Any]:
    return {"podTemplate": {"metadata": {"labels": {key: "x"}}}}


def keda(**fields: Any) -> dict[str, Any]:
    return scaling(provider="keda", prometheusURL="http://prometheus:9090", **fields)


def group(**fields: Any) -> dict[str, Any]:
    return {"group": {"size": 2, "secretRef": {"name": "between"}, **fields}}


def prefill(**fields: Any) -> dict[str, Any]:
    return {"prefill": {"secretRef": {"name": "kv"}, **fields}}


FLIP = {"targets": {"ttft": "500ms", "tpot": "30ms"}}
SECRET = {"secretKeyRef": {"name": "keys", "key": "key"}}
BOTH = {**SECRET, "configMapKeyRef": {"name": "keys", "key": "key"}}
DIGEST = "sha256:" + "0" * 64
CASES = [
    # --- spec
    Case(
        "a GPU is not left idle",
        {**engine(device="cuda"), "resources": GPU},
        {**engine(device="cpu"), "resources": GPU},
        "resources request a GPU that the device would leave idle; use device: cuda",
    ),
    Case(
        "cuda has a GPU",
        {"resources": GPU},
        engine(device="cuda"),
        "resources.limits needs nvidia.com/gpu or a MIG slice",
    ),
    Case(
        "a slice of a GPU is not left idle",
        {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}},
        {**engine(device="cpu"), "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}},
        "resources request a GPU that the device would leave idle",
    ),
    Case(
        "another vendor's device has a backend that is named",
        {**engine(device="torch"), "resources": {"limits": {"amd.com/gpu": 1}}},
        {"resources": {"limits": {"amd.com/gpu": 1}}},
        "engine.device must be named beside a resource claim or a device that is not NVIDIA's",
    ),
    Case(
        "what a claim brings is said",
        {**engine(device="cuda"), **claimed("gpu")},
        claimed("gpu"),
        "engine.device must be named beside a resource claim",
    ),
    Case(
        "a volume of one node has one replica",
        {**claim(accessMode="ReadWriteMany"), "replicas": 3},
        {**claim(), "replicas": 3},
        "ReadWriteOnce is for the pods of one node",
    ),
    Case(
        "nor has an autoscaler more for it",
        {**claim(existingClaim="mine"), **scaling(maxReplicas=2)},
        {**claim(), **scaling(maxReplicas=2)},
        "ReadWriteOnce is for the pods of one node",
    ),
    # --- spec.model
    Case("schemes", uri("s3://bucket/path"), uri("org/name"), "a model of the hub is hf://"),
    Case("schemes are closed", uri("demo://x"), uri("ftp://host/x"), "must start with one of"),
    Case("hf", uri("hf://org/name@main"), uri("hf://name"), "the form hf://ORGANISATION/NAME"),
    Case("s3", uri("s3://b"), uri("s3:///path"), "must have the form s3://BUCKET/PATH"),
    Case("gs", uri("gs://b/p/q"), uri("gs://"), "must have the form gs://BUCKET/PATH"),
    Case("oci", uri("oci://host:5000/a/b:1"), uri("oci://name"), "the form oci://HOST/NAME:TAG"),
    Case("http", uri("http://host/a.gguf"), uri("http://host"), "the form http://HOST/PATH"),
    Case(
        "https without a password",
        uri("https://host/a"),
        uri("https://me:secret@host/a"),
        "must have the form https://HOST/PATH without a user name",
    ),
    Case("pvc", uri("pvc://claim"), uri("pvc://Claim/x"), "must have the form pvc://CLAIM/PATH"),
    Case("file", uri("file:///m"), uri("file://m"), "must have the form file:///ABSOLUTE/PATH"),
    Case("demo", uri("demo://smollm2"), uri("demo://"), "must have the form demo://NAME"),
    Case("paths stay inside", uri("pvc://c/a..b"), uri("pvc://c/../d"), "must not have .. in its"),
    Case(
        "revisions are the hub's",
        model(revision="v1.0"),
        {"model": {"uri": "s3://b/p", "revision": "v1.0"}},
        "revision applies to hf:// only; name the version in the uri instead",
    ),
    Case(
        "one revision",
        uri("hf://org/name@v1"),
        {"model": {"uri": "hf://org/name@v1", "revision": "v1"}},
        "revision is in the uri already; say it in one place",
    ),
    Case(
        "revision form", model(revision="refs/pr/1"), model(revision="a b"),
        "must be a branch, tag or commit",
    ),
    Case(
        "digest form", model(digest=DIGEST), model(digest="sha256:abc"),
        "must be sha256: and 64 hexadecimal digits",
    ),
    Case(
        "digests of what is fetched",
        model(digest=DIGEST),
        {"model": {"uri": "demo://smollm2", "digest": DIGEST}},
        "digest applies to models that are fetched",
    ),
    Case(
        "credentials of what is fetched",
        model(secretRef={"name": "hub"}),
        {"model": {"uri": "pvc://claim/x", "secretRef": {"name": "hub"}}},
        "secretRef applies to models that are fetched",
    ),
    Case(
        "names of Secrets", model(secretRef={"name": "a.b"}), model(secretRef={"name": "A"}),
        "must be the name of a Secret",
    ),
    Case(
        "served names", model(servedName="Org/Name-1.0:q4"), model(servedName="no good"),
        "must be letters, digits and . _ : / @ -",
    ),
    Case(
        "alias form", model(aliases=["a", "b"]), model(aliases=["-a"]),
        "must be letters, digits and . _ : / @ -",
    ),
    Case(
        "aliases differ",
        model(servedName="a", aliases=["b"]),
        model(servedName="a", aliases=["a"]),
        "aliases must differ from servedName",
    ),
    Case("aliases are a set", model(aliases=["a", "b"]), model(aliases=["a", "a"]), "Duplicate"),
    # --- spec.engine
    Case(
        "argument names", engine(args={"max-queue": 64}), engine(args={"--max-queue": 64}),
        "must have flags of octavo serve without dashes in front as keys",
    ),
    Case(
        "arguments with a field", engine(args={"vllm-metrics": "true"}),
        engine(args={"dtype": "float16"}), "must not set flags that have a field of their own",
    ),
    Case(
        "negated arguments with a field", engine(args={"no-vllm-metrics": "true"}),
        engine(args={"no-enable-prefix-caching": "true"}), "that have a field of their own",
    ),
    Case(
        "no keys in the open", env(name="OCTAVO_API_KEY", valueFrom=SECRET),
        engine(args={"api-key": "secret"}), "belongs into a Secret",
    ),
    Case("images", engine(image="a/b:1"), engine(image="a b"), "must be an image without spaces"),
    Case(
        "variables' names", env(name="A_1", value="x"), env(name="1A", value="x"),
        "must be a variable's name",
    ),
    Case(
        "the operator's variables", env(name="HF_HUB_OFFLINE", value="1"),
        env(name="OCTAVO_POD_UID", value="x"), "is set by the operator; leave it out",
    ),
    Case(
        "one value", env(name="A", valueFrom=SECRET), env(name="A", value="x", valueFrom=SECRET),
        "value and valueFrom exclude each other; keep one",
    ),
    Case(
        "one source", env(name="A", valueFrom=SECRET), env(name="A", valueFrom=BOTH),
        "must have one of secretKeyRef and configMapKeyRef",
    ),
    Case(
        "names of references", env(name="A", valueFrom=SECRET),
        env(name="A", valueFrom={"secretKeyRef": {"name": "Keys", "key": "key"}}),
        "must be the name of a Secret or ConfigMap",
    ),
    Case(
        "keys of references", env(name="A", valueFrom=SECRET),
        env(name="A", valueFrom={"secretKeyRef": {"name": "keys", "key": "a b"}}),
        "must be a key: letters, digits and . _ -",
    ),
    Case(
        "one variable of a name",
        engine(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]),
        engine(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "Duplicate",
    ),
    Case(
        "durations", engine(startupTimeout="1h30m"), engine(startupTimeout="90"),
        "must be a duration such as 90s, 5m or 1h30m",
    ),
    Case(
        "startup", engine(startupTimeout="24h"), engine(startupTimeout="5s"),
        "must be from 10s to 24h",
    ),
    Case("sizes", engine(kvCacheMemory="2Gi"), engine(kvCacheMemory="2 GB"), "kvCacheMemory"),
    Case(
        "sizes of KV tiers",
        engine(kvTiers={"hostMemory": "2Gi", "disk": {"size": "1Gi", "existingClaim": "kv"}}),
        engine(kvTiers={"hostMemory": "2 GB"}),
        "kvTiers.hostMemory",
    ),
    Case(
        "claims of KV tiers",
        engine(kvTiers={"disk": {"existingClaim": "kv.a"}}),
        engine(kvTiers={"disk": {"existingClaim": "KV"}}),
        "must be the name of a claim",
    ),
    Case(
        "shared stores of KV blocks",
        engine(kvTiers={"shared": {"existingClaim": "kv"}}),
        engine(kvTiers={"shared": {}}),
        "must be set, and not both",
    ),
    Case(
        "either a claim or a bucket",
        engine(kvTiers={"shared": {"uri": "s3://kv/a.b", "secretRef": {"name": "keys"}}}),
        engine(kvTiers={"shared": {"uri": "s3://kv/a.b", "existingClaim": "kv"}}),
        "must be set, and not both",
    ),
    Case(
        "buckets of KV blocks",
        engine(kvTiers={"shared": {"uri": "s3://kv", "size": "1Ti"}}),
        engine(kvTiers={"shared": {"uri": "gs://kv"}}),
        "must be like s3://bucket/prefix",
    ),
    Case(
        "keys for a bucket only",
        engine(kvTiers={"shared": {"uri": "s3://kv", "secretRef": {"name": "keys"}}}),
        engine(kvTiers={"shared": {"existingClaim": "kv", "secretRef": {"name": "keys"}}}),
        "secretRef needs uri",
    ),
    Case(
        "names of Secrets of buckets",
        engine(kvTiers={"shared": {"uri": "s3://kv", "secretRef": {"name": "keys"}}}),
        engine(kvTiers={"shared": {"uri": "s3://kv", "secretRef": {"name": "Keys"}}}),
        "must be the name of a Secret",
    ),
    Case(
        "a shared store of one core",
        engine(kvTiers={"shared": {"existingClaim": "kv"}}, dataParallelSize=1),
        engine(kvTiers={"shared": {"existingClaim": "kv"}}, dataParallelSize=2),
        "needs dataParallelSize: 1",
    ),
    Case(
        "keys of encryption",
        engine(encryption={"secretRef": {"name": "disk-keys"}}),
        engine(encryption={"secretRef": {"name": "Disk"}}),
        "must be the name of a Secret",
    ),
    Case("lengths", engine(maxModelLen=16), engine(maxModelLen=15), "maxModelLen"),
    Case("devices", engine(device="sim"), engine(device="tpu"), "Unsupported value"),
    Case("known fields", engine(device="sim"), engine(devise="sim"), "engine.devise"),
    # --- spec.resources
    Case(
        "requests within limits",
        {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 1}}},
        {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}},
        "requests must be at most limits",
    ),
    Case(
        "names of resources",
        {"resources": {"limits": {"example.com/tpu": 1}}},
        {"resources": {"limits": {"gpu": 1}}},
        "must have names of resources as keys",
    ),
    Case(
        "whole devices",
        GPU_LIMIT,
        {"resources": {"limits": {"nvidia.com/gpu": "500m"}}},
        "must have whole numbers of devices such as nvidia.com/gpu",
    ),
    Case(
        "devices on both sides",
        {"resources": {**GPU, "requests": {"nvidia.com/gpu": 1}}},
        {"resources": {"requests": {"nvidia.com/gpu": 1}}},
        "requests of devices such as nvidia.com/gpu must equal their limits",
    ),
    Case(
        "amounts",
        {"resources": {"limits": {"memory": "1.5Gi"}}},
        {"resources": {"limits": {"memory": "8GB"}}},
        "memory",
    ),
    # --- spec.routing
    Case(
        "holding", {"routing": {"holdTimeout": "0s"}}, {"routing": {"holdTimeout": "2h"}},
        "must be from 0s to 1h",
    ),
    Case("policies", {"routing": {"policy": "session"}}, {"routing": {"policy": "x"}}, "policy"),
    # --- spec.rollout
    Case(
        "something can be replaced",
        rollout(maxSurge=0, maxUnavailable=1),
        rollout(maxSurge="0%", maxUnavailable=0),
        "maxSurge and maxUnavailable must not both be 0: nothing could ever be replaced",
    ),
    Case("shares", rollout(maxSurge="25%"), rollout(maxSurge="125%"), "maxSurge"),
    Case("share form", rollout(maxSurge=3), rollout(maxSurge="3"), "or a share such as 25%"),
    Case("counts", rollout(maxUnavailable=1000), rollout(maxUnavailable=1001), "from 0 to 1000"),
    Case(
        "canary where it counts",
        canary(10),
        rollout(canary={"steps": [{"weight": 10}]}),
        "canary needs strategy: Canary; set it, or leave canary out",
    ),
    Case("rising weights", canary(5, 50), canary(50, 5), "must have rising weights"),
    Case("no weight twice", canary(5, 6), canary(5, 5), "must have rising weights"),
    Case(
        "ranks of a layer",
        engine(tensorParallelSize=2, executor="mp"),
        engine(tensorParallelSize=2),
        "needs device: cpu or cuda and executor: mp",
    ),
    Case(
        "ranks on a CPU",
        engine(tensorParallelSize=2, executor="mp", device="cpu"),
        engine(tensorParallelSize=2, executor="mp", device="sim"),
        "needs device: cpu or cuda and executor: mp",
    ),
    Case(
        "ranks on GPUs",
        {**TWO_GPUS, **engine(tensorParallelSize=2, executor="mp", device="cuda")},
        {**TWO_GPUS, **engine(tensorParallelSize=2, device="cuda")},
        "needs device: cpu or cuda and executor: mp",
    ),
    Case(
        "experts as a whole on a CPU",
        engine(tensorParallelSize=2, executor="mp", expertParallel=True, device="cpu"),
        {
            **TWO_GPUS,
            **engine(tensorParallelSize=2, executor="mp", expertParallel=True, device="cuda"),
        },
        "expertParallel needs device: cpu",
    ),
    Case(
        "KV tiers in one process",
        engine(kvTiers={"hostMemory": "1Gi"}, device="cpu"),
        engine(kvTiers={"hostMemory": "1Gi"}, tensorParallelSize=2, executor="mp"),
        "kvTiers needs device: cpu",
    ),
    Case(
        "KV tiers with prefixes",
        engine(kvTiers={}, prefixCaching=False),
        engine(kvTiers={"disk": {}}, prefixCaching=False),
        "kvTiers needs device: cpu",
    ),
    Case(
        "stages",
        engine(pipelineParallelSize=2, executor="mp"),
        engine(pipelineParallelSize=2),
        "needs device: cpu and executor: mp",
    ),
    Case(
        "stages on a CPU",
        engine(pipelineParallelSize=2, executor="mp", device="auto"),
        engine(pipelineParallelSize=2, executor="mp", device="torch"),
        "needs device: cpu and executor: mp",
    ),
    Case(
        "stages of whole layers",
        engine(pipelineParallelSize=2, tensorParallelSize=1, executor="mp"),
        engine(pipelineParallelSize=2, tensorParallelSize=2, executor="mp"),
        "cannot be combined",
    ),
    Case(
        "experts of several ranks",
        engine(expertParallel=True, tensorParallelSize=2, executor="mp"),
        engine(expertParallel=True),
        "needs tensorParallelSize above 1",
    ),
    Case(
        "cores on a CPU",
        engine(dataParallelSize=2, device="cpu"),
        engine(dataParallelSize=2, device="sim"),
        "needs device: cpu",
    ),
    Case(
        "KV tiers of one stage",
        engine(kvTiers={"hostMemory": "1Gi"}, dataParallelSize=2),
        engine(kvTiers={"hostMemory": "1Gi"}, pipelineParallelSize=2, executor="mp"),
        "kvTiers needs device: cpu",
    ),
    Case(
        "a disk of one core",
        engine(kvTiers={"disk": {}}, dataParallelSize=1),
        engine(kvTiers={"disk": {}}, dataParallelSize=2),
        "needs dataParallelSize: 1",
    ),
    Case("one host", engine(executor="mp"), engine(executor="ray"), "use mp or uni"),
    Case(
        "adapters of schemes that engines read",
        adapter("hf://org/lora"), adapter("pvc://claim/lora"),
        "must start with one of hf://, s3://, gs://, oci://, http://, https://, file://",
    ),
    Case(
        "memory for a step", {"lora": {"maxLoras": 4, "maxCpuLoras": 4}},
        {"lora": {"maxLoras": 4, "maxCpuLoras": 3}}, "maxCpuLoras must be at least maxLoras",
    ),
    Case("weights differ", canary(5, 50), canary(5, 5), "Duplicate"),
    Case("weights", canary(99), canary(100), "weight"),
    Case(
        "drain", rollout(drainTimeout="30m"), rollout(drainTimeout="31m"), "must be from 0s to 30m"
    ),
    Case(
        "progress", rollout(progressDeadline="1m"), rollout(progressDeadline="59s"),
        "must be from 1m to 24h",
    ),
    # --- spec.autoscaling
    Case("bounds", scaling(minReplicas=4), scaling(minReplicas=5), "must be at most maxReplicas"),
    Case("an upper bound", scaling(), {"autoscaling": {"minReplicas": 1}}, "maxReplicas"),
    Case(
        "zero and HPA",
        scaling(scaleToZero={"after": "5m"}),
        scaling(provider="hpa", scaleToZero={"after": "5m"}),
        "scaleToZero needs provider: octavo or keda; an HPA keeps one pod",
    ),
    Case("KEDA's source", keda(), scaling(provider="keda"), "prometheusURL is required"),
    Case(
        "only KEDA's source", keda(), scaling(prometheusURL="http://prometheus:9090"),
        "prometheusURL is read by provider: keda only; leave it out",
    ),
    Case(
        "source form", keda(), scaling(provider="keda", prometheusURL="prometheus:9090"),
        "must be http://HOST:PORT",
    ),
    Case(
        "shares of the cache",
        scaling(targets={"kvUsage": 0.05}),
        scaling(targets={"kvUsage": 0}),  # a whole number: the schema's own minimum lets it pass
        "must be from 0.05 to 1",
    ),
    Case(
        "percentiles",
        scaling(targets={"ttft": "500ms"}),
        scaling(provider="hpa", targets={"ttft": "500ms"}),
        "targets.ttft needs provider: octavo; a percentile is no pod metric",
    ),
    Case(
        "steps",
        scaling(behavior={"scaleUp": {"step": 1}}),
        scaling(behavior={"scaleDown": {"step": "0%"}}),
        "must be above 0; to stand still set minReplicas = maxReplicas",
    ),
    # --- spec.cache
    Case(
        "host path", cache(kind="HostPath", hostPath="/var/models"), cache(kind="HostPath"),
        "hostPath is required for kind: HostPath",
    ),
    Case(
        "host path of its kind",
        cache(kind="HostPath", hostPath="/m"),
        cache(hostPath="/m"),
        "hostPath needs kind: HostPath; set it, or leave hostPath out",
    ),
    Case(
        "absolute host path",
        cache(kind="HostPath", hostPath="/m"),
        cache(kind="HostPath", hostPath="m"),
        "must be an absolute path on the node",
    ),
    Case(
        "straight host path",
        cache(kind="HostPath", hostPath="/m/..a"),
        cache(kind="HostPath", hostPath="/m/../etc"),
        "must not have .. in it",
    ),
    Case(
        "existing claim", claim(existingClaim="weights"), cache(existingClaim="weights"),
        "existingClaim needs kind: PersistentVolumeClaim",
    ),
    Case(
        "name of a claim", claim(existingClaim="weights"), claim(existingClaim="W"),
        "must be the name of a claim",
    ),
    Case(
        "class", claim(storageClassName="fast"), cache(storageClassName="fast"),
        "storageClassName needs kind: PersistentVolumeClaim",
    ),
    Case(
        "name of a class", claim(storageClassName="fast"), claim(storageClassName="Fast!"),
        "must be the name of a StorageClass",
    ),
    Case(
        "class of an existing claim",
        claim(existingClaim="weights"),
        claim(existingClaim="weights", storageClassName="fast"),
        "storageClassName is that of existingClaim already; leave it out",
    ),
    # --- spec.group
    Case("a secret within a group", group(), {"group": {"size": 2}}, "secretRef"),
    Case("its size", group(), {"group": {"secretRef": {"name": "between"}}}, "size"),
    Case("more than one pod", group(), group(size=1), "greater than or equal to 2"),
    Case(
        "a group's secret", group(), group(secretRef={"name": "A"}), "must be the name of a Secret",
    ),
    *(
        Case(f"no group of {name}", {**group(), **engine(device="cpu")}, {**group(), **spec}, why)
        for name, spec, why in (
            ("simulators", engine(device="sim"), "group needs device: cpu"),
            ("a GPU", GPU_LIMIT, "group needs device: cpu"),
            ("ranks", engine(executor="mp", tensorParallelSize=2), "one process in each pod"),
            ("stages", engine(executor="mp", pipelineParallelSize=2), "one process in each pod"),
            ("cores", engine(dataParallelSize=2), "one process in each pod"),
            ("cores by a flag", engine(args={"data-parallel-size": 2}), "one process in each pod"),
            ("KV tiers", engine(kvTiers={"hostMemory": "1Gi"}), "cannot be combined with group"),
            ("prefill pods", prefill(), "cannot be combined with group"),
        )
    ),
    Case(
        "a volume of one node has no worker",
        {**claim(accessMode="ReadWriteMany"), **group()},
        {**claim(), **group()},
        "ReadWriteOnce is for the pods of one node",
    ),
    # --- spec.prefill
    Case("a secret between pods", prefill(), {"prefill": {}}, "secretRef"),
    Case(
        "its name", prefill(), prefill(secretRef={"name": "KV"}), "must be the name of a Secret",
    ),
    Case(
        "flags of prefill pods", prefill(args={"max-queue": 64}), prefill(args={"--max-queue": 64}),
        "must have flags of octavo serve without dashes in front as keys",
    ),
    Case(
        "fields of prefill pods", prefill(maxNumSeqs=4, args={"no-access-log": "true"}),
        prefill(args={"max-num-seqs": 4}), "that have a field of their own, in spec.prefill",
    ),
    Case(
        "no flag leads them apart",
        {**prefill(), **engine(args={"kv-cache-dtype": "int8"})},
        prefill(args={"kv-cache-dtype": "int8"}),
        "must not set flags that are the same in all pods",
    ),
    Case(
        "nor does a negated one", prefill(args={"no-vllm-metrics": "true"}),
        prefill(args={"no-batch-invariant": "true"}), "the same in all pods",
    ),
    Case(
        "prefill pods are the operator's to connect",
        prefill(),
        engine(args={"kv-transfer-config": "{}"}),
        "kv-transfer-config is set by spec.prefill",
    ),
    Case(
        "routers lead prefill pods by one policy",
        {**prefill(), "routing": {"policy": "prefix-load"}},
        {**prefill(), "routing": {"policy": "session"}},
        "routing.policy must be prefix-load beside prefill",
    ),
    Case(
        "pods that change sides are counted by the operator",
        {**prefill(flip=FLIP), "autoscaling": {"maxReplicas": 2}},
        {**prefill(flip=FLIP), "autoscaling": {"maxReplicas": 2, "provider": "hpa"}},
        "autoscaling.provider must be octavo beside prefill.flip",
    ),
    Case(
        "prefill pods compute on no GPU but torch's",
        {**prefill(resources=GPU), **engine(device="torch")},
        prefill(resources=GPU),
        "prefill.resources request a GPU, on which only device: torch",
    ),
    *(
        Case(
            f"prefill pods cannot serve blocks of {name}",
            {**prefill(), **engine(device="sim")},
            {**prefill(), **spec},
            "prefill needs device: cpu, torch or sim, tensorParallelSize: 1",
        )
        for name, spec in {
            "a GPU": GPU_LIMIT,
            "CUDA": {**GPU_LIMIT, **engine(device="cuda")},
            "ranks": engine(executor="mp", tensorParallelSize=2),
            "stages": engine(executor="mp", pipelineParallelSize=2),
            "cores": engine(dataParallelSize=2),
            "cores by a flag": engine(args={"data-parallel-size": 2}),
            "no cache": engine(prefixCaching=False),
        }.items()
    ),
    Case(
        "a volume of one node has no second pod for prompts",
        {**claim(), **prefill(replicas=0)},
        {**claim(), **prefill()},
        "ReadWriteOnce is for the pods of one node",
    ),
    Case(
        "nor has its autoscaler more for it",
        {**claim(existingClaim="mine"), **prefill(replicas=0, autoscaling={"maxReplicas": 1})},
        {**claim(), **prefill(replicas=0, autoscaling={"maxReplicas": 1})},
        "ReadWriteOnce is for the pods of one node",
    ),
    Case(
        "bounds of prefill pods",
        prefill(autoscaling={"minReplicas": 2, "maxReplicas": 2}),
        prefill(autoscaling={"minReplicas": 3, "maxReplicas": 2}),
        "must be at most maxReplicas",
    ),
    Case(
        "an upper bound of prefill pods",
        prefill(autoscaling=None),
        prefill(autoscaling={"minReplicas": 1}),
        "maxReplicas",
    ),
    Case(
        "prefill pods do not sleep while others answer",
        prefill(autoscaling={"maxReplicas": 2}),
        prefill(autoscaling={"minReplicas": 0, "maxReplicas": 2}),
        "minReplicas",
    ),
    Case(
        "steps of prefill pods",
        prefill(autoscaling={"maxReplicas": 2, "behavior": {"scaleDown": {"step": 1}}}),
        prefill(autoscaling={"maxReplicas": 2, "behavior": {"scaleDown": {"step": 0}}}),
        "must be above 0; to stand still set minReplicas = maxReplicas",
    ),
    Case(
        "requests of prefill pods", prefill(resources={"requests": {"cpu": 1}}),
        prefill(resources={"requests": {"cpu": 2}, "limits": {"cpu": 1}}),
        "requests must be at most limits",
    ),
    Case(
        "numbers of prefill pods", prefill(replicas=0), prefill(replicas=1001), "prefill.replicas",
    ),
    # --- spec.podTemplate
    Case(
        "labels of the operator", pod_labels("team"), pod_labels("octavo.dev/deployment"),
        "must not set octavo.dev/ or app.kubernetes.io/ keys of the operator",
    ),
    Case(
        "annotations of the operator",
        {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}},
        {"podTemplate": {"metadata": {"annotations": {"octavo.dev/model": "b"}}}},
        "must not set octavo.dev/ keys, which are the operator's",
    ),
    Case(
        "fields of the pod",
        {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}},
        {"podTemplate": {"spec": {"hostNetwork": True}}},
        "hostNetwork",
    ),
    Case(
        "a canary of an adapter", canaries("law"), canaries("med"),
        "must be an adapter of this list that is no canary itself",
    ),
    Case("no canary of a canary", canaries("law"), canaries("law", "next-0"), "no canary itself"),
    Case(
        "one canary", canaries("law", "tax"), canaries("law", "law"),
        "of another canary too; an adapter can have one",
    ),
    Case("a share", canaries("law", percent=100), canaries("law", percent=0), "percent"),
    Case("replicas", {"replicas": 0}, {"replicas": -1}, "replicas"),
    Case("not a million", {"replicas": 1000}, {"replicas": 1_000_000}, "replicas"),
]  # fmt: skip
# Not refused by the parser: the API server alone has an old object to compare with.
TRANSITIONS = [
    (claim(size="10Gi"), claim(size="20Gi"), claim(size="5Gi"), "size of a claim cannot shrink"),
    (
        claim(accessMode="ReadWriteMany"),
        claim(accessMode="ReadWriteMany"),
        claim(accessMode="ReadWriteOnce"),
        "accessMode of a claim cannot change",
    ),
    (
        claim(storageClassName="fast"),
        claim(existingClaim="mine", storageClassName=None),
        claim(storageClassName="slow"),
        "storageClassName of a claim cannot change",
    ),
    (
        scaling(),
        scaling(minReplicas=2),
        {"replicas": 3},
        "replicas is only the start while autoscaling decides",
    ),
    (
        prefill(autoscaling={"maxReplicas": 4}),
        prefill(autoscaling={"maxReplicas": 5}),
        {"prefill": {"replicas": 3}},
        "prefill.replicas is only the start while autoscaling decides",
    ),
]
