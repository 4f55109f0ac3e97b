"""An MLP speculator changes no bit of any output, and each head follows the one before it.

Red when: a head is given the state or the token of another row, or of another head.
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
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from tests.engine.core.test_speculation import (
    check_drafts_change_no_bit,
    make_engine,
    random_wishes,
    run,
)
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.medusa_heads import native, reference, write_heads
from tests.fakes.mlp_speculators import (
    speculator_config,
    speculator_logits,
    speculator_part,
    speculator_weights,
)

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_engine.backends.head_files import HeadsPart
    from octavo_engine.backends.native.backend import NativeBackend

SPECULATOR = '{"method": "mlp_speculator", "model": "heads", "num_speculative_tokens": 3}'
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "of the model's size": {"inner_dim": 0},
    "scaled": {"scale_input": True},
    "tied": {"tie_weights": True, "scale_input": True, "n_predict": 4},
}


def exact(model: TinyModel, heads: HeadsPart) -> NativeBackend:
    return native(model, heads, dtype="f32")


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_random_speculator_changes_no_bit(*, is_fused: bool) -> None:
    """Grammars, penalties, log-probabilities, preemption, chunks: see `random_wishes`."""
    rng, model, values = random.Random(3), tiny_model("llama"), speculator_config()
    heads = speculator_part(values, speculator_weights(values))
    wishes = random_wishes(rng, vocab=256, with_grammars=True)
    make = partial(native, model, is_fused=is_fused)
    check_drafts_change_no_bit(make, heads, SPECULATOR, wishes, rng)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [exact, reference])
def test_each_head_follows_the_one_before_it(make: Any, form: str) -> None:
    """Against transformers' hidden states and the speculator in plain torch, greedily."""
    torch.set_num_threads(1)
    model, values = tiny_model("llama"), speculator_config(**FORMS[form])
    weights = speculator_weights(values)
    engine = make_engine(
        make(model, speculator_part(values, weights)), num_blocks=60, speculative_config=SPECULATOR
    )
    seen: list[tuple[list[int], list[int]]] = []
    speculation = engine.scheduler._speculation
    assert speculation is not None
    take = speculation.take_proposals

    def noting(batch: Any, result: Any) -> None:
        take(batch, result)
        for entry, proposed in result.proposed.items():
            seen.append((list(batch.sequences[entry].token_ids), list(proposed)))

    speculation.take_proposals = noting  # type: ignore[method-assign]
    wishes: list[dict[str, Any]] = [
        {"prompt": [7 * index + 1, 9, 40] * (1 + 7 * index), "request_id": str(index),
         "temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
        for index in range(4)
    ]  # fmt: skip
    run(engine, wishes, random.Random(1))
    engine.close()
    assert sum(len(proposed) for _, proposed in seen) > 60
    for tokens, proposed in seen:
        with torch.inference_mode():
            hidden = model.reference.model(input_ids=torch.tensor([tokens[:-1]]))[0][0, -1].float()
            behind = [tokens[-1], *proposed[:-1]]
            for token, logits in zip(
                proposed, speculator_logits(values, weights, hidden, behind), strict=True
            ):
                assert logits[token] >= logits.max() - 0.001 * logits.abs().max()


def config_for(folder: Path) -> EngineConfig:
    speculation = {"method": "mlp_speculator", "model": str(folder), "num_speculative_tokens": 2}
    return EngineConfig(device="cpu", max_model_len=64, speculative_config=json.dumps(speculation))


@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("form", FORMS)
def test_files_as_ibm_publishes_them(form: str, prefix: str, tmp_path: Path) -> None:
    """Two heads are loaded: as many as are to be guessed."""
    model, values = tiny_model("llama"), speculator_config(**FORMS[form])
    weights = speculator_weights(values)
    # Tensors that are shared may be written once or several times.
    stored = {name: tensor.clone() for name, tensor in weights.items()}
    if form == "tied" and not prefix:
        stored = {name: t for name, t in stored.items() if ".0." in name or "proj.1." in name}
    write_heads(tmp_path, values, stored, prefix=prefix)
    heads = open_heads(config_for(tmp_path), ModelConfig.from_hf(model.config))
    assert heads is not None and heads.num_heads == 2
    backend = exact(model, heads)
    loaded = backend._in_memory.heads
    assert loaded is not None
    loaded.prepare(3, is_fused=True, activation_bits=16)
    states = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    first = np.array([5, 200, 31], np.int32)
    got, following = (part.copy() for part in loaded.logits(0, states, first))
    drafted = got.argmax(-1).astype(np.int32)
    then, _ = loaded.logits(1, following, drafted)
    for row in range(3):
        expected = speculator_logits(
            values, weights, torch.from_numpy(states[row]), [int(first[row]), int(drafted[row])]
        )
        np.testing.assert_allclose(got[row], expected[0], atol=1e-3)
        np.testing.assert_allclose(then[row], expected[1], atol=1e-3)
    backend.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 300}, "their vocab_size is 300 and the model's 256"),
        ({"emb_dim": 32}, "their hidden_size is 32 and the model's 64"),
    ],
)
def test_a_speculator_that_does_not_fit_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = speculator_config(**values)
    write_heads(tmp_path, given, speculator_weights(given))
    with pytest.raises(ConfigError, match=message):
        open_heads(config_for(tmp_path), ModelConfig.from_hf(tiny_model("llama").config))
