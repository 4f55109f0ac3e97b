"""Features in pairs on tiny random models: each answer is bit for bit that of a plain engine in
which the request runs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from octavo_engine.backends.adapters import AdapterLimits
from octavo_engine.backends.draft_part import DraftPart
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.invariants import check_invariants
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.weights.adapter import read_adapter
from tests.engine.models.tiny import tiny_model
from tests.engine.models.tiny_seeing import VOCABULARY, prompt_of, seeing_model, tile
from tests.fakes.adapters import write_adapter
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from octavo_engine.core.engine import Engine
    from octavo_engine.state.media import MediaItem
    from octavo_engine.state.request import EngineRequest

MEDIA = seeing_model("llava").media
RED, BLUE, GREEN = (tile(MEDIA, seed) for seed in range(3))
TEXT = [5, 6, 7]
NGRAMS = '{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}'
DRAFT = '{"model": "draft", "num_speculative_tokens": 3}'
LAYERS = {
    f"model.layers.{layer}.{name}": size
    for layer in range(2)
    for name, size in {"self_attn.q_proj": (64, 64), "mlp.down_proj": (96, 64)}.items()
}
Said = tuple[list[int], list[float]]


@pytest.fixture(autouse=True)
def _whatever_times_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide whether to load blocks and to speculate."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(StepTimeModel, "observe", lambda *_: None)


def seeing_engine(
    *, blocks: int = 64, seqs: int = 4, tokens: int = 64, lora: bool = False, **settings: Any
) -> Engine:
    options: dict[str, Any] = {}
    if lora:
        options["adapters"] = AdapterLimits(2, 16)
    if settings.get("speculative_config") == DRAFT:
        small = tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=512)
        options["draft"] = DraftPart(ModelConfig.from_hf(small.config), small.checkpoint())
    backend = seeing_model("llava").backend("f32", **options)
    config = EngineConfig(
        device="sim", max_model_len=256, enable_lora=lora, max_loras=2,
        sim=SimConfig(vocab_size=VOCABULARY, kv_blocks=blocks),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        **settings,
    )  # fmt: skip
    engine, _ = build_engine(config, backend=backend)
    return engine


def ask(*parts: Any, max_tokens: int = 8, adapter: AdapterRef | None = None) -> EngineRequest:
    tokens, spans, items = prompt_of(MEDIA, *parts)
    return make_request(
        tokens, media=spans, media_items=items, adapter=adapter, max_tokens=max_tokens,
        temperature=0.0, logprobs=0, ignore_eos=True,
    )  # fmt: skip


def run(engine: Engine, *requests: EngineRequest) -> list[Said]:
    """Tokens and log-probabilities of each."""
    said: dict[str, Said] = {request.request_id: ([], []) for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            tokens, logprobs = said[output.request_id]
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or []]
        assert engine.take_refused() == []
        check_invariants(engine.scheduler)
    return list(said.values())


def alone(engine: Engine, *requests: EngineRequest) -> list[Said]:
    """Each by itself, in an engine that finds nothing cached."""
    said = []
    for request in requests:
        fresh = msgspec.structs.replace(request, request_id=f"{request.request_id}-alone")
        said += run(engine, fresh)
        engine.reset_prefix_cache()
    return said


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    root = tmp_path_factory.mktemp("adapters")
    paths = [str(write_adapter(root / str(seed), LAYERS, seed=seed)) for seed in range(3)]
    return [AdapterRef(f"a{n}", path, read_adapter(path).digest) for n, path in enumerate(paths)]


def broken(item: MediaItem) -> MediaItem:
    """Its pixels are too few: the encoder raises."""
    return type(item)(item.digest, 1, 1, b"")


def with_broken_pictures(request: EngineRequest) -> EngineRequest:
    return msgspec.structs.replace(request, media_items=tuple(map(broken, request.media_items)))


def run_out(engine: Engine) -> dict[str, str | None]:
    """How each ends."""
    ended = {}
    while engine.has_work:
        ended.update({o.request_id: o.finish_reason for o in engine.step().outputs})
        check_invariants(engine.scheduler)
    return ended


def test_a_failed_picture_does_not_leave_another_adapter_in_a_slot(refs: list[AdapterRef]) -> None:
    engine = seeing_engine(lora=True)
    for each in refs[:2]:
        run(engine, ask(TEXT, adapter=each))
    bad = ask(RED, [9], adapter=refs[2])  # its step was to put the adapter into a slot
    engine.add(with_broken_pictures(bad))
    assert run_out(engine) == {bad.request_id: "error"}
    wanted = ask([9, 8, 7], adapter=refs[2])
    assert run(engine, wanted) == alone(seeing_engine(lora=True), wanted)


def test_a_failed_picture_ends_all_whose_rows_its_step_was_to_fill() -> None:
    """A step encodes one picture: of who waits for another one it computes nothing yet."""
    engine = seeing_engine()
    run(engine, ask([40] * 40, max_tokens=30))  # what stands in the row before
    bad, other = ask(RED, [9]), ask(BLUE, [9])
    engine.add(with_broken_pictures(bad))
    engine.add(other)
    assert run_out(engine) == {bad.request_id: "error", other.request_id: "error"}
    again = ask(BLUE, [9])
    assert run(engine, again) == alone(seeing_engine(), again)


QUESTIONS = (
    (TEXT, RED, [8, 9]), (TEXT, RED, [8, 9], BLUE, [1]), (TEXT, BLUE, [8, 9]),
    ([1] * 20, GREEN, [2, 3]), ([1] * 20, GREEN, GREEN, [2]), (list(range(40)), ),
)  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_offloading_size": 1 / 256, "blocks": 18},
        {"kv_offloading_size": 1 / 256, "blocks": 18, "speculative_config": DRAFT},
        {"speculative_config": NGRAMS}, {"speculative_config": DRAFT},
    ],
    ids=["tiers", "tiers-draft", "ngrams", "draft"],
)  # fmt: skip
def test_pictures_with(settings: dict[str, Any]) -> None:
    asked = [ask(*question, max_tokens=30) for question in QUESTIONS]
    truth = alone(seeing_engine(), *asked)
    engine = seeing_engine(**settings)
    assert run(engine, *asked) == truth
    again = [ask(*question, max_tokens=30) for question in QUESTIONS]
    assert run(engine, *again) == truth
    stats = engine.stats()
    assert bool(stats.spec_draft_tokens) == ("speculative_config" in settings)
    if "blocks" in settings:
        assert stats.tiers is not None and stats.tiers.host_hit_blocks > 0


def test_a_prompt_with_a_picture_comes_back_from_host_memory() -> None:
    engine = seeing_engine(blocks=16, kv_offloading_size=1 / 256)
    first, other = ask(TEXT, RED, [8] * 10), ask(TEXT, BLUE, [8] * 10)
    truth = run(engine, first)
    run(engine, ask([50] * 245))  # takes all blocks
    assert run(engine, ask(TEXT, RED, [8] * 10)) == truth
    stats = engine.stats()
    assert stats.tiers is not None and stats.tiers.host_hit_blocks == 3
    assert stats.mm_cache_queries == 1, "a picture whose blocks came back is not read again"
    assert run(engine, other) == alone(seeing_engine(), other)
    again = ask(TEXT, RED, [8] * 5, [7])  # a block that came back is found by its tokens too
    assert run(engine, again) == alone(seeing_engine(), again)
