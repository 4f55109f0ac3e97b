"""What an engine process is told is what a pod is told, on this machine's terms."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from octavo.local.launch import ThreadShare, engine_environment, launch_of
from octavo_engine.errors import ConfigError
from octavo_operator.desired.engine_options import engine_options, extra_arguments
from octavo_operator.spec import LLMDeployment

MODELS = Path("/models")
WHOLE = ThreadShare(num_threads=8)


def deployment(*, uri: str = "demo://smollm2", **spec: Any) -> LLMDeployment:
    model = {"uri": uri, **spec.pop("model", {})}
    return LLMDeployment.parse(
        {
            "apiVersion": "octavo.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "m"},
            "spec": {"model": model, **spec},
        }
    )


def launch(requested: LLMDeployment, references=None, **environ: str):
    return launch_of(requested, models=MODELS, references=references or {}, environ=environ)


def reported(requested: LLMDeployment, share: ThreadShare = WHOLE) -> dict[str, Any]:
    return tomllib.loads(launch(requested).config_text(share))


def test_options_and_arguments_are_the_pod_s():
    requested = deployment(
        engine={"maxModelLen": 512, "maxNumSeqs": 4, "args": {"max-queue": 7, "vllm-metrics": True}}
    )
    result = launch(requested)

    assert result.options == engine_options(requested, model="demo://smollm2")
    assert (
        result.arguments == tuple(extra_arguments(requested)) == ("--max-queue=7", "--vllm-metrics")
    )
    assert result.command_arguments(Path("/run/x.toml"), 4711) == [
        "serve", "--config=/run/x.toml", "--host=127.0.0.1", "--port=4711",
        "--max-queue=7", "--vllm-metrics",
    ]  # fmt: skip


def test_blocks_on_disk_lie_in_a_folder_of_the_deployment():
    found = launch(deployment(engine={"kvTiers": {"disk": {"size": "2Gi"}}})).options
    name = deployment().name
    assert (found["kv-disk-path"], found["kv-disk-size"]) == (f"/kv/default/{name}", 2.0)


def test_a_shared_store_is_a_folder_of_its_claim():
    found = launch(deployment(engine={"kvTiers": {"shared": {"existingClaim": "c"}}})).options
    assert (found["kv-shared-store"], found["kv-shared-size"]) == ("/kv/default/shared/c", 100.0)


def test_replicas_share_cores_and_memory():
    share = ThreadShare(num_threads=2, replicas=4)
    assert reported(deployment(), share)["num-threads"] == 2
    assert reported(deployment(), share)["memory-fraction"] == 0.125
    assert "memory-fraction" not in reported(deployment(), ThreadShare(num_threads=8))
    limited = deployment(
        resources={"limits": {"cpu": "1", "memory": "1Gi"}}, engine={"kvCacheMemory": "64Mi"}
    )
    assert reported(limited, share)["num-threads"] == 1
    assert "memory-fraction" not in reported(limited, share)
    assert reported(deployment(resources={"limits": {"cpu": "64"}}), share)["num-threads"] == 2


def test_the_pods_of_a_group_are_processes_of_one_engine():
    requested = deployment(
        engine={"device": "cpu", "kvCacheMemory": "64Mi"},
        group={"size": 3, "secretRef": {"name": "between"}},
        resources={"limits": {"cpu": "2", "memory": "1Gi"}},  # of each pod
        adapters=[{"name": "law", "uri": "file:///adapters/law"}],
    )
    options = reported(requested)
    assert options["pipeline-parallel-size"] == 3
    assert options["distributed-executor-backend"] == "mp"
    assert options["num-threads"] == 6
    assert options["kv-cache-memory-bytes"] == 3 * 64 * 2**20
    assert options["enable-lora"] is True
    # Neither other hosts nor a secret: all is on this one.
    assert not [each for each in launch(requested).arguments if "node" in each or "master" in each]
    assert reported(requested, ThreadShare(num_threads=2, replicas=4))["num-threads"] == 2


def test_a_revision_changes_with_what_makes_a_process_and_nothing_else():
    first = launch(deployment()).revision
    assert launch(deployment(replicas=5, routing={"policy": "session"})).revision == first
    assert launch(deployment(suspend=True)).revision == first
    for other in (
        deployment(engine={"dtype": "float32"}),
        deployment(engine={"args": {"seed": 3}}),
        deployment(engine={"env": [{"name": "A", "value": "b"}]}),
        deployment(model={"servedName": "x"}),
        deployment(uri="file:///m"),
    ):
        assert launch(other).revision != first


def test_where_weights_come_from():
    assert launch(deployment(uri="file:///m/x.gguf")).options["model"] == "/m/x.gguf"
    hub = launch(deployment(uri="hf://a/b", model={"revision": "v1"}))
    assert (hub.options["model"], hub.options["revision"], hub.fetch) == ("hf://a/b", "v1", ())
    fetched = launch(deployment(uri="s3://bucket/m"))
    assert fetched.fetch == ("s3://bucket/m", f"--to={fetched.options['model']}")
    assert str(fetched.options["model"]).startswith("/models/m-")
    simulated = launch(deployment(uri="s3://bucket/m", engine={"device": "sim"}))
    assert (simulated.options["model"], simulated.fetch) == ("s3://bucket/m", ())


def test_variables_come_from_the_files_or_from_the_shell():
    reference = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    requested = deployment(engine={"env": [reference, {"name": "A", "value": "b"}]})

    found = launch(requested, {("Secret", "default", "s"): {"k": "from-file"}}, KEY="from-shell")
    assert found.variables == {"KEY": "from-file", "A": "b"}
    assert launch(requested, KEY="from-shell").variables == {"KEY": "from-shell", "A": "b"}
    with pytest.raises(ConfigError, match="KEY comes from Secret s, which is not in these files"):
        launch(requested)
    reference["valueFrom"]["secretKeyRef"]["optional"] = True  # type: ignore[index]
    assert launch(deployment(engine={"env": [reference]})).variables == {}


def test_the_source_s_secret_goes_to_whoever_fetches():
    secrets = {("Secret", "default", "hub"): {"HF_TOKEN": "t"}}
    engine = launch(deployment(uri="hf://a/b", model={"secretRef": {"name": "hub"}}), secrets)
    assert engine.variables == {"HF_TOKEN": "t"}
    step = launch(deployment(uri="s3://a/b", model={"secretRef": {"name": "hub"}}), secrets)
    assert (step.variables, step.fetch_variables) == ({}, {"HF_TOKEN": "t"})


def test_this_shell_s_engine_settings_stay_here():
    environ = {"PATH": "/bin", "OCTAVO_PORT": "1", "OCTAVO_MODEL": "x", "OCTAVO_CPU_ISA": "avx2",
               "OCTAVO_ROUTER_PORT": "2", "OCTAVO_CONFIG": "f"}  # fmt: skip
    assert engine_environment(environ, {"A": "b"}) == {
        "PATH": "/bin", "OCTAVO_CPU_ISA": "avx2", "A": "b",
    }  # fmt: skip
