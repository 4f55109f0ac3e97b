"""Medusa's heads change no bit of any output, and propose from the state that sampled.

Red when: a head is given the state of another row, a draft token is noted at another place, what is
kept for the heads moves a bit of the logits.
"""

from __future__ import annotations

import json
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.head_files import open_heads
from octavo_engine.config import EngineConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.core.test_speculation import (
    check_drafts_change_no_bit,
    make_engine,
    random_wishes,
    run,
)
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.medusa_heads import (
    head_config,
    head_weights,
    native,
    part_of,
    reference,
    reference_logits,
    write_heads,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo_engine.backends.backend import Backend
    from octavo_engine.backends.head_files import HeadsPart

HEADS = '{"method": "medusa", "model": "heads", "num_speculative_tokens": 3}'
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep, biased": {"num_hidden_layers": 2, "medusa_fc_bias": True},
    "no layers": {"num_hidden_layers": 0},
    "one output": {"original_lm_head": True, "logit_scale": 0.5},
    "truncated": {"truncated_vocab_size": 100},
}


def config_for(folder: Path, **changes: Any) -> EngineConfig:
    speculation = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 4}
    return EngineConfig(
        device="cpu", max_model_len=64, speculative_config=json.dumps(speculation)
    ).replace(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v2"])
def test_random_heads_change_no_bit(name: str, *, is_fused: bool) -> None:
    """Grammars, penalties, log-probabilities, preemption, chunks: see `random_wishes`."""
    rng = random.Random(3)
    model, values = tiny_model(name), head_config()
    heads = part_of(values, head_weights(values))
    pages = len(native(model, None).cache_layout.groups)
    wishes = random_wishes(rng, vocab=256, with_grammars=True)
    make = partial(native, model, is_fused=is_fused)
    check_drafts_change_no_bit(make, heads, HEADS, wishes, rng, pages=pages)


def proposals(
    make: Callable[[TinyModel, HeadsPart | None], Backend],
    model: TinyModel,
    heads: HeadsPart,
    wishes: list[dict[str, Any]],
) -> list[tuple[list[int], list[int]]]:
    """All that was proposed, behind which tokens."""
    engine = make_engine(make(model, heads), num_blocks=60, speculative_config=HEADS)
    seen: list[tuple[list[int], list[int]]] = []
    speculation = engine.scheduler._speculation
    assert speculation is not None
    take = speculation.take_proposals

    def noting(batch: Any, result: Any) -> None:
        take(batch, result)
        for entry, proposed in result.proposed.items():
            seen.append((list(batch.sequences[entry].token_ids), list(proposed)))

    speculation.take_proposals = noting  # type: ignore[method-assign]
    run(engine, wishes, random.Random(1))
    engine.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [native, reference])
def test_each_head_guesses_from_the_state_that_sampled(make: Any, form: str) -> None:
    """Against transformers' hidden states and the heads in plain torch, greedily."""
    model, values = tiny_model("llama"), head_config(**FORMS[form])
    weights = head_weights(values)
    wishes: list[dict[str, Any]] = [
        {"prompt": [7 * index + 1, 9, 40] * (1 + 7 * index), "request_id": str(index),
         "temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
        for index in range(4)
    ]  # fmt: skip
    seen = proposals(make, model, part_of(values, weights), wishes)
    assert sum(len(proposed) for _, proposed in seen) > 100
    num_alike = num_all = 0
    for tokens, proposed in seen:
        with torch.inference_mode():
            hidden = model.reference.model(input_ids=torch.tensor([tokens[:-1]]))[0][0, -1:]
        for head, token in enumerate(proposed):
            logits = reference_logits(values, weights, head, hidden.float().numpy())[0]
            num_all += 1
            # bf16 products: another token is as good where both have almost the same logit.
            spread = np.abs(logits[np.isfinite(logits)]).max()
            num_alike += bool(logits[token] >= logits.max() - 0.05 * spread)
    assert num_alike == num_all


@pytest.mark.slow
def test_a_served_model_takes_heads_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the settings to the answers. Of two heads no more than two tokens are expected."""
    monkeypatch.setattr(StepTimeModel, "observe", lambda *_: None)  # whatever this machine's times
    values = head_config(hidden_size=576, vocab_size=49152, num_heads=2, truncated_vocab_size=512)
    weights = head_weights(values | {"vocab_size": 512})
    write_heads(tmp_path, values, weights | {"token_map": torch.arange(512)})
    results: list[Any] = []
    for config in (None, {"method": "medusa", "model": str(tmp_path)}):
        with LLM(
            "demo://smollm2", max_model_len=256, kv_cache_memory_bytes=1 << 26,
            speculative_config=config,
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0.8, seed=4, max_tokens=24, logprobs=1, n=2)
            outputs = llm.generate(["The sea is", "A list:"], params, use_tqdm=False)
            results.append([output.outputs for output in outputs])
            stats = llm._engine.stats()  # type: ignore[attr-defined]  # no public counter offline
    assert results[0] == results[1]
    assert stats.spec_draft_tokens > 10 and stats.spec_draft_tokens <= 2 * stats.spec_drafts


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("form", FORMS)
def test_files_as_vllm_reads_them(form: str, prefix: str, tmp_path: Path) -> None:
    """Four heads of five are loaded: as many as are to be guessed."""
    model, values = tiny_model("llama"), head_config(num_heads=5, **FORMS[form])
    weights = head_weights(values)
    write_heads(tmp_path, values, weights, prefix=prefix)
    heads = open_heads(config_for(tmp_path), ModelConfig.from_hf(model.config))
    assert heads is not None and heads.num_heads == 4
    backend = native(model, heads)
    hidden = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    medusa = backend._in_memory.heads
    assert medusa is not None
    medusa.prepare(3, is_fused=True, activation_bits=16)
    for head in range(4):
        expected = reference_logits(values, weights, head, hidden)
        got, _ = medusa.logits(head, hidden, np.zeros(3, np.int32))
        assert got.shape == expected.shape and np.array_equal(got == -np.inf, expected == -np.inf)
        known = np.isfinite(expected)
        np.testing.assert_allclose(got[known], expected[known], atol=0.02 * expected[known].max())
    backend.close()


def test_heads_cut_to_some_tokens_may_be_stored_cut(tmp_path: Path) -> None:
    model, values = tiny_model("llama"), head_config(truncated_vocab_size=100)
    weights = head_weights(values)
    cut = {
        name: tensor[weights["token_map"]] if name.startswith("lm_heads") else tensor
        for name, tensor in weights.items()
    }
    logits = []
    for name, stored in (("whole", weights), ("cut", cut)):
        write_heads(tmp_path / name, values, stored)
        heads = open_heads(config_for(tmp_path / name), ModelConfig.from_hf(model.config))
        backend = native(model, heads)
        medusa = backend._in_memory.heads
        assert medusa is not None
        medusa.prepare(1, is_fused=True, activation_bits=16)
        logits.append(
            medusa.logits(1, np.ones((1, 64), np.float32), np.zeros(1, np.int32))[0].copy()
        )
        backend.close()
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({"vocab_size": 300}, {}, "their vocab_size is 300 and the model's 256"),
        ({"hidden_size": 32}, {}, "their hidden_size is 32 and the model's 64"),
        ({}, {"device": "sim"}, "a set of heads is computed by --device cpu, cuda and torch only"),
        ({}, {"tensor_parallel_size": 2}, "a set of heads is not computed with --tensor"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    values: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = head_config(**values)
    write_heads(tmp_path, given, head_weights(given))
    model = ModelConfig.from_hf(tiny_model("llama").config)
    with pytest.raises(ConfigError, match=message):
        open_heads(config_for(tmp_path, **changes), model)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "have truncated_vocab_size, but no tensor token_map"),
        (torch.arange(99), "must be 100 different tokens below 256"),
        (torch.arange(200, 300), "must be 100 different tokens below 256"),
        (torch.zeros(100, dtype=torch.int64), "must be 100 different tokens below 256"),
    ],
)
def test_a_token_map_that_is_wrong_is_refused(
    tokens: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    given = head_config(truncated_vocab_size=100)
    weights = head_weights(given)
    del weights["token_map"]
    write_heads(tmp_path, given, weights | ({} if tokens is None else {"token_map": tokens}))
    with pytest.raises(ModelError, match=message):
        open_heads(config_for(tmp_path), ModelConfig.from_hf(tiny_model("llama").config))
