"""LLMDeployment.parse: defaults, meaning, and what it says of mistakes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import (
    AutoscalingSpec,
    CanaryStep,
    LLMDeployment,
    RolloutSpec,
    Targets,
)
from octavo_operator.spec.autoscaling import Behavior
from octavo_operator.spec.traffic import DEFAULT_STEPS
from tests.fakes.deployments import make_body, make_deployment


def refusal(body: Any) -> SpecInvalid:
    with pytest.raises(SpecInvalid) as refused:
        LLMDeployment.parse(body)
    return refused.value


def test_a_model_is_all_it_takes():
    deployment = make_deployment()
    assert deployment.model.served_name == "smollm2"  # the object's own name
    assert deployment.model.scheme == "demo"
    assert deployment.pool == "models/smollm2"
    assert deployment.replicas == 1
    assert deployment.device == "cpu"
    assert deployment.rollout == RolloutSpec()
    assert deployment.autoscaling is None


def test_names_are_the_served_one_and_its_aliases():
    model = {"uri": "hf://org/name", "servedName": "big", "aliases": ["default", "v1"]}
    assert make_deployment({"model": model}).model.names == ("big", "default", "v1")


def test_a_gpu_that_was_asked_for_is_used():
    deployment = make_deployment({"resources": {"limits": {"nvidia.com/gpu": 1}}})
    assert deployment.engine.device == "auto"
    assert deployment.device == "cuda"


def test_suspended_is_no_replicas_and_keeps_the_number():
    deployment = make_deployment({"replicas": 3, "suspend": True})
    assert deployment.replicas == 3
    assert deployment.wanted_replicas == 0


def test_a_null_is_an_absent_field():
    spec = {"autoscaling": None, "cache": {"storageClassName": None}, "engine": None}
    assert make_deployment(spec) == make_deployment()


def test_canary_without_steps_has_some():
    canary = make_deployment({"rollout": {"strategy": "Canary"}}).rollout.canary
    assert canary.steps == DEFAULT_STEPS
    assert [step.weight for step in canary.steps] == [5, 25, 50]


def test_canary_steps():
    steps = [{"weight": 10, "pause": "5m"}, {"weight": 33}]
    rollout = make_deployment({"rollout": {"strategy": "Canary", "canary": {"steps": steps}}})
    assert rollout.rollout.canary.steps == (CanaryStep(10, 300.0), CanaryStep(33, 60.0))


def test_targets_that_are_named_are_the_only_ones():
    scaling = {"maxReplicas": 4, "targets": {"ttft": "2s"}}
    found = make_deployment({"autoscaling": scaling}).autoscaling
    assert found is not None
    assert found.targets == Targets(ttft_s=2.0)


def test_no_targets_are_the_usual_ones():
    for scaling in ({"maxReplicas": 4}, {"maxReplicas": 4, "targets": {}}):
        found = make_deployment({"autoscaling": scaling}).autoscaling
        assert found == AutoscalingSpec(max_replicas=4)
        assert found.targets == Targets(queued_tokens=8192, kv_usage=0.85)


def test_values_are_values():
    deployment = make_deployment({"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}})
    assert dataclasses.replace(deployment, replicas=2) != deployment
    with pytest.raises(dataclasses.FrozenInstanceError):
        deployment.replicas = 2  # type: ignore[misc]  # the point


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replicas": "2"}, "spec.replicas must be a whole number; got '2'"),
        ({"replicas": True}, "spec.replicas must be a whole number; got true"),
        ({"replicas": 1001}, "spec.replicas must be from 0 to 1000; got 1001"),
        ({"suspend": "yes"}, "spec.suspend must be true or false; got 'yes'"),
        ({"engine": []}, "spec.engine must be an object; got a list"),
        ({"model": {}}, "spec.model.uri is required and must not be empty"),
        ({"model": None}, "spec.model is required, with at least uri"),
        (
            {"model": {"uri": "Qwen/Qwen3-8B"}},
            "spec.model.uri must start with one of hf://, s3://, gs://, oci://, http://, https://, "
            "pvc://, file://, demo://; got 'Qwen/Qwen3-8B' (a model of the hub is "
            "hf://Qwen/Qwen3-8B)",
        ),
        (
            {"model": {"uri": "hf://x"}},
            "spec.model.uri must have the form hf://ORGANISATION/NAME, and optionally @REVISION or "
            "/FILE.gguf; got 'hf://x'",
        ),
        (
            {"engine": {"dtype": "fp8"}},
            "spec.engine.dtype must be one of auto, bfloat16, float16, float32; got 'fp8'",
        ),
        (
            {"engine": {"args": {"swap-space": 4}}},
            "spec.engine.args.swap-space is not supported: --kv-offloading-size keeps KV blocks in "
            "the host's memory",
        ),
        (
            {"engine": {"args": {"dtype": "auto"}}},
            "spec.engine.args.dtype is set by spec.engine.dtype; leave it out here",
        ),
        (
            {"rollout": {"drainTimeout": "2 minutes"}},
            "spec.rollout.drainTimeout must be a duration such as 90s, 5m or 1h30m; got "
            "'2 minutes'",
        ),
        (
            {"podTemplate": {"spec": {"containers": [{"image": "a"}]}}},
            "spec.podTemplate.spec.containers[0] must be an object with name; got an object",
        ),
        (
            {"podTemplate": {"metadata": {"labels": {"a": 1}}}},
            "spec.podTemplate.metadata.labels.a must be a string; got 1 (quote numbers and "
            "booleans)",
        ),
    ],
)
def test_a_mistake_is_named(spec: dict[str, Any], message: str):
    error = refusal(make_body(spec))
    assert str(error) == message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"engine": {"maxModelLength": 1}},
            "spec.engine.maxModelLength is not a field of this version of Octavo; did you mean "
            "maxModelLen?",
        ),
        ({"rollout": {"strategy": "BlueGreen"}}, "must be one of Rolling, Recreate, Canary"),
        ({"podTemplate": {"spec": {"hostNetwork": True}}}, "hostNetwork is not a field of this"),
    ],
)
def test_what_a_newer_version_may_know(spec: dict[str, Any], message: str):
    error = refusal(make_body(spec))
    assert error.reason == "UnsupportedVersion"
    assert message in str(error)


def test_another_version_is_not_guessed_at():
    error = refusal({**make_body(), "apiVersion": "octavo.dev/v2"})
    assert error.reason == "UnsupportedVersion"
    assert str(error) == "apiVersion must be octavo.dev/v1alpha1; got 'octavo.dev/v2'"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"engine": {"executor": "ray"}}, "ray needs a Ray cluster, which this operator does not"),
        ({"engine": {"tensorParallelSize": 2}}, "of 2 needs device: cpu or cuda and executor: mp"),
        (
            {"engine": {"tensorParallelSize": 2, "executor": "mp", "device": "sim"}},
            "of 2 needs device: cpu or cuda and executor: mp",
        ),
        *(
            ({"engine": fields, "resources": {"limits": {"nvidia.com/gpu": 2}}}, message)
            for fields, message in (
                ({"tensorParallelSize": 2}, "of 2 needs device: cpu or cuda and executor: mp"),
                (
                    {"pipelineParallelSize": 2, "executor": "mp"},
                    "pipelineParallelSize of 2 needs device: cpu and executor: mp",
                ),
                (
                    {"tensorParallelSize": 2, "executor": "mp", "expertParallel": True},
                    "spec.engine.expertParallel needs device: cpu",
                ),
            )
        ),
        (
            {"engine": {"pipelineParallelSize": 2}},
            "pipelineParallelSize of 2 needs device: cpu and executor: mp",
        ),
        (
            {
                "engine": {"pipelineParallelSize": 2, "executor": "mp"},
                "resources": {"limits": {"cpu": "1500m"}},
            },
            "spec.resources.limits.cpu of 1500m is too little for 2 ranks",
        ),
        (
            {"engine": {"expertParallel": True}},
            "spec.engine.expertParallel needs tensorParallelSize above 1",
        ),
        (
            {
                "engine": {"tensorParallelSize": 2, "dataParallelSize": 2, "executor": "mp"},
                "resources": {"limits": {"cpu": "3"}},
            },
            "spec.resources.limits.cpu of 3 is too little for 4 ranks",
        ),
        (
            {
                "engine": {"dataParallelSize": 2},
                "resources": {"limits": {"nvidia.com/gpu": 1}},
            },
            "dataParallelSize of 2 needs device: cpu",
        ),
        *(
            ({"engine": {"kvTiers": {"hostMemory": "1Gi"}, **fields}}, "kvTiers needs device: cpu")
            for fields in (
                {"tensorParallelSize": 2, "executor": "mp"},
                {"prefixCaching": False},
            )
        ),
        (
            {
                "engine": {"kvTiers": {"disk": {}}},
                "resources": {"limits": {"nvidia.com/gpu": 1}},
            },
            "kvTiers needs device: cpu",
        ),
    ],
)
def test_what_nothing_can_carry_out_yet(spec: dict[str, Any], message: str):
    error = refusal(make_body(spec))
    assert error.reason == "Unsupported"
    assert message in str(error)


@pytest.mark.parametrize(
    ("engine", "cpu"),
    [
        ({"tensorParallelSize": 2, "executor": "mp"}, "2"),
        ({"dataParallelSize": 2}, "500m"),  # cores do not wait for each other
    ],
)
def test_processors_that_are_enough(engine: dict[str, Any], cpu: str):
    assert LLMDeployment.parse(make_body({"engine": engine, "resources": {"limits": {"cpu": cpu}}}))


@pytest.mark.parametrize(
    "limits", [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 4}, {"nvidia.com/mig-1g.10gb": 2}]
)
def test_each_rank_has_a_gpu(limits: dict[str, Any]):
    engine = {"tensorParallelSize": 2, "executor": "mp", "device": "cuda"}
    error = refusal(make_body({"engine": engine, "resources": {"limits": limits}}))
    assert "spec.resources.limits must have nvidia.com/gpu: 2, a GPU for each rank" in str(error)


def test_ranks_with_a_gpu_each():
    engine = {"tensorParallelSize": 2, "executor": "mp"}
    limits = {"nvidia.com/gpu": 2}
    spec = {"engine": engine, "resources": {"limits": limits}}
    assert LLMDeployment.parse(make_body(spec)).device == "cuda"
    claims = {"containers": [{"name": "engine", "resources": {"claims": [{"name": "gpus"}]}}]}
    claimed = {"engine": engine | {"device": "cuda"}, "podTemplate": {"spec": claims}}
    assert LLMDeployment.parse(make_body(claimed))


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a" * 64, None, 7])
def test_names_of_objects(name: Any):
    body = make_body()
    body["metadata"]["name"] = name
    assert refusal(body).field == "metadata.name"


@pytest.mark.parametrize("body", [None, [], "x", {}, {"spec": {}}, {1: 2}])
def test_what_is_no_object(body: Any):
    refusal(body)


def test_messages_stay_short_whatever_is_thrown_at_them():
    error = refusal(make_body({"engine": {"x" * 5000: 1}}))
    assert len(str(error)) < 500
    error = refusal(make_body({"model": {"uri": "ftp://" + "x" * 1000}}))
    assert len(str(error)) < 500


def test_control_characters_end_up_in_no_condition():
    error = refusal(make_body({"model": {"uri": "s3://b/\x1b[31m\n"}}))
    assert "\x1b" not in str(error)
    assert "\n" not in str(error)


class TestPrefill:
    KV: ClassVar = {"secretRef": {"name": "kv"}}

    def test_prefill_pods_are_as_the_others_but_for_what_is_said(self):
        engine = {"maxNumSeqs": 8, "kvCacheMemory": "1Gi", "args": {"max-queue": 4, "seed": 1}}
        own = {"maxNumSeqs": 2, "args": {"max-queue": 64}, "resources": {"limits": {"cpu": "9"}}}
        deployment = make_deployment(
            {"engine": engine, "replicas": 3, "prefill": {**self.KV, **own},
             "autoscaling": {"maxReplicas": 5}}
        )  # fmt: skip
        side = deployment.prefill_side()
        assert (side.component, side.replicas, side.autoscaling) == ("prefill", 1, None)
        assert side.engine == dataclasses.replace(
            deployment.engine, max_num_seqs=2, args={"max-queue": "64", "seed": "1"}
        )
        assert side.resources.limits == {"cpu": "9"}
        assert deployment.component == "engine"
        assert deployment.most_pods == 6

    @pytest.mark.parametrize("beside", [{}, {"targets": None}, {"targets": {}}])
    def test_their_autoscaler_has_defaults_of_its_own(self, beside: dict[str, Any]):
        scaling = {"maxReplicas": 4, "behavior": {"scaleDown": {"step": 1}}, **beside}
        deployment = make_deployment({"prefill": {**self.KV, "autoscaling": scaling}})
        assert deployment.prefill is not None
        assert deployment.prefill.autoscaling == AutoscalingSpec(
            max_replicas=4, targets=Targets(queued_tokens=8192), down=Behavior(300.0, 1)
        )
        assert deployment.most_pods == 5

    @pytest.mark.parametrize(
        ("scaling", "problem"),
        [
            ({}, "maxReplicas is required"),
            (
                {"maxReplicas": 2, "minReplicas": 3},
                r"minReplicas must be at most maxReplicas \(2\)",
            ),
            ({"maxReplicas": 2, "provider": "hpa"}, "provider is not a field of this version"),
            (
                {"maxReplicas": 2, "targets": {"kvUsage": 0.5}},
                "targets.kvUsage is not a field of this version of Octavo; known: queuedTokens",
            ),
            ({"maxReplicas": 2, "scaleToZero": {}}, "scaleToZero is not a field of this version"),
        ],
    )
    def test_what_their_autoscaler_cannot_do_is_named(self, scaling: dict[str, Any], problem: str):
        with pytest.raises(SpecInvalid, match=rf"^spec\.prefill\.autoscaling\.{problem}"):
            make_deployment({"prefill": {**self.KV, "autoscaling": scaling}})

    @pytest.mark.parametrize(
        ("args", "problem"),
        [
            ({"kv-cache-dtype": "int8"}, "must be the same in all pods, or KV blocks are refused"),
            ({"data-parallel-size": 2}, "must be left out: an engine that serves KV blocks is one"),
            ({"kv-offloading-size": 1}, "is set by spec.engine.kvTiers; use one of the two"),
            ({"kv-transfer-config": "{}"}, "is set by spec.prefill, whose pods compute prompts"),
            ({"dtype": "float32"}, "is set by spec.engine.dtype; leave it out here"),
        ],
    )
    def test_flags_that_they_cannot_have_are_named(self, args: dict[str, Any], problem: str):
        spec = {
            "engine": {"kvTiers": {"hostMemory": "1Gi"}}, "prefill": {**self.KV, "args": args}
        }  # fmt: skip
        (name,) = args
        with pytest.raises(SpecInvalid, match=f"^spec.prefill.args.{name} {problem}"):
            make_deployment(spec)

    def test_keys_of_encryption_are_a_secret_or_a_flag(self):
        keys = {"encryption": {"secretRef": {"name": "disk-keys"}}}
        assert make_deployment({"engine": keys}).engine.encryption_secret == "disk-keys"
        assert make_deployment({"engine": {"encryption": None}}).engine.encryption_secret == ""
        with pytest.raises(
            SpecInvalid, match=r"engine\.encryption\.secretRef is required: .* 32 bytes in base64"
        ):
            make_deployment({"engine": {"encryption": {}}})
        args = {"args": {"encryption-key-file": "/keys"}}
        assert make_deployment({"engine": args})
        with pytest.raises(SpecInvalid, match=r"is set by spec\.engine\.encryption; use one"):
            make_deployment({"engine": {**keys, **args}})

    def test_the_secret_is_asked_for_with_what_it_must_have(self):
        with pytest.raises(
            SpecInvalid, match=r"spec\.prefill\.secretRef is required: a Secret whose"
        ):
            make_deployment({"prefill": {}})

    def test_the_flag_in_the_engines_arguments_names_the_field_to_use(self):
        with pytest.raises(SpecInvalid, match=r"kv-transfer-config is set by spec\.prefill"):
            make_deployment({"engine": {"args": {"kv-transfer-config": "{}"}}})


class TestGroup:
    GROUP: ClassVar = {"size": 4, "secretRef": {"name": "between"}}

    def test_each_pod_of_a_group_counts(self):
        deployment = make_deployment(
            {"group": self.GROUP, "replicas": 2, "autoscaling": {"maxReplicas": 3}}
        )
        assert deployment.most_pods == 12
        assert deployment.num_ranks == 4

    @pytest.mark.parametrize(
        ("spec", "problem"),
        [
            ({"group": {"size": 2}}, r"spec\.group\.secretRef is required: a Secret whose"),
            ({"group": {"secretRef": {"name": "a"}}}, r"spec\.group\.size is required"),
            ({"group": {**GROUP, "size": 1}}, r"spec\.group\.size must be from 2 to 64"),
            ({"engine": {"device": "sim"}}, "spec.group needs device: cpu"),
            ({"engine": {"pipelineParallelSize": 4, "executor": "mp"}}, "one process in each pod"),
            ({"engine": {"tensorParallelSize": 2, "executor": "mp"}}, "one process in each pod"),
            ({"engine": {"dataParallelSize": 2}}, "use more replicas in place of data-parallel"),
            ({"engine": {"args": {"nnodes": 2}}}, "is set by spec.group.size"),
            (
                {"podTemplate": {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "a"}}}},
                r"labels has scheduling\.x-k8s\.io/pod-group, which would have the pod that serves",
            ),
            (
                {
                    "podTemplate": {
                        "metadata": {"annotations": {"scheduling.k8s.io/group-name": "a"}}
                    }
                },
                r"annotations has scheduling\.k8s\.io/group-name, which would",
            ),
            ({"prefill": {"secretRef": {"name": "kv"}}}, "and no group"),
            ({"engine": {"kvTiers": {"hostMemory": "1Gi"}}}, "and no group"),
        ],
    )
    def test_what_it_cannot_be_combined_with_is_refused(self, spec: dict[str, Any], problem: str):
        with pytest.raises(SpecInvalid, match=problem):
            make_deployment({"group": self.GROUP, **spec})

    def test_adapters_are_for_all_its_pods(self):
        adapters = [{"name": "a", "uri": "file:///adapters/a"}]
        assert make_deployment({"group": self.GROUP, "adapters": adapters}).names[-1] == "a"


def test_adapters_work_with_ranks_and_stages():
    for sizes in ({"tensorParallelSize": 2}, {"pipelineParallelSize": 2}):
        spec = {
            "engine": {**sizes, "executor": "mp"}, "adapters": [{"name": "a", "uri": "hf://a/b"}],
        }  # fmt: skip
        assert LLMDeployment.parse(make_body(spec)).room_for_adapters is not None
