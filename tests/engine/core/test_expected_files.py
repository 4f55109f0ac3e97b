"""What a model's folder lacks, or is not, is reported before any of it is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.core.model_files import resolve
from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def folder_with(folder: Path, *names: str) -> str:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    for name in names:
        (folder / name).write_text("{}")
    return str(folder)


def test_a_folder_without_weights_and_tokenizer_hears_of_both(tmp_path: Path):
    model = folder_with(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights: no .*; it has no tokenizer either: "):
        resolve(EngineConfig(model=model))


def test_missing_shards_are_named_with_the_missing_tokenizer(tmp_path: Path):
    model = folder_with(tmp_path)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 2 of the 2 files .*has no tokenizer either"):
        resolve(EngineConfig(model=model))


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        (["tokenizer.json"], {}),
        (["model.safetensors"], {}),
        (["x.tiktoken"], {}),
        ([], {"load_format": "dummy"}),
        ([], {"tokenizer": "elsewhere"}),
    ],
)
def test_one_of_them_is_reported_where_it_is_read(tmp_path: Path, files, settings):
    assert resolve(EngineConfig(model=folder_with(tmp_path, *files), **settings)) is not None
