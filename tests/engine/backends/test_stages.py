"""Layers spread over stages: an answer's bits are those of one process, wherever models are cut."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.graph import Add, Graph, Value
from octavo_engine.backends.native.recorder import Recorder
from octavo_engine.backends.native.stages import (
    StagePlace,
    balance,
    layer_names,
    parse_layers,
    plan_cut,
)
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.ops import layer_output
from tests.engine.backends.ranks import MAX_MODEL_LEN, alone, mixed_steps
from tests.engine.backends.stages import ChainedStages
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import FAMILIES, tiny_model

if TYPE_CHECKING:
    from typing import Any


# Their layers read the embeddings too.
READ_BACK = ("zamba2", "zamba2-one-block", "gemma3n", "gemma3n-other")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in READ_BACK])
def test_stages_of_one_layer_give_the_bits_of_one_process(name: str) -> None:
    model, copies = tiny_model(name), name not in RECURRENT
    num_layers = ModelConfig.from_hf(model.config).num_layers
    stages = ChainedStages(model, num_layers)
    logits = mixed_steps(stages, copies=copies)
    np.testing.assert_array_equal(logits, mixed_steps(alone(model), copies=copies))
    stages.close()


@pytest.mark.parametrize("name", READ_BACK)
def test_a_model_whose_layers_read_the_embeddings_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be cut before layer 1: later layers"):
        model = tiny_model(name)
        ChainedStages(model, 2, layers=(1, model.config["num_hidden_layers"] - 1))


@pytest.mark.parametrize("layers", [None, (1, 3), (3, 1), (1, 2, 1)])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"quantization": "int4", "activation_bits": 8}),
        ("qwen3", {"dtype": "f32", "kv_cache_dtype": "int8"}),
        ("gemma3", {"quantization": "int8"}),
        ("gemma2", {"is_fused": False}),
    ],
    ids=["int4", "f32 int8 kv", "windows int8", "unfused"],
)
def test_cuts_and_formats(
    name: str, options: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    model = tiny_model(name, num_hidden_layers=4)
    stages = ChainedStages(model, len(layers or (0, 0)), layers=layers, **options)
    logits = mixed_steps(stages, copies=True)
    np.testing.assert_array_equal(logits, mixed_steps(alone(model, **options), copies=True))
    stages.close()


def test_a_stage_holds_its_part_only() -> None:
    model = tiny_model("smollm2", num_hidden_layers=4)  # whose head is its embedding
    read: list[set[str]] = []
    for index in range(3):
        checkpoint = model.checkpoint()
        names: set[str] = set()
        whole = checkpoint.read

        def noted(
            name: str, shape: tuple[int, ...], *, names: set[str] = names, whole: Any = whole
        ) -> Any:
            names.add(name)
            return whole(name, shape)

        checkpoint.read = noted  # type: ignore[method-assign]
        backend = NativeBackend(
            ModelConfig.from_hf(model.config),
            checkpoint,
            max_model_len=MAX_MODEL_LEN,
            num_threads=1,
            stage=StagePlace(index, 3, (1, 1, 2)),
        )
        assert len(backend.own_layout.specs) == (1, 1, 2)[index]
        one = alone(tiny_model("smollm2", num_hidden_layers=1))
        assert backend.kv_bytes_per_block == 4 * one.kv_bytes_per_block
        backend.close()
        read.append({name for name in names if "norm" not in name})
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in read]
    assert layers == [{"0"}, {"1"}, {"2", "3"}]
    assert ["model.embed_tokens.weight" in names for names in read] == [True, False, True]


def test_a_missing_tensor_of_another_stage_is_named() -> None:
    model = tiny_model("llama")
    tensors = dict(model.tensors)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    broken = type(model)(model.name, model.reference, model.config, tensors)
    with pytest.raises(ModelError, match=r"lacks 1 tensor .*layers\.1\.mlp\.down_proj"):
        NativeBackend(
            ModelConfig.from_hf(model.config),
            broken.checkpoint(),
            max_model_len=MAX_MODEL_LEN,
            stage=StagePlace(0, 2),
        )


@pytest.mark.parametrize(
    ("costs", "count", "sizes"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([1, 1, 1, 4], 2, [3, 1]),  # a head as heavy as three layers
        ([9, 1, 1, 1], 3, [1, 2, 1]),
        ([5, 5, 5], 3, [1, 1, 1]),
        ([1, 1, 1, 1, 1, 1, 1, 1], 3, [3, 3, 2]),
        ([0, 0, 0, 0], 3, [2, 1, 1]),
    ],
)
def test_layers_are_shared_out_evenly(costs: list[int], count: int, sizes: list[int]) -> None:
    found = balance(costs, count)
    assert sum(found) == len(costs) and len(found) == count and min(found) >= 1
    starts = np.cumsum([0, *found])
    wanted = np.cumsum([0, *sizes])
    costliest = [max(sum(costs[a:b]) for a, b in pairwise(cuts)) for cuts in (starts, wanted)]
    assert costliest[0] == costliest[1]


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    def forward(recorder: Recorder, *, reads_back: bool) -> Value:
        x = recorder.input(16)
        first = recorder.keep(layer_output(0), recorder.scale(x, 3.0))
        second = recorder.keep(layer_output(1), recorder.scale(first, 2.0))
        return recorder.add(second, x) if reads_back else recorder.scale(second, 1.0)

    def graph(names: list[str], *, reads_back: bool) -> Graph:
        recorder = Recorder(names)
        result = forward(recorder, reads_back=reads_back)
        return Graph(tuple(recorder.instructions), result, tuple(recorder.kept.items()))

    names, place = layer_names(2), StagePlace(0, 2)
    whole = graph(names, reads_back=False)
    assert plan_cut(whole, place, num_layers=2, what="a model").bounds == (0, 1, 2)
    with pytest.raises(ConfigError, match="a model cannot be cut between its layers"):
        plan_cut(graph([], reads_back=False), place, num_layers=2, what="a model")
    reading = graph(names, reads_back=True)
    assert isinstance(reading.instructions[-1], Add)
    with pytest.raises(ConfigError, match="a model cannot be cut before layer 1: later layers"):
        plan_cut(reading, place, num_layers=2, what="a model")
    with pytest.raises(ConfigError, match="size 3 is more than the 2 layers of a model"):
        plan_cut(whole, StagePlace(0, 3), num_layers=2, what="a model")
    with pytest.raises(ConfigError, match="partition 2,2 is of 4 layers; the model has 2"):
        plan_cut(whole, StagePlace(0, 2, (2, 2)), num_layers=2, what="a model")


@pytest.mark.parametrize("text", ["", "1", "1,0", "1,x", "1,2,3", "1,-2"])
def test_a_partition_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--pipeline-layer-partition must be a number of layers"):
        parse_layers(text, 2)


def test_a_partition() -> None:
    assert parse_layers("12, 18", 2) == (12, 18)
    assert parse_layers(None, 2) is None
