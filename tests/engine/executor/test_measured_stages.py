"""Stages are cut by the time that layers take: each kind of layer is measured once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_engine.backends.native.stages import StagePlace
from octavo_engine.executor.measured_stages import measure_layer, settle_partition
from octavo_engine.weights.source import ModelFiles, resolve_model
from tests.engine.models.tiny import tiny_model
from tests.fakes.rank_processes import CONFIG, tiny_config

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_engine.config import EngineConfig

MEASURED = CONFIG.replace(pipeline_parallel_size=2, pipeline_layer_partition="measured")


def partition(head_s: float, size: int = 2) -> tuple[str | None, list[int]]:
    """Of SmolLM2, where the last layer takes so much longer for its head; what was measured."""
    measured = []

    def measure(config: EngineConfig, files: ModelFiles, place: StagePlace) -> float:
        measured.append(place.stage)
        return 0.001 + head_s * place.is_last

    config = MEASURED.replace(pipeline_parallel_size=size)
    settled = settle_partition(config, resolve_model(config.model), measure)
    return settled.pipeline_layer_partition, measured


def test_the_split_follows_the_times_and_one_layer_of_each_kind_is_measured() -> None:
    assert partition(0.0) == ("15,15", [0, 1, 29])
    assert partition(0.010)[0] == "20,10"
    assert partition(0.006, size=3)[0] == "12,12,6"


def test_a_split_by_hand_and_none_stay() -> None:
    for layers in ("14,16", None):
        config = MEASURED.replace(pipeline_layer_partition=layers)
        assert settle_partition(config, resolve_model(config.model)) is config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next", "gemma3", "deepseek-v3"])
def test_layers_of_each_kind_can_be_measured(name: str, tmp_path: Path) -> None:
    """Recurrent states, windows, latent vectors, experts."""
    config = tiny_config(
        tmp_path, name, pipeline_parallel_size=2, pipeline_layer_partition="measured"
    )
    files = resolve_model(config.model)
    split = settle_partition(config, files).pipeline_layer_partition
    assert split is not None
    assert sum(map(int, split.split(","))) == tiny_model(name).config["num_hidden_layers"]


@pytest.mark.slow
def test_a_layer_with_the_head_takes_longer() -> None:
    files = resolve_model(MEASURED.model)
    places = [StagePlace(layer, 30, (1,) * 30, has_host=True) for layer in (5, 29)]
    inner, last = (measure_layer(MEASURED, files, place) for place in places)
    assert last > 2 * inner > 0
