"""Heads that draft on a device, with layers of their own and without: answers are those without,
and what is proposed is what the reference on the CPU proposes.

Red when: a head reads the state of another row or of an earlier step, a graph leaves states where
the next pass does not look, a head's layer lies where one of the model's own is.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from octavo_engine.backends.backend import LaunchesHeads, LaunchesStateDrafts
from octavo_engine.backends.draft_sources import DraftSources
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.core.process.heartbeat import Heartbeat
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.torch_cuda.steps import LIMITS
from tests.engine.backends.torch_cuda.test_drafts import (
    DRAFT,
    answers,
    build,
    draft_of,
    greedy,
)
from tests.engine.backends.torch_cuda.variants import Variants
from tests.engine.core.test_speculation import make_engine, random_wishes, run
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.draft_heads import FakeHead, eagle, eagle3
from tests.fakes.medusa_heads import head_config, head_weights, part_of
from tests.fakes.mlp_speculators import speculator_config, speculator_part, speculator_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend

pytestmark = pytest.mark.slow

Made = tuple[TinyModel, DraftSources, str]  # the method, too


def four(name: str) -> TinyModel:
    """With layers enough to take some of."""
    return tiny_model(name, num_hidden_layers=4)


def with_head(head: FakeHead) -> Made:
    return head.model, DraftSources(head=head.part()), head.kind


def medusa(**changes: Any) -> Made:
    values = head_config(**changes)
    sources = DraftSources(heads=part_of(values, head_weights(values)))
    return tiny_model("llama"), sources, "medusa"


def speculator(**changes: Any) -> Made:
    values = speculator_config(**changes)
    sources = DraftSources(heads=speculator_part(values, speculator_weights(values)))
    return tiny_model("llama"), sources, "mlp_speculator"


KINDS: dict[str, Callable[[], Made]] = {
    "eagle": lambda: with_head(eagle(tiny_model("llama"))),
    "eagle, biased": lambda: with_head(eagle(tiny_model("llama"), bias=True)),
    "eagle of gemma2": lambda: with_head(eagle(tiny_model("gemma2"))),
    "eagle3": lambda: with_head(eagle3(four("llama"))),
    "eagle3, normed residual": lambda: with_head(eagle3(four("llama"), norm_before_residual=True)),
    "eagle3 of two": lambda: with_head(eagle3(four("qwen3"), kept=(1, 3))),
    "medusa": medusa,
    "medusa, deep": lambda: medusa(num_hidden_layers=2, medusa_fc_bias=True),
    "medusa, truncated": lambda: medusa(truncated_vocab_size=100),
    "medusa, one output": lambda: medusa(original_lm_head=True, logit_scale=0.5),
    "speculator": speculator,
    "speculator, tied": lambda: speculator(tie_weights=True, scale_input=True),
}


def settings(method: str) -> str:
    return json.dumps({"method": method, "model": "head", "num_speculative_tokens": 3})


def reference(made: Made) -> TorchBackend:
    model, sources, _ = made
    return TorchBackend(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160,
        heads=sources.heads, draft_head=sources.head,
    )  # fmt: skip


def proposals(backend: Backend, made: Made, requests: list[dict[str, Any]]) -> list[Any]:
    """All that was proposed, behind which tokens."""
    engine = make_engine(backend, num_blocks=60, speculative_config=settings(made[2]), budget=24)
    speculation = engine.scheduler._speculation
    assert speculation is not None
    take, seen = speculation.take_proposals, []

    def noting(batch: Any, result: Any) -> None:
        take(batch, result)
        for entry, proposed in result.proposed.items():
            seen.append((list(batch.sequences[entry].token_ids), list(proposed)))

    speculation.take_proposals = noting  # type: ignore[method-assign]
    run(engine, requests, random.Random(1))
    engine.close()
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_proposals_are_those_of_the_reference(name, device):
    """Greedy ones, drawn ones, and with penalties, for which each pass waits."""
    requests = [
        one | extra
        for one, extra in zip(
            greedy(4, 12), ({}, {"temperature": 0.9}, {}, {"repetition_penalty": 1.3}), strict=True
        )
    ]
    for some in (requests[:3], requests[3:]):
        made = KINDS[name]()
        backend = build(made[0], device, made[1])
        assert isinstance(backend, LaunchesHeads if made[1].heads else LaunchesStateDrafts)
        found = proposals(backend, made, some)
        assert found == proposals(reference(made), made, some)
        assert sum(len(proposed) for _, proposed in found) > 10


@pytest.mark.parametrize("name", ["eagle3", "medusa, truncated", "speculator"])
def test_what_is_replayed_proposes_the_same(name, device):
    """Triton's kernels, everything of captured steps but the graph itself."""
    made = KINDS[name]()
    backend = build(made[0], device, made[1], kernels="triton", is_replayed=True)
    found = proposals(backend, made, greedy(2, 7))
    assert found == proposals(reference(made), made, greedy(2, 7))


@pytest.mark.parametrize("name", ["eagle", "eagle3 of two", "medusa", "speculator, tied"])
def test_answers_equal_those_without_heads(name, device):
    """Drawn tokens, penalties, log-probabilities, prompts in chunks, preemption."""
    made = KINDS[name]()
    requests = random_wishes(random.Random(3), vocab=256, with_grammars=False)
    truth, _ = answers(build(made[0], device), requests, None)
    found, stats = answers(build(made[0], device, made[1]), requests, settings(made[2]), budget=16)
    assert found == truth
    assert stats.spec_draft_tokens > 50


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["eagle3", "speculator"])
def test_heads_sleep_and_wake(name, keep, device):
    made = KINDS[name]()
    backend = build(made[0], device, made[1])
    first = proposals(backend, made, greedy(2, 8))
    backend = build(made[0], device, made[1])
    backend.prepare(LIMITS, 60)
    backend.release_kv()
    backend.release_weights(keep=keep)
    backend.restore_weights()
    backend.restore_kv()
    assert proposals(backend, made, greedy(2, 8)) == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are seen in the interpreter")
@pytest.mark.parametrize("name", ["draft model", "eagle3", "medusa", "speculator"])
def test_traffic_compiles_nothing_that_the_warm_up_did_not(name, device, monkeypatch):
    variants = Variants(monkeypatch)
    model = tiny_model("llama")
    made = (model, draft_of(model), "") if name == "draft model" else KINDS[name]()
    backend = build(made[0], device, made[1], kernels="triton", is_replayed=True)
    config = settings(made[2]) if made[2] else DRAFT
    engine = make_engine(backend, num_blocks=60, speculative_config=config, budget=20)
    backend.warm_up(Heartbeat())
    known = variants.take()
    run(engine, greedy(2, 8), random.Random(1))
    new = variants.take() - known
    engine.close()
    assert not new
