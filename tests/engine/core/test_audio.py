"""Audio in the engine: answers are those of each alone, whatever waits, shares a window or goes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.audio_queue import AudioQueue
from octavo_engine.core.build import build_engine
from octavo_engine.core.pooling.async_pooling import WrongTask
from octavo_engine.errors import GenerationFailed, InvalidRequest, QueueFull
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.invariants import check_invariants
from octavo_engine.speech.mel import feature_rows
from octavo_engine.state.audio import AudioWindow
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.models.tiny_speech import VOCABULARY, random_frames, tiny_speech
from tests.fakes.unforeseen import fail_for

if TYPE_CHECKING:
    import numpy as np

    from octavo_engine.core.engine import Engine

SHAPE = (50, 64)


def make_engine(*, kv_blocks: int = 64, max_num_seqs: int = 8, **settings: Any) -> Engine:
    """The native backend with a tiny model, so that answers have all their bits to differ in."""
    tiny = tiny_speech()
    backend = NativeBackend(
        ModelConfig.from_hf(tiny.config), tiny.tensors, max_model_len=64, num_threads=2
    )
    config = EngineConfig(
        device="sim", max_model_len=64, sim=SimConfig(vocab_size=VOCABULARY, kv_blocks=kv_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=32, **settings
        ),
    )  # fmt: skip
    engine, _ = build_engine(config, backend=backend)
    return engine


def window(seed: int) -> AudioWindow:
    features = feature_rows(random_frames(seed))
    return AudioWindow(bytes([seed + 1] * 16), features.tobytes())


def request(name: str, tokens: list[int], sound: int, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tokens,
        params=SamplingParams(ignore_eos=True, **{"max_tokens": 12, "temperature": 0.0} | params),
        audio=window(sound),
    )


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
        check_invariants(engine.scheduler)
    return answers


def random_requests(rng: random.Random, count: int) -> list[EngineRequest]:
    """Few windows and few prompts: all that could be confused is there."""
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (3, 17, 33)]
    return [
        request(
            f"r{i}", rng.choice(prompts), rng.randrange(5), max_tokens=rng.randrange(1, 30),
            temperature=rng.choice((0.0, 1.0)), seed=i,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kv_blocks", "max_num_seqs"), [(64, 8), (12, 8), (64, 2)])
def test_answers_together_are_those_of_each_alone(kv_blocks: int, max_num_seqs: int) -> None:
    requests = random_requests(random.Random(2), 30)
    together = run(make_engine(kv_blocks=kv_blocks, max_num_seqs=max_num_seqs), requests)
    fresh = make_engine()
    for each in requests:
        assert run(fresh, [each])[each.request_id] == together[each.request_id]
        fresh.reset_prefix_cache()


def test_equal_prompts_with_other_audio_share_no_blocks() -> None:
    engine = make_engine()
    tokens = list(range(40))
    run(engine, [request("a", tokens, 1)])
    before = engine.stats().prefix_hits
    other = run(engine, [request("b", tokens, 2)])["b"]
    assert engine.stats().prefix_hits == before
    same = run(engine, [request("c", tokens, 1)])
    assert engine.stats().prefix_hits > before
    assert run(make_engine(), [request("b", tokens, 2)])["b"] == other
    assert run(make_engine(), [request("c", tokens, 1)]) == same


def test_a_window_is_encoded_once() -> None:
    engine = make_engine()
    run(engine, [request(f"r{i}", [1, 2], 1) for i in range(4)])
    run(engine, [request("later", [3], 1), request("other", [3], 2)])
    stats = engine.stats()
    assert stats.mm_cache_queries - stats.mm_cache_hits == 2


def test_windows_in_use_stay_and_others_wait() -> None:
    engine = make_engine(max_num_seqs=2)
    answers = run(engine, [request(f"r{i}", [1, 2], i) for i in range(5)])
    assert all(len(tokens) == 12 for tokens in answers.values())
    stats = engine.stats()
    assert stats.mm_cache_queries - stats.mm_cache_hits == 5


def test_others_decode_between_the_parts_of_an_encoder() -> None:
    engine = make_engine()
    audio = engine._audio
    assert audio is not None
    audio._encode_s, audio._part_s = 1.0, 0.1  # as if it were slow
    engine.add(request("first", [1], 1, max_tokens=30))
    while not any(o.token_ids for o in engine.step().outputs):
        pass
    audio._encode_s = 1.0
    engine.add(request("second", [1], 2))
    steps = 0
    while audio:
        outputs = engine.step().outputs
        steps += any(o.request_id == "first" and o.token_ids for o in outputs)
    assert steps >= 9


def test_what_waits_can_be_aborted_or_late() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(request("runs", [1], 1, max_tokens=30))
    engine.step()
    for name, seed in (("gone", 2), ("stays", 3)):
        engine.add(request(name, [1], seed))
    engine.step()
    out = engine.abort("gone")
    assert out is not None and out.finish_reason == "abort"
    engine.abort("runs")
    while engine.has_work:
        engine.step()
    assert run(engine, [request("next", [1], 2)])["next"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_answer_goes_on_with_the_same_tokens(temperature: float) -> None:

    whole = request("a", [1, 2, 3], 1, temperature=temperature, seed=5, max_tokens=20)
    tokens = run(make_engine(), [whole])["a"]
    rest = msgspec.structs.replace(whole, output_token_ids=tokens[:7])
    assert run(make_engine(), [rest])["a"] == tokens[7:]


def test_who_is_refused_with_a_window_that_is_there_gives_it_back() -> None:
    """Otherwise no window could be encoded any more once each slot was taken so."""
    engine = make_engine(max_num_seqs=1, max_queue=1)
    run(engine, [request("first", [1], 1)])
    engine.add(request("runs", [1], 1, max_tokens=30))
    engine.step()
    engine.add(request("waits", [1], 1))
    with pytest.raises(QueueFull):
        engine.add(request("refused", [1], 1))
    with pytest.raises(InvalidRequest, match="'runs' is in use"):
        engine.add(request("runs", [1], 1))
    engine.abort("waits")
    engine.abort("runs")
    engine.add(request("other", [1], 2, max_tokens=2))
    for _ in range(20):
        engine.step()
    assert not engine.has_work


def test_no_more_wait_for_the_encoder_than_may_wait() -> None:
    engine = make_engine(max_queue=2)
    for i in range(2):
        engine.add(request(f"r{i}", [1], i))
    with pytest.raises(QueueFull, match="2 requests wait for their audio") as caught:
        engine.add(request("refused", [1], 2))
    assert caught.value.retry_after_s is not None and 1 <= caught.value.retry_after_s <= 60
    while engine.has_work:
        engine.step()
    assert run(engine, [request("refused", [1], 2)])["refused"]


def test_asleep_no_window_is_held_and_awake_each_is_encoded_anew() -> None:
    engine = make_engine(max_num_seqs=2)
    before = run(engine, [request(f"r{i}", [1, 2], i) for i in range(2)])
    queue, backend = engine._audio, engine.executor._backend  # type: ignore[attr-defined]
    engine.add(request("gone", [1], 2))
    assert queue is not None
    queue._begin(is_busy=True)  # its client leaves in the middle of the encoder's work
    engine.abort("gone")
    engine.sleep(on=True)
    assert backend._audio.cache is None
    engine.sleep(on=False)
    after = run(engine, [request(f"s{i}", [1, 2], i) for i in range(2)])
    assert list(after.values()) == list(before.values())
    assert queue.num_encoded == 4


def test_what_does_not_fit_is_refused() -> None:
    engine = make_engine()
    plain = EngineRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams())
    with pytest.raises(WrongTask, match="transcribes audio"):
        engine.add(plain)
    bad = EngineRequest(
        request_id="x", prompt_token_ids=[1], params=SamplingParams(),
        audio=AudioWindow(b"a" * 16, b"1234"),
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="50 rows of 64 numbers"):
        engine.add(bad)
    assert not engine.has_work


class FailingEncoder:
    """An encoder that fails once."""

    feature_shape = SHAPE
    audio_slot_bytes = 1

    def __init__(self) -> None:
        self.left = 1

    def prepare_audio(self, num_slots: int) -> None:
        pass

    def encode_audio(self, slot: int, features: np.ndarray, part: int, num_parts: int) -> None:
        if self.left:
            self.left -= 1
            raise RuntimeError("broken")

    def align_by(self, heads: Any) -> None:
        pass

    def audio_attention(self, slot: int, tokens: Any, num_rows: int) -> Any:
        raise NotImplementedError


def test_what_nobody_foresaw_of_one_whose_audio_was_encoded_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = run(make_engine(), [request("good", [1, 2], 1)])
    engine = make_engine()
    fail_for(monkeypatch, engine.scheduler, "add", "bad")
    engine.add(request("bad", [1, 2], 0))
    engine.add(request("good", [1, 2], 1))
    tokens: list[int] = []
    refused: list[tuple[str, type]] = []
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
        refused += [(request_id, type(error)) for request_id, error in engine.take_refused()]
    assert (tokens, refused) == (truth["good"], [("bad", GenerationFailed)])


def test_a_failed_encoder_gives_its_slot_back() -> None:
    queue = AudioQueue(FailingEncoder(), 1)
    assert queue.submit(request("a", [1], 1)) is None
    with pytest.raises(RuntimeError):
        queue.advance(is_busy=False)
    (ready,) = queue.advance(is_busy=False)
    assert ready.audio is not None and ready.audio.slot == 0 and not ready.audio.features
