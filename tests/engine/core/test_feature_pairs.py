"""Features in pairs on tiny random models: each answer is bit for bit that of a plain engine in
which the request runs alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from octavo_engine.backends.adapters import AdapterLimits
from octavo_engine.backends.draft_part import DraftPart
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.invariants import check_invariants
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.speech.mel import feature_rows
from octavo_engine.state.adapter import AdapterRef
from octavo_engine.state.audio import AudioWindow
from octavo_engine.weights.adapter import read_adapter
from tests.engine.models.tiny import tiny_model
from tests.engine.models.tiny_seeing import VOCABULARY, prompt_of, seeing_model, tile
from tests.engine.models.tiny_speech import VOCABULARY as SPOKEN
from tests.engine.models.tiny_speech import random_frames, tiny_speech
from tests.fakes.adapters import write_adapter
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.core.engine import Engine
    from octavo_engine.state.media import MediaItem
    from octavo_engine.state.request import EngineRequest

pytestmark = pytest.mark.slow
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


def run(
    engine: Engine, *requests: EngineRequest, disturb: random.Random | None = None
) -> list[Said]:
    """Tokens and log-probabilities of each. With `disturb` those named so are cancelled, and others
    suspended for some steps."""
    said: dict[str, Said] = {request.request_id: ([], []) for request in requests}
    for request in requests:
        engine.add(request)
    suspended: list[str] = []
    while engine.has_work:
        if disturb is not None:
            for name in suspended:
                engine.suspend(name, on=False)
            suspended = disturb.sample(sorted(said), 1) if disturb.random() < 0.2 else []
            for name in suspended:
                engine.suspend(name, on=True)
            going = [name for name in said if name.startswith("gone")]
            if going and disturb.random() < 0.3:
                engine.abort(going[0])
                del said[going[0]]
        for output in engine.step().outputs:
            assert output.error is None
            if output.request_id in said:
                tokens, logprobs = said[output.request_id]
                tokens += output.token_ids
                entries = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
                logprobs += [entry.logprob for entry in entries]
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
    ended: dict[str, str | None] = {}
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
    requests = [ask(*question, max_tokens=30) for question in QUESTIONS]
    truth = alone(seeing_engine(), *requests)
    engine = seeing_engine(**settings)
    assert run(engine, *requests) == truth
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


def text_engine(
    family: str, *, blocks: int = 64, lora: bool = False, dtype: Dtype = "f32", **settings: Any
) -> Engine:
    model = tiny_model(family, vocab_size=320)
    options: dict[str, Any] = {}
    if lora:
        options["adapters"] = AdapterLimits(2, 16)
    if settings.get("speculative_config") == DRAFT:
        small = tiny_model("llama", vocab_size=320)
        options["draft"] = DraftPart(ModelConfig.from_hf(small.config), small.checkpoint())
    backend = NativeBackend(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160, num_threads=1,
        dtype=dtype, **options,
    )  # fmt: skip
    config = EngineConfig(
        device="sim", max_model_len=160, enable_lora=lora, max_loras=2,
        sim=SimConfig(vocab_size=320, kv_blocks=blocks),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48),
        **settings,
    )  # fmt: skip
    engine, _ = build_engine(config, backend=backend)
    return engine


def adapter_of(family: str, folder: Path, seed: int) -> AdapterRef:
    """For some layers of whatever the family has."""
    model = tiny_model(family, vocab_size=320)
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in model.tensors.items()
        if ".layers." in name
        and name.endswith(("q_proj.weight", "o_proj.weight", "in_proj.weight"))
    }
    path = write_adapter(
        folder / str(seed), {n: (s[1], s[0]) for n, s in shapes.items()}, seed=seed
    )
    return AdapterRef(f"a{seed}", str(path), read_adapter(str(path)).digest)


def text_requests(rng: random.Random, adapters: list[AdapterRef | None]) -> list[EngineRequest]:
    """Some begin alike; some repeat themselves, so that there is something to guess."""
    shared = [rng.randrange(300) for _ in range(6)] * 8
    return [
        make_request(
            shared[: rng.choice((0, 20, 40))]
            + [rng.randrange(300) for _ in range(rng.randrange(2, 30))],
            max_tokens=rng.randrange(1, 40), temperature=rng.choice((0.0, 1.0)), seed=seed,
            logprobs=0, prompt_logprobs=rng.choice((None, None, 0)), ignore_eos=True,
            adapter=rng.choice(adapters),
        )
        for seed in range(16)
    ]  # fmt: skip


TIERS = {"kv_offloading_size": 1 / 256}
TEXT_PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows-tiers-preemption": ("gemma3", {"blocks": 40, **TIERS}),
    "windows-tiers-draft": ("gemma3", {"blocks": 60, **TIERS, "speculative_config": DRAFT}),
    "windows-tiers-bf16": ("gemma3", {"blocks": 40, **TIERS, "dtype": "bf16"}),
    "windows-adapters-ngrams": ("gemma3", {"lora": True, "speculative_config": NGRAMS}),
    "latent-tiers-preemption": ("deepseek-v2", {"blocks": 14, **TIERS}),
    "latent-adapters-tiers": ("deepseek-v2", {"blocks": 14, "lora": True, **TIERS}),
    "latent-ngrams": ("deepseek-v2", {"blocks": 14, "speculative_config": NGRAMS}),
    "experts-adapters-tiers": ("qwen2-moe", {"blocks": 14, "lora": True, **TIERS}),
}


@pytest.mark.parametrize("pair", TEXT_PAIRS)
def test_text_with(pair: str, tmp_path: Path) -> None:
    """Twice with a sleep between, some requests cancelled and some suspended on their way."""
    family, settings = TEXT_PAIRS[pair]
    rng = random.Random(7)
    is_adapted = settings.get("lora", False)
    adapters = [None, *(adapter_of(family, tmp_path, seed) for seed in range(3 * is_adapted))]
    requests = text_requests(rng, adapters)
    plain = {key: settings[key] for key in settings if key in ("lora", "dtype")}
    truth = alone(text_engine(family, **plain), *requests)
    engine = text_engine(family, **settings)
    for number in range(2):
        assert run_again(engine, requests, number, rng) == truth
        engine.sleep(on=True)
        engine.sleep(on=False)
    if "kv_offloading_size" in settings:
        stats = engine.stats()
        assert stats.tiers is not None and stats.tiers.host_hit_blocks > 0


@pytest.mark.parametrize("family", ["lfm2", "granite4", "jamba-plain"])
@pytest.mark.parametrize("settings", [{}, {"speculative_config": NGRAMS}], ids=["", "ngrams"])
def test_recurrent_states_with_adapters(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(family, vocab_size=320)
    model.reference.save_pretrained(tmp_path / "model")
    refs = [None, *(adapter_of(family, tmp_path, seed) for seed in range(3))]

    def make_engine(**more: Any) -> Engine:
        config = EngineConfig(
            model=str(tmp_path / "model"), device="cpu", dtype="float32", max_model_len=320,
            num_threads=1, enable_lora=True, max_loras=2, kv_cache_memory_bytes=1 << 23,
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=100), **more,
        )  # fmt: skip
        return build_engine(config)[0]

    rng = random.Random(5)
    shared = [rng.randrange(300) for _ in range(260)]
    requests = [
        make_request(
            shared + [number] * (1 + number), max_tokens=12, temperature=0.0, logprobs=0,
            prompt_logprobs=0 if number == 3 else None, ignore_eos=True, adapter=refs[number % 4],
        )
        for number in range(10)
    ]  # fmt: skip
    truth = alone(make_engine(), *requests)
    engine = make_engine(**settings)
    for number in range(2):
        assert run_again(engine, requests, number, rng) == truth
        assert engine.stats().prefix_hits > 0
        engine.sleep(on=True)
        engine.sleep(on=False)
    assert (engine.stats().spec_draft_tokens > 0) == bool(settings)


def run_again(
    engine: Engine, requests: list[EngineRequest], number: int, rng: random.Random
) -> list[Said]:
    """What is said to the requests under ids of their own, beside equal ones to be cancelled."""
    again = [msgspec.structs.replace(r, request_id=f"{r.request_id}-{number}") for r in requests]
    gone = [
        msgspec.structs.replace(r, request_id=f"gone-{number}-{r.request_id}") for r in requests[:4]
    ]
    return run(engine, *again, *gone, disturb=rng)[: len(requests)]


def hearing_engine(*, blocks: int = 64, **settings: Any) -> Engine:
    tiny = tiny_speech()
    backend = NativeBackend(
        ModelConfig.from_hf(tiny.config), tiny.tensors, max_model_len=64, num_threads=1
    )
    config = EngineConfig(
        device="sim", max_model_len=64, sim=SimConfig(vocab_size=SPOKEN, kv_blocks=blocks),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32), **settings,
    )  # fmt: skip
    engine, _ = build_engine(config, backend=backend)
    return engine


@pytest.mark.parametrize("settings", [{}, TIERS], ids=["", "tiers"])
def test_audio_with_preemption_cancelling_and_sleep(settings: dict[str, Any]) -> None:
    """More windows than slots, equal prompts of other windows, little memory."""
    rng = random.Random(4)
    prompts = [[rng.randrange(SPOKEN) for _ in range(n)] for n in (3, 17, 33)]
    requests = []
    for number in range(14):
        features = feature_rows(random_frames(number % 5)).tobytes()
        request = make_request(
            prompts[number % 3], max_tokens=rng.randrange(16, 31), seed=number,
            temperature=rng.choice((0.0, 1.0)), logprobs=0, ignore_eos=True,
        )  # fmt: skip
        window = AudioWindow(bytes([number % 5 + 1] * 16), features)
        requests.append(msgspec.structs.replace(request, audio=window))
    truth = alone(hearing_engine(), *requests)
    engine = hearing_engine(blocks=5, **settings)
    for number in range(2):
        assert run_again(engine, requests, number, rng) == truth
        engine.sleep(on=True)
        engine.sleep(on=False)
    stats = engine.stats()
    assert stats.preemptions > 0
    if settings:
        assert stats.tiers is not None and stats.tiers.host_hit_blocks > 0
