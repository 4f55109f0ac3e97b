"""The engine understands what it is told: its own flags read every file that is written."""

from __future__ import annotations

import argparse
import tomllib
from typing import Any

import pytest

from octavo.options.flags import ENGINE_FLAGS, ENGINE_ROOTS, SERVER_FLAGS, resolve
from octavo_engine.config import EngineConfig
from octavo_engine.server.settings import ServerSettings
from octavo_operator.desired import desired_objects, engine_options, to_toml
from octavo_operator.desired.config_map import config_text
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import LLMDeployment
from octavo_operator.spec.engine import RESERVED_ARGS
from tests.fakes.deployments import make_deployment, sample_bodies, with_images

FLAGS = (*ENGINE_FLAGS, *SERVER_FLAGS)
ROOTS: dict[str, type[Any]] = {
    **ENGINE_ROOTS,
    **{flag.path: ServerSettings for flag in SERVER_FLAGS},
}


def read(text: str) -> tuple[EngineConfig, ServerSettings]:
    """As `octavo serve --config` would."""
    found = resolve(argparse.Namespace(), FLAGS, ROOTS, {}, tomllib.loads(text))
    engine, server = found.build(EngineConfig), found.build(ServerSettings)
    return engine, server


@pytest.mark.parametrize("name", sample_bodies())
def test_the_engine_reads_the_file_of_each_sample(name: str):
    deployment = LLMDeployment.parse(sample_bodies()[name])
    engine, server = read(config_text(deployment))
    assert engine.names == deployment.model.names
    assert engine.device == deployment.device
    assert (server.host, server.port) == ("0.0.0.0", 8000)
    assert server.shutdown_timeout_s == deployment.rollout.drain_timeout_s


@pytest.mark.parametrize("name", ["enable-expert-parallel", "no-enable-expert-parallel"])
def test_experts_are_set_by_the_field_or_by_an_argument(name: str):
    fields = {"executor": "mp", "tensorParallelSize": 2, "args": {name: "true"}}
    spec: dict[str, Any] = {"model": {"uri": "demo://mixtral"}, "engine": fields}
    make_deployment(spec)
    fields["expertParallel"] = True
    with pytest.raises(SpecInvalid, match=f"args.{name} is set by spec.engine.expertParallel"):
        make_deployment(spec)


def test_experts_as_a_whole_arrive():
    fields = {"executor": "mp", "tensorParallelSize": 2, "expertParallel": True}
    for given in (fields, {**fields, "expertParallel": False}):
        spec = {"model": {"uri": "demo://mixtral"}, "engine": given}
        engine, _ = read(config_text(make_deployment(spec)))
        assert engine.enable_expert_parallel == given["expertParallel"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1, 1, 1)),
        ({"executor": "mp", "tensorParallelSize": 2, "dataParallelSize": 3}, (2, 1, 3)),
        ({"executor": "mp", "pipelineParallelSize": 4}, (1, 4, 1)),
        ({"args": {"data-parallel-size": 2}}, (1, 1, 1)),  # an argument of the command
    ],
)
def test_ranks_stages_and_cores_arrive(fields: dict[str, Any], expected: tuple[int, int, int]):
    spec = {"model": {"uri": "demo://smollm2"}, "engine": fields}
    engine, _ = read(config_text(make_deployment(spec)))
    assert expected == (
        engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.data_parallel_size,
    )  # fmt: skip


def test_every_typed_field_arrives():
    spec = {
        "model": {"uri": "demo://smollm2", "servedName": "a", "aliases": ["b"]},
        "engine": {
            "dtype": "float32",
            "quantization": "int8",
            "maxModelLen": 1024,
            "maxNumSeqs": 8,
            "maxNumBatchedTokens": 512,
            "kvCacheMemory": "1.5Gi",
            "prefixCaching": False,
        },
        "resources": {"limits": {"cpu": "2500m"}},
        "rollout": {"drainTimeout": "90s"},
    }
    engine, server = read(config_text(make_deployment(spec)))
    assert engine.model == "demo://smollm2"
    assert engine.served_model_names == ("a", "b")
    assert (engine.dtype, engine.quantization) == ("float32", "int8")
    assert engine.max_model_len == 1024
    assert engine.scheduler.max_num_seqs == 8
    assert engine.scheduler.max_num_batched_tokens == 512
    assert engine.scheduler.enable_prefix_caching is False
    assert engine.kv_cache_memory_bytes == 3 * 2**29
    assert engine.num_threads == 3  # a started core is a thread
    assert server.shutdown_timeout_s == 90.0
    assert server.log_format == "json"


def test_what_the_spec_leaves_open_is_left_to_the_engine():
    assert engine_options(make_deployment(), model="demo://smollm2") == {
        "model": "demo://smollm2",
        "served-model-name": ["smollm2"],
        "device": "cpu",
        "shutdown-timeout": 120,
    }


def test_threads_are_the_limits_of_a_cpu_engine_only():
    limits = {"cpu": "4", "nvidia.com/gpu": "1"}
    options = engine_options(make_deployment({"resources": {"limits": limits}}), model="x")
    assert "num-threads" not in options


def test_reserved_arguments_are_flags_of_the_engine():
    known = {flag.flag for flag in FLAGS} | {"config"}
    assert set(RESERVED_ARGS) <= known


@pytest.mark.parametrize("name", sample_bodies())
def test_arguments_of_samples_are_flags(name: str):
    deployment = LLMDeployment.parse(sample_bodies()[name])
    assert set(deployment.engine.args) <= {flag.flag for flag in FLAGS} - set(RESERVED_ARGS)


@pytest.mark.parametrize("text", ['a"b', "a\\b", "ünïcödé 🙂", "tab\tand\nline", "#", "${x}"])
def test_any_text_survives_the_file(text: str):
    assert tomllib.loads(to_toml({"model": text, "list": [text]})) == {
        "model": text,
        "list": [text],
    }


def test_tiers_arrive_in_gib():
    tiers = {"hostMemory": "512Mi", "disk": {"size": "20Gi"}}
    engine, _ = read(config_text(make_deployment({"engine": {"kvTiers": tiers}})))
    assert (engine.kv_offloading_size, engine.kv_disk_size) == (0.5, 20.0)
    assert engine.kv_disk_path == "/var/lib/octavo/kv"
    engine, _ = read(config_text(make_deployment({"engine": {"kvTiers": {"disk": {}}}})))
    assert (engine.kv_offloading_size, engine.kv_disk_size) == (0.0, 10.0)
    shared: dict[str, Any] = {"existingClaim": "kv", "size": "1Ti"}
    engine, _ = read(config_text(make_deployment({"engine": {"kvTiers": {"shared": shared}}})))
    assert engine.kv_shared_store == "/var/lib/octavo/kv-shared"
    assert (engine.kv_shared_size, engine.kv_disk_path) == (1024.0, None)
    shared = {"uri": "s3://kv/a"}
    engine, _ = read(config_text(make_deployment({"engine": {"kvTiers": {"shared": shared}}})))
    assert (engine.kv_shared_store, engine.kv_shared_size) == ("s3://kv/a", 100.0)


def test_the_pods_of_a_group_are_stages_and_so_are_processes_on_a_laptop():
    group = {"size": 3, "secretRef": {"name": "between"}}
    engine, _ = read(config_text(make_deployment({"group": group})))
    assert (engine.pipeline_parallel_size, engine.distributed_executor_backend) == (3, "mp")


def test_the_engine_reads_what_the_pods_of_a_group_are_started_with():
    objects = desired_objects(
        make_deployment({"group": {"size": 3, "secretRef": {"name": "between"}}}), with_images()
    )
    (body,) = (each for each in objects if each["kind"] == "Deployment")
    arguments = body["spec"]["template"]["spec"]["containers"][0]["args"]
    given = dict(each.removeprefix("--").split("=", 1) for each in arguments)
    del given["config"]
    flags = to_toml({k: int(v) if v.isdecimal() else v for k, v in given.items()})
    (data,) = (each["data"] for each in objects if each["kind"] == "ConfigMap")
    engine, _ = read(data["engine.toml"] + flags)
    assert (engine.nnodes, engine.node_rank, engine.master_port) == (3, 0, 29501)
    assert engine.node_key_file == "/run/octavo/group/secret"
