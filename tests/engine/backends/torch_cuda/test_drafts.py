"""What drafts on a device: answers are those without, drafts are what the CPU's would be, and the
host waits once for all passes.

Red when: a draft layer lies where one of the model's own is, a pass reads another token than the
one before it drew, a step that verifies is padded with what counts, sleep loses a weight.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from octavo_engine.backends.backend import BackendLimits, LaunchesDrafts, draft_limits
from octavo_engine.backends.draft_part import DraftPart
from octavo_engine.backends.draft_sources import DraftSources
from octavo_engine.backends.torch import memory
from octavo_engine.backends.torch.cuda import CudaBackend
from octavo_engine.backends.torch.device_drafts import MODEL
from octavo_engine.backends.torch.programs import MAIN
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.torch_cuda.opening import open_as
from tests.engine.backends.torch_cuda.recorders import RunAgain
from tests.engine.backends.torch_cuda.test_pretended import build as from_settings
from tests.engine.backends.torch_cuda.test_pretended import check, said, write
from tests.engine.core.test_speculation import make_engine, random_wishes, run
from tests.engine.models.tiny import TinyModel, tiny_model

if TYPE_CHECKING:
    from octavo_engine.config import KernelChoice

pytestmark = pytest.mark.slow

DRAFT = '{"model": "draft", "num_speculative_tokens": 3}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'


def draft_of(model: TinyModel) -> DraftSources:
    return DraftSources(model=DraftPart(ModelConfig.from_hf(model.config), model.checkpoint()))


class Waiting(CudaBackend):
    """Not run ahead of, with drafts or without: `run` preempts what computes."""

    launch_waits = True


def build(
    model: TinyModel,
    device: torch.device,
    drafts: DraftSources | None = None,
    *,
    kernels: KernelChoice = "plain",
    is_replayed: bool = False,
    num_drafts: int = 3,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> CudaBackend:
    """`is_replayed`: everything of a captured step but the graph itself."""
    backend = open_as(
        Waiting, ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160,
        dtype=dtype, device=device.type, kernels=kernels, num_drafts=num_drafts,
        drafts=drafts, **options,
    )  # fmt: skip
    if is_replayed and kernels == "triton" and not backend._use_graphs:
        backend._use_graphs, backend._recorder = True, RunAgain(backend)
    return backend


def greedy(count: int = 3, length: int = 20, **extra: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": [7 * index + 1, 9, 40] * (1 + 3 * index), "request_id": str(index),
         "temperature": 0.0, "max_tokens": length, "ignore_eos": True, **extra}
        for index in range(count)
    ]  # fmt: skip


def answers(
    backend: CudaBackend, requests: list[dict[str, Any]], config: str | None, **options: Any
):
    """Tokens by request, and the counters."""
    engine = make_engine(backend, num_blocks=60, speculative_config=config, **options)
    found = {
        name: output.tokens for name, output in run(engine, requests, random.Random(1)).items()
    }
    stats = engine.stats()
    engine.close()
    return found, stats


@pytest.mark.parametrize("draft", ["llama", "qwen3", "gemma2"])
def test_answers_equal_those_without_a_draft_model(draft, device):
    """Drawn tokens, penalties, log-probabilities, prompts in chunks, preemption."""
    rng = random.Random(2)
    requests = random_wishes(rng, vocab=256, with_grammars=False)
    model = tiny_model("llama")
    truth, _ = answers(build(model, device), requests, None)
    drafted = 0
    for budget, caching in ((16, True), (64, False)):
        backend = build(model, device, draft_of(tiny_model(draft)))
        assert isinstance(backend, LaunchesDrafts) and backend.has_draft
        found, stats = answers(backend, requests, DRAFT, budget=budget, caching=caching)
        assert found == truth
        drafted += stats.spec_draft_tokens
    assert drafted > 100


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.8}, {"repetition_penalty": 1.3}])
def test_a_draft_model_that_is_the_model_is_always_right(extra, device):
    """Its draws are those of the model, drawn ones too; with penalties each pass waits."""
    model = tiny_model("llama")
    truth, _ = answers(build(model, device), greedy(**extra), None)
    found, stats = answers(build(model, device, draft_of(model)), greedy(**extra), DRAFT, budget=24)
    assert found == truth
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 20


def test_steps_that_verify_and_passes_that_draft_are_replayed(device, monkeypatch):
    model = tiny_model("llama")
    requests = greedy(2, 11, temperature=0.8)
    truth, _ = answers(build(model, device), requests, None)
    backend = build(model, device, draft_of(model), kernels="triton", is_replayed=True)
    captured: list[set[Any]] = []
    forget = backend._forget_graphs

    def noting() -> None:
        assert backend._graphs is not None and backend._drafts is not None
        assert backend._drafts._graphs is not None
        captured.extend((backend._graphs.captured, backend._drafts._graphs.captured))
        forget()

    monkeypatch.setattr(backend, "_forget_graphs", noting)
    found, stats = answers(backend, requests, DRAFT)
    assert found == truth
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 5
    own, drafts = captured[:2]
    assert any(isinstance(bucket, tuple) and bucket[:2] == (MAIN, True) for bucket in own)
    # A pass over what was accepted, and one of a token of each sequence.
    assert {bucket[:2] for bucket in drafts} == {(MODEL, True), (MODEL, False)}
    assert backend._few.is_walked and backend._few.width == 4


def test_the_host_waits_once_for_all_passes(device, monkeypatch):
    """Tokens of a pass are awaited on the device; the order is launch, launch, launch, wait."""
    model = tiny_model("llama")
    backend = build(model, device, draft_of(model))
    events: list[str] = []
    launch = backend.launch_draft

    def noting(step: Any, sampling: Any) -> Any:
        events.append("launch" if step.awaited is None else "launch awaiting")
        landed = launch(step, sampling)
        wait = landed.wait

        def waiting() -> Any:
            events.append("wait")
            return wait()

        monkeypatch.setattr(landed, "wait", waiting)
        return landed

    monkeypatch.setattr(backend, "launch_draft", noting)
    answers(backend, greedy(2, 16), DRAFT)
    line = " ".join(events)
    assert "launch launch awaiting launch awaiting wait wait wait" in line
    assert "wait launch awaiting" not in line


@pytest.mark.usefixtures("row_by_row")
def test_batch_invariant_answers_have_the_bits_of_those_without(device):
    """In sixteen bits on a device, too: tokens and log-probabilities."""
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_available() else torch.float32
    model, found = tiny_model("llama"), []
    for drafts in (None, draft_of(model)):
        backend = build(
            model, device, drafts, kernels="triton", dtype=dtype, batch_invariant=True,
            is_replayed=True,
        )  # fmt: skip
        engine = make_engine(
            backend, num_blocks=60, speculative_config=None if drafts is None else DRAFT
        )
        requests = greedy(2, 10, logprobs=2)
        found.append({k: v.all for k, v in run(engine, requests, random.Random(1)).items()})
        if drafts is not None:
            assert engine.stats().spec_accepted_tokens > 5
        engine.close()
    assert found[0] == found[1]


def test_steps_that_verify_drafts_from_the_text_are_walked_too(device, monkeypatch):
    model = tiny_model("llama")
    requests = greedy(2, 9)
    truth, _ = answers(build(model, device), requests, None)
    backend = build(model, device, kernels="triton", is_replayed=True)
    seen: list[int] = []
    attend = backend._kernels.attend

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(args[2].width)
        return attend(*args, **options)

    monkeypatch.setattr(backend._kernels, "attend", noting)
    found, stats = answers(backend, requests, NGRAM)
    assert found == truth
    assert stats.spec_draft_tokens > 0 and 4 in seen


@pytest.mark.parametrize("kernels", ["plain", pytest.param("triton", marks=pytest.mark.gpu)])
def test_an_engine_drafts_as_its_settings_say(kernels, tmp_path, request):
    """From files and flags to answers, on a device that is pretended where there is none."""
    if not torch.cuda.is_available():
        request.getfixturevalue("pretended")
    folder = write(tmp_path, "llama")
    settings = json.dumps({"model": folder, "num_speculative_tokens": 3})
    truth = said(from_settings(folder, device="cuda", kernels="plain"))
    engine = from_settings(folder, device="cuda", kernels=kernels, speculative_config=settings)
    backend = engine.executor._backend
    assert backend.has_draft
    check(said(engine), truth)
    stats = engine.stats()
    assert stats.spec_accepted_tokens > 0
    assert bool(backend._drafts._graphs.captured) == (kernels == "triton")
    engine.close()


def test_memory_of_a_draft_model_is_counted_before_kv_gets_its_share(request):
    if not torch.cuda.is_available():
        request.getfixturevalue("pretended")
    model = tiny_model("llama")
    limits = BackendLimits(max_tokens=512, max_seqs=8, max_logit_rows=72, max_model_len=160)
    left = []
    for drafts in (None, draft_of(model)):
        backend = build(model, torch.device("cuda"), drafts, kernels="triton")
        free = memory.device_memory(backend.device).free_bytes
        for_kv = backend.kv_memory(limits, 1.0)
        assert for_kv is not None
        left.append(free - for_kv)
        backend.close()
    own = draft_limits(limits)
    assert left[1] - left[0] > memory.step_bytes(ModelConfig.from_hf(model.config), own, 4)


@pytest.mark.parametrize("keep", [True, False])
def test_a_draft_model_sleeps_and_wakes(keep, device):
    model = tiny_model("llama")
    backend = build(model, device, draft_of(model))
    engine = make_engine(backend, num_blocks=60, speculative_config=DRAFT)
    found = []
    for turn in range(2):
        requests = [one | {"request_id": f"{turn} {one['request_id']}"} for one in greedy(2)]
        found.append([v.tokens for _, v in sorted(run(engine, requests, random.Random(1)).items())])
        engine.reset_prefix_cache()
        backend.release_kv()
        backend.release_weights(keep=keep)
        backend.restore_weights()
        backend.restore_kv()
    assert found[0] == found[1]
    assert engine.stats().spec_accepted_tokens == engine.stats().spec_draft_tokens > 20
    engine.close()
