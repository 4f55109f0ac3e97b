"""What `--device auto` chooses: every branch of the decision, and what the real checks refuse."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from safetensors.torch import save_file

from octavo_engine.config import EngineConfig
from octavo_engine.core import device_choice
from octavo_engine.core.build_core import build_core
from octavo_engine.core.device_choice import (
    DeviceChoice,
    ModelNeeds,
    NoNeeds,
    ThisMachine,
    choose_device,
    settle_device,
)
from octavo_engine.core.model_files import resolve
from octavo_engine.core.pooling.build import pooling_config
from octavo_engine.errors import ConfigError
from tests.engine.models.tiny import tiny_model
from tests.engine.models.tiny_poolers import tiny_embedder

GIB = 1 << 30


class Gpu(NamedTuple):
    name: str = "H100"
    free_bytes: int = 79 * GIB


H100 = Gpu()


class Machine:
    def __init__(self, lacks=None, gpu=H100) -> None:
        self._lacks, self._gpu = lacks, gpu
        self.asked_torch = False

    def lacks(self):
        return self._lacks

    def gpu(self):
        self.asked_torch = True
        return self._gpu


def needs(refused=None, by_kernels=None, weight_bytes=0):
    return SimpleNamespace(
        refused=lambda: refused, refused_by_kernels=lambda: by_kernels, weight_bytes=weight_bytes
    )


def test_a_gpu_that_refuses_nothing_is_chosen():
    assert choose_device(Machine(), needs(weight_bytes=70 * GIB)) == DeviceChoice(
        "cuda", "H100 with 79.0 GiB of memory free"
    )


@pytest.mark.parametrize(
    ("machine", "what", "reason"),
    [
        (Machine(lacks="torch is not installed"), needs(), "torch is not installed"),
        (Machine(), needs(refused="--enable-lora"), "--device cuda refuses this: --enable-lora"),
        (Machine(gpu=None), needs(), "torch sees no GPU"),
        (Machine(), needs(by_kernels="sinks"), "--device cuda refuses this: sinks"),
        (Machine(), needs(weight_bytes=80 * GIB),
         "the weights take 80.0 GiB, and H100 has 79.0 GiB of memory free"),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_is_named(machine, what, reason):
    assert choose_device(machine, what) == DeviceChoice("cpu", reason)


def test_torch_is_asked_last():
    for machine, what in (
        (Machine(lacks="there is no GPU"), needs()), (Machine(), needs(refused="it"))
    ):  # fmt: skip
        choose_device(machine, what)
        assert not machine.asked_torch


# ── this machine ──


def test_without_torch_no_file_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ThisMachine(tmp_path / "none").lacks() == "torch is not installed"


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia0", "nvhost-gpu", "dxg", "kfd"])
def test_files_of_drivers_are_seen(monkeypatch, tmp_path, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (tmp_path / "null").touch()
    assert "there is no GPU" in str(ThisMachine(tmp_path).lacks())
    (tmp_path / name).touch()
    assert ThisMachine(tmp_path).lacks() is None


def test_a_torch_that_cannot_be_imported_sees_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo_engine.backends.torch.gpu_limits", None)
    assert ThisMachine().gpu() is None


def test_a_machine_without_a_driver_imports_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from octavo_engine.core.device_choice import NoNeeds, ThisMachine, choose_device\n"
        f"choice = choose_device(ThisMachine(Path({str(tmp_path)!r})), NoNeeds())\n"
        "print(choice.device, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["cpu", "False"]


# ── what settings and models need ──


def write(folder, name="llama") -> str:
    model = tiny_model(name)
    save_file(model.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config))
    return str(folder)


def refused(model, **settings):
    config = EngineConfig(model=model, **settings)
    files = resolve(config)
    return ModelNeeds(config, files, pooling_config(config, files)).refused()


def test_a_plain_model_is_refused_nothing(tmp_path):
    model = write(tmp_path)
    assert refused(model) is None
    assert refused(model, dtype="float16", batch_invariant=True, kernels="triton") is None
    assert refused(str(tiny_embedder("bert").folder)) is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"cpu_tp": "auto"}, "--cpu-tp"),
        ({"activation_bits": 8}, "--activation-bits"),
        ({"quantization": "int8"}, "--quantization"),
    ],
)
def test_settings_of_the_cpu_alone_keep_a_model_there(tmp_path, settings, named):
    model = write(tmp_path)
    assert named in refused(model, **settings)
    # And they are what ends a start with --device cuda.
    with pytest.raises(ConfigError, match=named):
        build_core(EngineConfig(model=model, device="cuda", **settings))


def test_embeddings_in_integers_stay_on_the_cpu():
    model = str(tiny_embedder("bert").folder)
    assert "--quantization int8" in refused(model, quantization="int8")
    assert "--activation-bits" in refused(model, activation_bits=8)


def test_models_that_see_stay_where_pictures_are_computed(tmp_path, monkeypatch):
    model = write(tmp_path)
    seeing = SimpleNamespace(kind="image", noun="pictures")
    monkeypatch.setattr(device_choice, "read_media_config", lambda config: seeing)
    assert "pictures" in refused(model)
    assert refused(model, limit_mm_per_prompt="image=0") is None


def test_models_that_transformers_computes_stay_on_the_cpu(tmp_path):
    model = write(tmp_path)
    assert "transformers" in refused(model, model_impl="transformers")


def test_weights_are_as_large_as_their_files(tmp_path):
    model = write(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    config = EngineConfig(model=model)
    assert ModelNeeds(config, resolve(config), None).weight_bytes == size
    dummy = config.replace(load_format="dummy")
    assert ModelNeeds(dummy, resolve(dummy), None).weight_bytes == 0


def test_kernels_refuse_what_they_do_not_compute(tmp_path, monkeypatch):
    gpu_limits = pytest.importorskip("octavo_engine.backends.torch.gpu_limits")
    monkeypatch.setattr(gpu_limits, "settle_kernels", lambda device, choice: ("triton", "here"))
    config = EngineConfig(model=write(tmp_path, "bloom"), attention_backend="flashinfer")
    found = ModelNeeds(config, resolve(config), None)
    assert found.refused() is None
    assert "linear biases" in str(found.refused_by_kernels())
    pooler = EngineConfig(model=str(tiny_embedder("bert").folder))
    files = resolve(pooler)
    found = ModelNeeds(pooler, files, pooling_config(pooler, files))
    assert found.refused() is None and found.refused_by_kernels() is None


def test_each_rank_wants_a_gpu(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    gpu_limits = pytest.importorskip("octavo_engine.backends.torch.gpu_limits")
    monkeypatch.setattr(gpu_limits, "settle_kernels", lambda device, choice: ("triton", "here"))
    config = EngineConfig(model=write(tmp_path), tensor_parallel_size=2)
    found = ModelNeeds(config, resolve(config), None)
    assert found.refused() is None
    assert found.weight_bytes == (tmp_path / "model.safetensors").stat().st_size // 2
    for count, reason in ((1, "needs a GPU for each rank, and torch sees 1"), (2, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert (reason or "None") in str(found.refused_by_kernels())


# ── the settings afterwards ──


def test_the_choice_is_logged_in_one_line(tmp_path, caplog):
    config = EngineConfig(model=write(tmp_path))
    with caplog.at_level(logging.INFO, "octavo_engine.core.device_choice"):
        settled = settle_device(config, resolve(config), machine=Machine(lacks="no torch"))
    assert settled.device == "cpu" and settled.replace(device="auto") == config
    assert [record.message for record in caplog.records] == [
        "--device auto chose cpu: no torch"
    ]  # fmt: skip


def test_what_is_named_is_not_questioned():
    for device in ("cpu", "cuda", "torch", "sim"):
        config = EngineConfig(device=device)
        assert settle_device(config, machine=Machine()) is config


def test_no_model_in_particular():
    assert choose_device(Machine(), NoNeeds()).device == "cuda"
