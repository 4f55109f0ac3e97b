"""Heads learn what a model writes next, and what is written is what the engine loads."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import medusa
from benchmarks.medusa import Answer
from octavo_engine.backends.head_files import open_heads
from octavo_engine.config import EngineConfig
from octavo_engine.models.config import ModelConfig
from tests.engine.core.test_speculation import make_engine, run
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.medusa_heads import native

if TYPE_CHECKING:
    from pathlib import Path

WISHES: list[dict[str, Any]] = [
    {"prompt": [7 * index + 1, 9, 40], "request_id": str(index), "temperature": 0.0,
     "max_tokens": 40, "ignore_eos": True}
    for index in range(6)
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def answers(model: TinyModel) -> list[Answer]:
    engine = make_engine(native(model, None), num_blocks=60)
    outputs = run(engine, WISHES, random.Random(0))
    engine.close()
    return [Answer([*wish["prompt"], *outputs[wish["request_id"]].tokens], 3) for wish in WISHES]


@pytest.fixture
def states(model: TinyModel, tmp_path: Path) -> medusa.HiddenStates:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return medusa.HiddenStates(str(folder), num_threads=1)


def test_each_token_has_the_state_that_it_was_sampled_from(
    model: TinyModel, answers: list[Answer], states: medusa.HiddenStates
) -> None:
    for answer in answers:
        with torch.inference_mode():
            ids = torch.tensor([answer.token_ids[:-1]])
            expected = model.reference.model(input_ids=ids)[0][0, 2:].numpy()
        got = states.of(answer)
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, atol=0.1 * np.abs(expected).max())
    states.close()


def test_head_k_is_to_guess_the_token_behind_the_k_next_ones(
    answers: list[Answer], states: medusa.HiddenStates
) -> None:
    examples = medusa.examples_of(states, answers[:2], 3)
    assert len(examples.hidden) == len(examples.targets) == 80
    written = answers[0].token_ids[3:]
    assert examples.targets[0].tolist() == written[1:4]
    assert examples.targets[37].tolist() == [*written[38:40], medusa.NO_TARGET]
    assert examples.targets[39].tolist() == [medusa.NO_TARGET] * 3
    states.close()


def test_common_tokens_are_the_most_frequent_ones_filled_up() -> None:
    answers = [Answer([5, 5, 5, 7, 7, 2], 1)]
    assert medusa.common_tokens(answers, 2, 10).tolist() == [5, 7]
    assert medusa.common_tokens(answers, 5, 10).tolist() == [0, 1, 2, 5, 7]
    assert medusa.common_tokens(answers, 12, 10).tolist() == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [256, 100])
def test_trained_heads_draft_what_the_model_writes(
    num_tokens: int,
    model: TinyModel,
    answers: list[Answer],
    states: medusa.HiddenStates,
    tmp_path: Path,
) -> None:
    """From states to files to the engine: most of what they draft is accepted."""
    token_ids = medusa.common_tokens(answers, num_tokens, 256)
    columns = np.full(257, medusa.NO_TARGET)
    columns[token_ids] = np.arange(len(token_ids))
    examples = medusa.examples_of(states, answers, 3)
    examples = examples._replace(targets=columns[examples.targets])
    heads = medusa.make_heads(3, states.output_rows(token_ids))
    states.close()
    before = medusa.score(heads, examples)
    medusa.fit(heads, examples, epochs=60, batch=64, rate=3e-3, seed=0)
    after = medusa.score(heads, examples)
    assert after.acceptance_length > 3 > before.acceptance_length + 0.5
    medusa.write_heads(tmp_path / "heads", heads, token_ids, 256)
    speculation = json.dumps({"method": "medusa", "model": str(tmp_path / "heads")})
    config = EngineConfig(device="cpu", max_model_len=160, speculative_config=speculation)
    part = open_heads(config, ModelConfig.from_hf(model.config))
    engine = make_engine(native(model, part), num_blocks=60, speculative_config=speculation)
    outputs = run(engine, WISHES, random.Random(1))
    stats = engine.stats()
    engine.close()
    for wish, answer in zip(WISHES, answers, strict=True):
        assert outputs[wish["request_id"]].tokens == answer.token_ids[3:]
    assert stats.spec_accepted_tokens > 0.7 * stats.spec_draft_tokens > 50
