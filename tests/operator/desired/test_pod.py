"""The engine pod: what it runs, how it starts and ends, and what an overlay may do to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo_engine.config import KVTransferConfig
from octavo_engine.protocol.endpoints import KV_PORT
from octavo_operator.desired.pod import GRACE_S, pod_template
from octavo_operator.desired.revision import revision_of
from octavo_operator.errors import SpecInvalid
from octavo_operator.settings import Images, OperatorSettings
from tests.fakes.deployments import CUDA_IMAGE, make_deployment, with_images
from tests.fakes.rule_cases import claimed

HUB = {"uri": "hf://org/Some-Model", "revision": "v1"}
MOUNT = "/var/lib/octavo/models"


def pod(
    spec: dict[str, Any] | None = None, settings: OperatorSettings | None = None
) -> dict[str, Any]:
    template = pod_template(make_deployment(spec), with_images(settings), "rev")
    found: dict[str, Any] = template["spec"]
    return found


def engine(
    spec: dict[str, Any] | None = None, settings: OperatorSettings | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = pod(spec, settings)["containers"][0]
    return found


def fetch(spec: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(spec)["initContainers"]
    return dict(found)


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


def overlaid(**fields: Any) -> dict[str, Any]:
    return pod({"podTemplate": {"spec": fields}})


# --- what runs


def expanded(argument: str, variables: dict[str, str]) -> str:
    """As the kubelet does it: $(NAME) is a variable that is there, $$ is $."""
    found = re.findall(r"\$\$|\$\([^)]*\)|.", argument, re.DOTALL)
    return "".join("$" if part == "$$" else variables.get(part[2:-1], part) for part in found)


@pytest.mark.parametrize(
    "text", ["$(OCTAVO_POD_UID)", "$$(OCTAVO_POD_UID)", "$$(x)", "a$b", "$", "$$", "$$$", "$(", "p"]
)
def test_arguments_reach_the_engine_as_the_user_wrote_them(text: str):
    variables = {"OCTAVO_POD_UID": "u", "HOME": "/tmp"}
    container = engine({"engine": {"args": {"chat-template": text}}})
    assert container["env"][0]["name"] == "OCTAVO_POD_UID"
    found = [expanded(argument, variables) for argument in container["args"]]
    assert f"--chat-template={text}" in found


def test_a_uri_and_a_revision_reach_the_fetch_as_the_user_wrote_them():
    uri = "https://models.example.com/$(HOME)/$$x"
    step = fetch({"model": {"uri": uri, "servedName": "m"}})
    assert expanded(step["args"][0], {"HOME": "/tmp"}) == uri


def test_the_engine_reads_its_file_and_then_the_flags_of_the_spec():
    args = {"max-queue": 64, "vllm-metrics": "true", "enable-x": "false", "chat-template": "a b"}
    assert engine({"engine": {"args": args}})["args"] == [
        "--config=/etc/octavo/engine.toml",
        "--chat-template=a b",
        "--no-enable-x",
        "--max-queue=64",
        "--vllm-metrics",
    ]


def test_the_pod_knows_who_it_is():
    first = engine()["env"][0]
    assert first == {
        "name": "OCTAVO_POD_UID",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
    }


def test_images_follow_the_device():
    settings = OperatorSettings(images=Images(cpu="cpu:1", cuda="cuda:1", pull_policy="Never"))
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert engine(None, settings)["image"] == "cpu:1"
    assert engine(gpu, settings)["image"] == "cuda:1"
    assert engine({"engine": {"image": "mine:2"}}, settings)["image"] == "mine:2"
    assert engine(None, settings)["imagePullPolicy"] == "Never"


@pytest.mark.parametrize(
    ("spec", "flag"),
    [({}, "--cpu-image"), ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "--cuda-image")],
)
def test_an_image_that_nobody_names_is_nobodys(spec: dict[str, Any], flag: str):
    """A default would be a name in a public registry, where anybody may own it."""
    with pytest.raises(SpecInvalid, match=rf"spec\.engine\.image is required: .*{flag}"):
        pod_template(make_deployment(spec), OperatorSettings(), "rev")
    named = {**spec, "engine": {"image": "mine:1"}}
    assert pod_template(make_deployment(named), OperatorSettings(), "rev")


def test_pull_secrets_of_the_operator_are_for_those_who_name_none():
    settings = OperatorSettings(images=Images(pull_secrets=("registry", "mirror")))
    own = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "mine"}]}}}
    none: dict[str, Any] = {"podTemplate": {"spec": {"imagePullSecrets": []}}}
    assert pod(None, settings)["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert pod(own, settings)["imagePullSecrets"] == [{"name": "mine"}]
    assert pod(none, settings)["imagePullSecrets"] == []
    assert "imagePullSecrets" not in pod()


def test_other_pull_secrets_are_another_revision():
    plain = with_images()
    secret = with_images(OperatorSettings(images=Images(pull_secrets=("registry",))))
    own = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "mine"}]}}}
    assert revision_of(make_deployment(None), plain) != revision_of(make_deployment(None), secret)
    assert revision_of(make_deployment(own), plain) == revision_of(make_deployment(own), secret)


def test_who_asks_for_nothing_asks_for_one_core():
    assert engine()["resources"] == {"requests": {"cpu": "1", "memory": "2Gi"}}
    limits = {"limits": {"cpu": "4"}}
    assert engine({"resources": limits})["resources"] == limits
    requests = {"requests": {"memory": "8Gi"}}
    assert engine({"resources": requests})["resources"] == {
        "requests": {"cpu": "1", "memory": "8Gi"}
    }


def test_variables_come_from_where_the_spec_says():
    reference = {"secretKeyRef": {"name": "keys", "key": "k", "optional": True}}
    env = [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": reference}]
    assert engine({"engine": {"env": env}})["env"][2:] == env


# --- the model


def test_a_model_of_the_hub_is_fetched_before_the_engine_starts():
    spec = {"model": HUB}
    folder = f"{MOUNT}/some-model-"
    arguments = fetch(spec)["args"]
    assert arguments[0] == "hf://org/Some-Model"
    assert arguments[1].startswith(f"--to={folder}")
    assert arguments[2:] == ["--revision=v1"]
    assert fetch(spec)["command"] == ["octavo", "fetch"]
    # The engine cannot write what other pods read too.
    mounts = {mount["mountPath"]: mount for mount in engine(spec)["volumeMounts"]}
    assert mounts[MOUNT]["readOnly"] is True


def test_the_same_model_is_the_same_folder_for_everybody():
    one = fetch({"model": {**HUB, "servedName": "a"}})["args"][1]
    assert one == fetch({"model": {**HUB, "servedName": "b"}})["args"][1]
    assert one != fetch({"model": {**HUB, "revision": "v2"}})["args"][1]


def test_credentials_reach_the_fetching_step_alone():
    spec = {"model": {**HUB, "secretRef": {"name": "hub"}}}
    found = fetch(spec)
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    variables = {variable["name"]: variable["value"] for variable in found["env"]}
    assert variables["OCTAVO_CREDENTIALS"] == mounts["model-credentials"]
    assert "envFrom" not in found  # a Secret must not set PATH or a proxy
    assert "hub" not in str(engine(spec))
    assert "model-credentials" not in str(engine(spec))


@pytest.mark.parametrize("uri", ["demo://smollm2", "file:///models/x", "pvc://claim/x"])
def test_what_is_there_is_not_fetched(uri: str):
    assert "initContainers" not in pod({"model": {"uri": uri}})


def test_weights_on_the_nodes_disk_are_asked_for():
    """Else the scheduler fills a disk that it thinks is free, and the node evicts."""

    def wanted(spec: dict[str, Any]) -> str | None:
        requests = engine(spec)["resources"].get("requests", {})
        found: str | None = requests.get("ephemeral-storage")
        return found

    assert wanted({"model": HUB}) == "20Gi"
    assert wanted({"model": HUB, "cache": {"size": "5Gi"}}) == "5Gi"
    own = {"requests": {"ephemeral-storage": "1Gi"}}
    assert wanted({"model": HUB, "resources": own}) == "1Gi"
    assert wanted({"model": HUB, "resources": {"limits": {"ephemeral-storage": "8Gi"}}}) is None
    assert wanted({}) is None, "what is in the image is not fetched"
    claim = {"kind": "PersistentVolumeClaim"}
    assert wanted({"model": HUB, "cache": claim}) is None


def test_pods_of_a_volume_of_one_node_are_on_one_node():
    """A rollout brings a second pod, which would wait elsewhere for the volume of the first."""
    claim = {"kind": "PersistentVolumeClaim"}
    (near,) = pod({"model": HUB, "cache": claim})["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    labels = pod_template(make_deployment({"model": HUB}), with_images(), "rev")["metadata"]
    assert near["topologyKey"] == "kubernetes.io/hostname"
    assert near["labelSelector"]["matchLabels"].items() <= labels["labels"].items()
    assert "affinity" not in pod({"model": HUB, "cache": {**claim, "accessMode": "ReadWriteMany"}})
    assert "affinity" not in pod({"model": HUB, "cache": {**claim, "existingClaim": "mine"}})


def test_the_fetching_step_gets_no_gpu():
    """Images built on NVIDIA's ask for all of them."""
    variables = {variable["name"]: variable["value"] for variable in fetch({"model": HUB})["env"]}
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "void"
    dockerfile = (Path(__file__).parents[3] / "Dockerfile").read_text()
    assert "NVIDIA_VISIBLE_DEVICES" not in dockerfile


@pytest.mark.parametrize(
    ("resource", "device"),
    [
        ("nvidia.com/gpu", "cuda"),
        ("nvidia.com/gpu.shared", "cuda"),
        ("nvidia.com/mig-1g.10gb", "cuda"),
        ("nvidia.com/mig-3g.20gb.me", "cuda"),
        ("example.com/fpga", "cpu"),
    ],
)
def test_whatever_cuda_computes_on_is_a_gpu(resource: str, device: str):
    deployment = make_deployment({"resources": {"limits": {resource: 1}}})
    assert deployment.device == device


def test_devices_by_claims_reach_the_pod():
    found = pod({"engine": {"device": "cuda"}, **claimed("gpu")})
    assert found["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert found["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert found["containers"][0]["image"] == CUDA_IMAGE


def test_a_simulated_model_is_not_fetched():
    assert "initContainers" not in pod({"model": HUB, "engine": {"device": "sim"}})


def test_a_claim_is_read_where_it_is():
    spec = {"model": {"uri": "pvc://models/llama/8b"}}
    volume = by_name(pod(spec)["volumes"])["model"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({}, {"emptyDir": {"sizeLimit": "20Gi"}}),
        ({"size": "5Gi"}, {"emptyDir": {"sizeLimit": "5Gi"}}),
        (
            {"kind": "PersistentVolumeClaim"},
            {"persistentVolumeClaim": {"claimName": "smollm2-weights"}},
        ),
        (
            {"kind": "PersistentVolumeClaim", "existingClaim": "all"},
            {"persistentVolumeClaim": {"claimName": "all"}},
        ),
        (
            {"kind": "HostPath", "hostPath": "/var/models"},
            {"hostPath": {"path": "/var/models", "type": "DirectoryOrCreate"}},
        ),
    ],
)
def test_where_weights_lie(cache: dict[str, Any], source: dict[str, Any]):
    volumes = by_name(pod({"model": HUB, "cache": cache})["volumes"])
    assert volumes["weights"] == {"name": "weights", **source}


# --- its life


def test_it_has_time_to_finish_what_it_has():
    found = pod({"rollout": {"drainTimeout": "90s"}})
    assert found["terminationGracePeriodSeconds"] == 90 + GRACE_S
    assert engine()["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert "lifecycle" not in engine(None, OperatorSettings(pre_stop_s=0))


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({}, 1800),  # nobody knows how large it is
        ({"resources": {"limits": {"memory": "1Gi"}}}, 300),
        ({"resources": {"limits": {"memory": "50G"}}}, 1000),
        ({"resources": {"limits": {"memory": "2Ti"}}}, 10800),
        ({"engine": {"startupTimeout": "45s"}}, 44),
    ],
)
def test_loading_may_take_as_long_as_the_weights_may_be_large(spec: dict[str, Any], seconds: int):
    probe = engine(spec)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds


def test_alive_is_progress_and_ready_is_another_question():
    assert engine()["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert engine()["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}


def test_it_waits_for_the_routers():
    assert pod()["readinessGates"] == [{"conditionType": "octavo.dev/Routable"}]
    assert "readinessGates" not in pod(None, OperatorSettings(readiness_gate=False))


# --- the overlay


def test_an_overlay_changes_the_engine_by_its_name():
    found = overlaid(containers=[{"name": "engine", "workingDir": "/x"}])
    (container,) = found["containers"]
    assert container["workingDir"] == "/x"
    assert container["command"] == ["octavo", "serve"]


def test_any_other_name_is_a_sidecar():
    sidecar = {"name": "logs", "image": "logs:1"}
    assert overlaid(containers=[sidecar])["containers"][1:] == [sidecar]
    first = overlaid(initContainers=[{"name": "warm", "image": "warm:1"}])["initContainers"]
    assert [container["name"] for container in first] == ["warm"]


def test_a_variable_has_one_source():
    variable = {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    (container,) = overlaid(containers=[{"name": "engine", "env": [variable]}])["containers"]
    assert by_name(container["env"])["HOME"] == variable
    assert by_name(container["env"])["OCTAVO_POD_UID"]["valueFrom"]


def test_a_volume_has_one_source():
    large = {"name": "tmp", "emptyDir": {"medium": "Memory"}}
    assert by_name(overlaid(volumes=[large])["volumes"])["tmp"]["emptyDir"] == {
        "sizeLimit": "2Gi",
        "medium": "Memory",
    }
    claim = {"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}
    assert by_name(overlaid(volumes=[claim])["volumes"])["tmp"] == claim


def test_placement_is_the_users():
    spread = [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    found = overlaid(
        nodeSelector={"disk": "fast"},
        tolerations=[{"key": "gpu", "operator": "Exists"}],
        topologySpreadConstraints=spread,
        securityContext={"runAsUser": 1000},
    )
    assert found["nodeSelector"] == {"disk": "fast"}
    assert found["topologySpreadConstraints"] == spread
    assert found["securityContext"]["runAsUser"] == 1000
    assert found["securityContext"]["runAsNonRoot"] is True


IDS = ("runAsUser", "runAsGroup", "fsGroup")


def test_a_cluster_may_assign_the_users():
    """OpenShift does, and refuses pods that name one."""
    plain = pod()["securityContext"]
    assert [plain[name] for name in IDS] == [65532] * 3
    assigned = pod(None, OperatorSettings(engine_user=None))["securityContext"]
    assert not assigned.keys() & set(IDS)
    assert assigned["runAsNonRoot"] is True
    own = overlaid(securityContext=dict.fromkeys(IDS))["securityContext"]
    assert not own.keys() & set(IDS), "nulls remove what the operator sets"
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}


def test_an_overlay_adds_labels_and_takes_none():
    overlay = {"metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}}}
    deployment = make_deployment({"podTemplate": overlay})
    metadata = pod_template(deployment, with_images(), "rev")["metadata"]
    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["octavo.dev/revision"] == "rev"
    assert metadata["annotations"] == {"octavo.dev/model": "demo://smollm2", "b": "c"}


def test_another_service_account_is_taken_as_it_is():
    assert overlaid(serviceAccountName="mine")["serviceAccountName"] == "mine"
    assert pod()["serviceAccountName"] == "smollm2"
    assert pod()["automountServiceAccountToken"] is False


def test_blocks_on_disk_have_a_folder_that_ends_with_the_pod_or_a_claim():
    def volume(spec: dict[str, Any]) -> dict[str, Any]:
        (found,) = [each for each in pod(spec)["volumes"] if each["name"] == "kv"]
        mounts = {each["name"]: each for each in engine(spec)["volumeMounts"]}
        assert mounts["kv"] == {"name": "kv", "mountPath": "/var/lib/octavo/kv"}
        return {name: value for name, value in found.items() if name != "name"}

    def requested(spec: dict[str, Any]) -> str | None:
        found: str | None = engine(spec)["resources"].get("requests", {}).get("ephemeral-storage")
        return found

    gib = 1 << 30
    on_node = {"engine": {"kvTiers": {"disk": {"size": "4Gi"}}}}
    assert volume(on_node) == {"emptyDir": {"sizeLimit": str(5 * gib)}}
    assert requested(on_node) == str(5 * gib)
    assert requested({"model": HUB, **on_node}) == str(25 * gib)
    claimed = {"engine": {"kvTiers": {"disk": {"existingClaim": "kv-claim"}}}}
    assert volume(claimed) == {"persistentVolumeClaim": {"claimName": "kv-claim"}}
    assert requested(claimed) is None
    for spec in ({}, {"engine": {"kvTiers": {"hostMemory": "1Gi"}}}):
        assert "kv" not in {each["name"] for each in pod(spec)["volumes"]}


def test_a_shared_store_is_a_claim_or_a_bucket_with_its_keys():
    def parts(shared: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        spec = {"engine": {"kvTiers": {"shared": shared}}}
        volumes = {each["name"]: each for each in pod(spec)["volumes"]}
        mounts = {each["name"]: each["mountPath"] for each in engine(spec)["volumeMounts"]}
        return volumes, mounts, {each["name"]: each.get("value") for each in engine(spec)["env"]}

    volumes, mounts, variables = parts({"existingClaim": "kv"})
    assert volumes["kv-shared"]["persistentVolumeClaim"] == {"claimName": "kv"}
    assert mounts["kv-shared"] == "/var/lib/octavo/kv-shared"
    assert "OCTAVO_CREDENTIALS" not in variables
    volumes, mounts, variables = parts({"uri": "s3://kv/a", "secretRef": {"name": "keys"}})
    assert "kv-shared" not in volumes
    assert volumes["kv-shared-keys"]["secret"]["secretName"] == "keys"
    assert variables["OCTAVO_CREDENTIALS"] == mounts["kv-shared-keys"]
    volumes, _, variables = parts({"uri": "s3://kv"})
    assert "kv-shared-keys" not in volumes and "OCTAVO_CREDENTIALS" not in variables


@pytest.mark.parametrize(
    "name",
    ["kv-offloading-size", "kv-disk-path", "kv-disk-size", "kv-shared-store", "kv-shared-size"],
)
def test_tiers_are_set_by_fields_or_by_arguments(name: str):
    args = {"args": {name: "1"}}
    engine({"engine": args})
    with pytest.raises(SpecInvalid, match=rf"args.{name} is set by spec.engine.kvTiers"):
        pod({"engine": {**args, "kvTiers": {"hostMemory": "1Gi"}}})


# --- prefill and decode apart

PREFILL = {"prefill": {"secretRef": {"name": "kv"}, "nodeSelector": {"pool": "prompts"}}}


def sides(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pods that answer, and the prefill pods."""
    deployment = make_deployment(spec)
    both = (deployment, deployment.prefill_side())
    answering, prefill = (pod_template(one, with_images(), "rev")["spec"] for one in both)
    return answering, prefill


def transfer(pod: dict[str, Any]) -> KVTransferConfig:
    """As the engine reads it, in a pod of this address."""
    (flag,) = [arg for arg in pod["containers"][0]["args"] if arg.startswith("--kv-transfer")]
    text = flag.removeprefix("--kv-transfer-config=").replace("$(OCTAVO_POD_IP)", "10.0.0.7")
    return KVTransferConfig.parse(text)


def test_the_engine_understands_what_the_operator_says_of_kv_blocks():
    answering, prefill = map(transfer, sides(PREFILL))
    assert (answering.kv_role, prefill.kv_role) == ("kv_consumer", "kv_producer")
    assert (prefill.kv_ip, prefill.kv_port) == ("10.0.0.7", KV_PORT)
    assert answering.secret_file == prefill.secret_file == "/run/octavo/kv/secret"
    assert "kv-transfer" not in str(engine())


def test_pods_that_change_sides_can_do_both_from_their_start():
    flip = {"targets": {"ttft": "1s", "tpot": "50ms"}}
    both = [transfer(one) for one in sides({"prefill": {**PREFILL["prefill"], "flip": flip}})]
    assert [one.kv_role for one in both] == ["kv_both", "kv_both"]
    assert {(one.kv_ip, one.kv_port) for one in both} == {("10.0.0.7", KV_PORT)}


def test_prefill_pods_know_their_address_and_both_sides_the_secret():
    answering, prefill = sides(PREFILL)
    address = {
        "name": "OCTAVO_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}
    }  # fmt: skip
    assert address in prefill["containers"][0]["env"]
    assert address not in answering["containers"][0]["env"]
    for each in (answering, prefill):
        secret = by_name(each["volumes"])["kv-secret"]["secret"]
        assert secret["secretName"] == "kv"
        assert secret["items"] == [{"key": "secret", "path": "secret"}]
        mount = by_name(each["containers"][0]["volumeMounts"])["kv-secret"]
        assert mount == {"name": "kv-secret", "mountPath": "/run/octavo/kv", "readOnly": True}


def test_prefill_pods_have_nodes_of_their_own():
    overlay = {"podTemplate": {"spec": {"nodeSelector": {"pool": "all", "zone": "a"}}}}
    answering, prefill = sides({**PREFILL, **overlay})
    assert answering["nodeSelector"] == {"pool": "all", "zone": "a"}
    assert prefill["nodeSelector"] == {"pool": "prompts", "zone": "a"}
