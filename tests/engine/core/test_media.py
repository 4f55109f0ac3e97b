"""Pictures through the engine: chunks, hits, preemption and shared steps change no bit, a picture
that was seen is not encoded again, and a step encodes one at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.build import media_limits
from octavo_engine.core.engine import Engine
from octavo_engine.errors import ConfigError, InvalidRequest
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.model_runner.media_rows import places_of, rows_between
from octavo_engine.scheduling import media, scheduler
from octavo_engine.scheduling.media import MediaLimits
from octavo_engine.scheduling.scheduler import SPARE_LOGITS, Scheduler
from octavo_engine.state.batch import ScheduledBatch
from octavo_engine.state.media import MediaSpan
from octavo_engine.state.request import BACKGROUND
from tests.engine.models.tiny_seeing import patches_of, prompt_of, seeing_model, tile
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.media import MediaEncoder
    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.state.media import MediaItem
    from octavo_engine.state.outputs import SequenceOutput
    from octavo_engine.state.request import EngineRequest

MEDIA = seeing_model("llava").media
RED, BLUE, GREEN = (tile(MEDIA, seed) for seed in range(3))
TEXT = [5, 6, 7]


class Counted:
    """An encoder that notes what it encodes."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        self.encoded: list[bytes] = []
        self.parts: list[int] = []
        self.fails = False

    @property
    def config(self) -> MediaConfig:
        return self._encoder.config

    @property
    def work_bytes(self) -> int:
        return self._encoder.work_bytes

    def measure(self) -> float:
        return self._encoder.measure()

    def encode(self, item: MediaItem) -> NDArray[np.float32]:
        return self._encoder.encode(item)

    def encode_part(self, item: MediaItem, part: int, num_parts: int) -> NDArray[np.float32] | None:
        if item.pixels == b"" or self.fails:
            raise RuntimeError("no pixels")
        if part == num_parts - 1:
            self.encoded.append(item.digest)
        self.parts.append(part)
        return self._encoder.encode_part(item, part, num_parts)


@pytest.fixture(autouse=True)
def steps_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step holds does not depend on this machine's pace; test_media_parts.py is about
    that."""
    monkeypatch.setattr(scheduler, "STRETCH", 1e6)
    monkeypatch.setattr(media, "MAX_PARTS", 256)


class Rig:
    def __init__(
        self, *, num_blocks: int = 64, max_tokens: int = 256, cache_bytes: int | None = None,
        caching: bool = True, name: str = "llava", max_seqs: int = 4,
    ) -> None:  # fmt: skip
        backend = self.backend = seeing_model(name).backend("f32")
        assert backend.media is not None
        self.encoder = backend.media = Counted(backend.media)
        settings = SchedulerConfig(
            max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens, max_model_len=512,
            max_step_ms=10_000, enable_prefix_caching=caching,
        )  # fmt: skip
        limits = BackendLimits(
            max_tokens=max_tokens, max_seqs=4, max_logit_rows=4 + SPARE_LOGITS, max_model_len=512
        )
        executor = UniExecutor(
            backend, scheduler_config=settings, limits=limits, num_blocks=num_blocks
        )
        assert executor._runner._media is not None
        self.rows = executor._runner._media._rows
        own = media_limits(EngineConfig(scheduler=settings), backend)
        assert own is not None
        media = own if cache_bytes is None else MediaLimits(own.row_bytes, cache_bytes)
        windows = backend.cache_layout.windows
        self.scheduler = Scheduler(settings, num_blocks=num_blocks, windows=windows, media=media)
        self.engine = Engine(self.scheduler, executor)
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.encoded_by_step: list[int] = []

    def run(self, *requests: EngineRequest) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each."""
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            before = len(self.encoder.encoded)
            self.steps(1)
            self.encoded_by_step.append(len(self.encoder.encoded) - before)
        assert max(self.encoded_by_step, default=0) <= 1
        return [self.said(request) for request in requests]

    def steps(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step().outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self.scheduler.check_invariants()

    def said(self, request: EngineRequest) -> tuple[list[int], list[float]]:
        outputs = self.outputs[request.request_id]
        assert outputs[-1].finish_reason == "length", outputs[-1]
        tokens = [token for output in outputs for token in output.token_ids]
        return tokens, [entry.logprob for output in outputs for entry in output.logprobs or []]


def ask(
    *parts: Any, max_tokens: int = 6, media: MediaConfig = MEDIA, **params: Any
) -> EngineRequest:
    tokens, spans, items = prompt_of(media, *parts)
    params = {"temperature": 0.0, "logprobs": 0, **params}
    return make_request(
        tokens, media=spans, media_items=items, max_tokens=max_tokens, ignore_eos=True, **params
    )


def alone(*parts: Any, **params: Any) -> tuple[list[int], list[float]]:
    return Rig(caching=False).run(ask(*parts, **params))[0]


QUESTION = (TEXT, RED, [8, 9], BLUE, [10, 11, 12])


@pytest.mark.parametrize("max_tokens", [16, 37, 64])
def test_chunks_change_no_bit(max_tokens):
    assert Rig(max_tokens=max_tokens).run(ask(*QUESTION)) == [alone(*QUESTION)]


def test_requests_in_one_step_change_no_bit_and_one_picture_is_encoded_a_step():
    rig = Rig()
    others = [(TEXT, BLUE, [1]), ([1, 2], GREEN, [3], RED), ([4, 5, 6, 7],)]
    said = rig.run(ask(*QUESTION), *[ask(*other) for other in others])
    assert said == [alone(*QUESTION), *[alone(*other) for other in others]]
    assert sorted(rig.encoder.encoded) == sorted([RED.digest, BLUE.digest, GREEN.digest])


def test_a_prompt_that_ends_with_its_picture():
    """Its last token is a row of the picture, whether all before it is cached or not."""
    rig = Rig()
    truth = alone(TEXT, RED)
    assert rig.run(ask(TEXT, RED)) == [truth]
    assert rig.run(ask(TEXT, RED)) == [truth]
    assert rig.encoder.encoded == [RED.digest]


def test_a_repeated_prompt_is_a_prefix_hit_without_the_encoder():
    rig = Rig()
    first, again = ask(*QUESTION), ask(*QUESTION)
    assert rig.run(first) == rig.run(again)
    assert rig.encoder.encoded == [RED.digest, BLUE.digest]
    cached = next(o.num_cached_tokens for o in rig.outputs[again.request_id] if o.token_ids)
    assert cached == len(again.prompt_token_ids) - 1


def test_a_repeated_picture_in_another_prompt_is_not_encoded_again():
    rig = Rig()
    rig.run(ask(*QUESTION))
    assert rig.run(ask([40, 41], BLUE, [42])) == [alone([40, 41], BLUE, [42])]
    assert rig.encoder.encoded == [RED.digest, BLUE.digest]
    assert rig.scheduler.media is not None and rig.scheduler.media.misses == 2


def test_equal_placeholders_of_other_pictures_share_nothing():
    rig = Rig()
    questions = [(TEXT, picture, [8, 9, 10]) for picture in (RED, BLUE, GREEN)]
    said = [rig.run(ask(*question))[0] for question in questions]
    assert said == [alone(*question) for question in questions]
    assert len({tuple(logprobs) for _, logprobs in said}) == 3


def test_preempted_sequences_say_the_same():
    rig = Rig(num_blocks=18, max_tokens=64)
    questions = [(TEXT, RED, [8]), (TEXT, BLUE, [9]), ([1], GREEN, [10, 11])]
    said = rig.run(*[ask(*question, max_tokens=60) for question in questions])
    assert rig.scheduler.stats().preemptions > 0
    assert said == [alone(*question, max_tokens=60) for question in questions]


def test_rows_are_given_up_least_recently_used_first():
    row_bytes = MEDIA.num_rows * MEDIA.text_size * 4
    rig = Rig(cache_bytes=2 * row_bytes, caching=False)
    for picture in (RED, BLUE, RED, GREEN, RED, BLUE):
        rig.run(ask(TEXT, picture, [9]))
    names = {RED.digest: "red", BLUE.digest: "blue", GREEN.digest: "green"}
    assert [names[digest] for digest in rig.encoder.encoded] == ["red", "blue", "green", "blue"]


def test_a_picture_that_cannot_be_encoded_fails_its_request_only():
    rig = Rig()
    broken = ask(TEXT, RED, [9])
    items = (type(RED)(RED.digest, RED.height, RED.width, b""),)
    rig.engine.add(msgspec.structs.replace(broken, media_items=items))
    outputs = [o for _ in range(3) for o in rig.engine.step().outputs]
    assert [o.finish_reason for o in outputs] == ["error"]
    assert rig.run(ask(TEXT, RED, [9])) == [alone(TEXT, RED, [9])]


def test_a_stream_goes_on_while_pictures_are_encoded():
    rig = Rig(max_tokens=32)
    stream = ask([4, 5, 6, 7], max_tokens=30)
    rig.engine.add(stream)
    for _ in range(4):
        rig.engine.step()
    pictures = [ask([seed], tile(MEDIA, 10 + seed), [9], max_tokens=2) for seed in range(5)]
    for request in pictures:
        rig.engine.add(request)
    while rig.engine.has_work:
        outputs = rig.engine.step().outputs
        if stream.request_id in rig.scheduler.sequences:
            assert any(o.request_id == stream.request_id for o in outputs)


@pytest.mark.parametrize(("gib", "num_bytes"), [(None, 128 << 20), (0.5, 1 << 29), (2, 2 << 30)])
def test_the_cache_is_as_large_as_its_flag_says(gib: float | None, num_bytes: int) -> None:
    config = EngineConfig(mm_processor_cache_gb=gib)
    limits = media_limits(config, seeing_model("llava").backend("f32"))
    assert limits is not None
    assert limits.cache_bytes == num_bytes


def test_the_cache_has_room_for_four_pictures_at_least() -> None:
    model = seeing_model("llava")
    limits = media_limits(EngineConfig(mm_processor_cache_gb=0), model.backend("f32"))
    assert limits is not None
    assert limits.cache_bytes == 4 * model.media.num_rows * limits.row_bytes


# ── pictures whose tokens see each other ──

SEEN = seeing_model("gemma3").media
SQUARES = [tile(SEEN, seed) for seed in range(3)]
SEEN_QUESTION = (TEXT, SQUARES[0], [8, 9], SQUARES[1], [10, 11, 12])


def seen(*parts: Any, **params: Any) -> EngineRequest:
    return ask(*parts, media=SEEN, **params)


def seen_alone(*parts: Any, **params: Any) -> tuple[list[int], list[float]]:
    return Rig(name="gemma3", caching=False).run(seen(*parts, **params))[0]


@pytest.mark.parametrize("max_tokens", [22, 26, 37, 64])
def test_no_chunk_ends_inside_a_picture_whose_tokens_see_each_other(max_tokens):
    """The runner asserts that; here also that nothing waits for ever, and that bits are equal."""
    rig = Rig(name="gemma3", max_tokens=max_tokens)
    others = [([4] * 30, SQUARES[2], [3]), ([7] * 5, SQUARES[1], [1])]
    said = rig.run(seen(*SEEN_QUESTION), *[seen(*other) for other in others])
    assert said == [seen_alone(*SEEN_QUESTION), *[seen_alone(*other) for other in others]]


def test_a_picture_goes_through_however_short_the_time_of_a_step_is():
    rig = Rig(name="gemma3", max_tokens=64)
    rig.scheduler._prefill_budget = lambda *args: 3  # type: ignore[method-assign]
    assert rig.run(seen(*SEEN_QUESTION)) == [seen_alone(*SEEN_QUESTION)]


@pytest.mark.parametrize("num_before", range(1, 17))
def test_a_hit_that_ends_inside_a_picture_is_gone_on_with_whole(num_before):
    """Blocks end anywhere in pictures; the rest of one is computed in one step."""
    rig = Rig(name="gemma3", max_tokens=26)
    text = [5] * num_before
    rig.run(seen(text, SQUARES[0], [7] * 20))
    again = seen(text, SQUARES[0], [9, 8])
    assert rig.run(again) == [seen_alone(text, SQUARES[0], [9, 8])]
    cached = next(o.num_cached_tokens for o in rig.outputs[again.request_id] if o.token_ids)
    assert cached >= (num_before + 9) // 16 * 16


def test_a_prompt_that_ends_with_a_picture_whose_tokens_see_each_other():
    rig = Rig(name="gemma3")
    truth = seen_alone(TEXT, SQUARES[0])
    assert rig.run(seen(TEXT, SQUARES[0])) == [truth]
    assert rig.run(seen(TEXT, SQUARES[0])) == [truth]


def test_preempted_sequences_whose_pictures_see_each_other_say_the_same():
    rig = Rig(name="gemma3", num_blocks=18, max_tokens=64)
    questions = [(TEXT, SQUARES[0], [8]), (TEXT, SQUARES[1], [9]), ([1], SQUARES[2], [10, 11])]
    said = rig.run(*[seen(*question, max_tokens=60) for question in questions])
    assert rig.scheduler.stats().preemptions > 0
    assert said == [seen_alone(*question, max_tokens=60) for question in questions]


def test_scores_of_prompts_with_such_pictures_are_refused():
    rig = Rig(name="gemma3")
    request = seen(*SEEN_QUESTION, prompt_logprobs=0)
    with pytest.raises(InvalidRequest, match="prompt_logprobs is not supported with pictures"):
        rig.scheduler.add(request)


def test_steps_that_hold_no_picture_are_refused_at_the_start():
    settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=21)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens must be at least 22"):
        media_limits(EngineConfig(scheduler=settings), seeing_model("gemma3").backend("f32"))


def test_a_picture_that_no_share_paid_for_is_owed():
    """A background prompt beside a running answer has a tenth of the time; its picture goes through
    whole, and later prompts wait until that is earned again."""
    rig = Rig(name="gemma3", max_tokens=64)
    rig.run(seen([4] * 60))  # how long a token takes is known
    stream = seen([4, 5, 6, 7], max_tokens=200)
    rig.engine.add(stream)
    for _ in range(3):
        rig.engine.step()
    behind = msgspec.structs.replace(seen([1] * 20, SQUARES[0], [2]), priority=BACKGROUND)
    rig.engine.add(behind)
    account = rig.scheduler._background
    owed: list[int] = []
    account.owe = owed.append  # type: ignore[method-assign, assignment]
    account.pay_prompt = lambda sequence: 2  # type: ignore[method-assign]
    said = rig.run()
    assert said == [] and rig.said(behind) == seen_alone([1] * 20, SQUARES[0], [2])
    assert sum(owed) >= SEEN.num_rows - 2


def test_how_long_a_picture_takes_is_known_before_the_first_one():
    """Else the step that encodes it looks as if the core hung."""
    rig = Rig(name="gemma3")
    rig.engine.warm_up()
    media = rig.scheduler.media
    assert media is not None
    batch = ScheduledBatch(encode=SQUARES[0], encode_rows=9)
    assert media.expected_s(batch) > 0.0
    assert (media.hits, media.misses, media.encoder_s) == (0, 0, 0.0)


# ── pictures whose tokens stand in lines and columns ──

PLACED = seeing_model("qwen2vl").media
SHAPES = [tile(PLACED, seed) for seed in range(3)]
PLACED_QUESTION = (TEXT, SHAPES[0], [8, 9], SHAPES[1], [10, 11, 12])


def placed(*parts: Any, **params: Any) -> EngineRequest:
    return ask(*parts, media=PLACED, **params)


def placed_alone(*parts: Any, **params: Any) -> tuple[list[int], list[float]]:
    return Rig(name="qwen2vl", caching=False).run(placed(*parts, **params))[0]


@pytest.mark.parametrize("max_tokens", [5, 16, 37, 64])
def test_chunks_and_company_leave_tokens_where_they_stand(max_tokens):
    rig = Rig(name="qwen2vl", max_tokens=max_tokens)
    others = [([4] * 30, SHAPES[2], [3]), ([7] * 5, SHAPES[1], [1]), ([4, 5, 6],)]
    said = rig.run(placed(*PLACED_QUESTION), *[placed(*other) for other in others])
    assert said == [placed_alone(*PLACED_QUESTION), *[placed_alone(*other) for other in others]]


@pytest.mark.parametrize("num_before", range(1, 17))
def test_a_hit_that_ends_inside_a_picture_leaves_tokens_where_they_stand(num_before):
    rig = Rig(name="qwen2vl", max_tokens=7)
    text = [5] * num_before
    rig.run(placed(text, SHAPES[0], [7] * 20))
    question = (text, SHAPES[0], [9, 8])
    assert rig.run(placed(*question)) == [placed_alone(*question)]


def test_places_are_those_of_transformers():
    _, spans, _ = prompt_of(PLACED, *PLACED_QUESTION)
    tokens, _, items = prompt_of(PLACED, *PLACED_QUESTION)
    ids = torch.tensor([tokens])
    _, grids = patches_of(list(items))
    reference = seeing_model("qwen2vl").reference.model
    types = (ids == PLACED.token_id).int()
    truth, _ = reference.get_rope_index(ids, types, image_grid_thw=grids)
    for start in range(len(tokens)):
        for end in range(start + 1, len(tokens) + 1):
            found = places_of(spans, start, end)
            np.testing.assert_array_equal(found, truth[:, 0, start:end].numpy())


# ── pictures with tokens of the text behind each line ──

LINED = seeing_model("mistral3").media
LINES = [tile(LINED, seed) for seed in range(3)]
LINED_QUESTION = (TEXT, LINES[0], [8, 9], LINES[1], [10, 11, 12])


def lined(*parts: Any) -> EngineRequest:
    return ask(*parts, media=LINED)


def lined_alone(*parts: Any) -> tuple[list[int], list[float]]:
    return Rig(name="mistral3", caching=False).run(lined(*parts))[0]


@pytest.mark.parametrize("max_tokens", [5, 6, 7, 16, 37])
def test_chunks_may_end_before_or_behind_a_token_that_ends_a_line(max_tokens):
    rig = Rig(name="mistral3", max_tokens=max_tokens)
    others = [([4] * 30, LINES[2], [3]), ([7] * 5, LINES[1]), ([4, 5, 6],)]
    said = rig.run(lined(*LINED_QUESTION), *[lined(*other) for other in others])
    assert said == [lined_alone(*LINED_QUESTION), *[lined_alone(*other) for other in others]]


@pytest.mark.parametrize("num_before", range(1, 17))
def test_a_hit_that_ends_inside_a_picture_finds_its_line(num_before):
    rig = Rig(name="mistral3", max_tokens=7)
    text = [5] * num_before
    rig.run(lined(text, LINES[0], [7] * 20))
    question = (text, LINES[0], [9, 8])
    assert rig.run(lined(*question)) == [lined_alone(*question)]


def test_rows_are_those_of_their_lines():
    span = MediaSpan(bytes(16), 10, 12, line_rows=3)
    assert span.num_rows == 9
    assert rows_between(span, 10, 22).tolist() == [0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1]
    assert rows_between(span, 12, 15).tolist() == [2, -1, 3]
    assert rows_between(span, 13, 14).tolist() == [-1]


# ── pictures in parts, beside sequences that decode ──


def rig_beside(*, max_tokens: int = 200, **options: Any) -> tuple[Rig, EngineRequest]:
    """An engine in which a sequence decodes, and pictures are expected to take hours."""
    rig = Rig(**options)
    assert rig.scheduler.media is not None
    rig.scheduler.media.expect(1000.0)
    stream = ask([4, 5, 6, 7], max_tokens=max_tokens)
    rig.engine.add(stream)
    rig.steps(2)
    return rig, stream


STREAM = ([4, 5, 6, 7],)


def test_a_picture_in_parts_changes_no_bit_and_a_stream_has_each_step():
    rig, stream = rig_beside(max_tokens=300)
    request = ask(TEXT, RED, [9])
    rig.engine.add(request)
    num_steps = 0
    while request.request_id not in rig.outputs:
        before = len(rig.outputs[stream.request_id])
        rig.steps(1)
        num_steps += 1
        assert len(rig.outputs[stream.request_id]) == before + 1
    assert num_steps == 256 + 1
    rig.run()
    assert rig.said(request) == alone(TEXT, RED, [9])
    assert rig.said(stream) == alone(*STREAM, max_tokens=300)
    media = rig.scheduler.media
    assert media is not None and (media.hits, media.misses) == (0, 1)


def test_parts_go_on_in_steps_of_nothing_else():
    rig, stream = rig_beside()
    request = ask(TEXT, RED, [9])
    rig.engine.add(request)
    rig.steps(5)
    rig.engine.abort(stream.request_id)
    rig.steps(3)
    assert len(rig.encoder.parts) == 8 and not rig.engine.last_step_was_empty
    rig.run()
    assert rig.encoder.parts == list(range(256))
    assert rig.said(request) == alone(TEXT, RED, [9])


def test_a_step_that_copies_a_block_may_encode_and_compute_nothing_else():
    """A prefix ends inside a block, at a picture: the block is copied before its rows are there."""
    rig = Rig()
    rig.run(ask(TEXT, RED, [9]))
    assert rig.scheduler.media is not None
    rig.scheduler.media.expect(1000.0)
    request = ask(TEXT, BLUE, [9], prompt_logprobs=None)
    rig.engine.add(request)
    rig.steps(3)
    assert rig.scheduler.sequences[request.request_id].num_computed_tokens == len(TEXT)
    assert rig.scheduler.sequences[request.request_id].num_cached_tokens == len(TEXT)
    rig.run()
    assert rig.said(request) == alone(TEXT, BLUE, [9])


def test_a_picture_that_fails_in_a_step_of_nothing_else_ends_its_request_only():
    rig = Rig()
    assert rig.scheduler.media is not None
    rig.scheduler.media.expect(1000.0)
    request, waiting = ask(TEXT, RED, [9]), ask([1], BLUE, [8])
    for each in (request, waiting):
        rig.engine.add(each)
    rig.steps(3)
    rig.encoder.fails = True
    rig.steps(1)
    rig.encoder.fails = False
    assert rig.outputs[request.request_id][-1].finish_reason == "error"
    rig.run()
    assert rig.said(waiting) == alone([1], BLUE, [8])


def test_a_picture_that_two_ask_for_is_encoded_once():
    rig, _ = rig_beside(max_tokens=300)
    first, second = ask(TEXT, RED, [9]), ask([1], RED, [8])
    rig.engine.add(first)
    rig.steps(5)
    rig.engine.add(second)
    rig.run()
    assert rig.encoder.encoded == [RED.digest]
    assert rig.said(first) == alone(TEXT, RED, [9])
    assert rig.said(second) == alone([1], RED, [8])


@pytest.mark.parametrize("other", [RED, BLUE])
def test_an_aborted_picture_is_gone_on_with_or_makes_place(other: MediaItem):
    """If the next one is the same it goes on where it stands, which is cheaper."""
    rig, stream = rig_beside(max_tokens=400)
    gone, request = ask(TEXT, RED, [9]), ask([1], other, [8])
    rig.engine.add(gone)
    rig.steps(5)
    assert rig.engine.abort(gone.request_id) is not None
    rig.steps(3)
    assert rig.encoder.parts == [0, 1, 2, 3, 4]
    rig.engine.add(request)
    rig.run()
    assert rig.encoder.parts[5] == (5 if other is RED else 0)
    assert rig.encoder.encoded == [other.digest]
    assert rig.said(request) == alone([1], other, [8])
    assert rig.said(stream) == alone(*STREAM, max_tokens=400)


def test_a_part_that_fails_ends_those_that_wait_for_the_picture_only():
    rig, stream = rig_beside(max_tokens=400)
    both = [ask(TEXT, RED, [9]), ask([1], RED, [8])]
    for request in both:
        rig.engine.add(request)
    rig.steps(4)
    rig.encoder.fails = True
    rig.steps(1)
    for request in both:
        (output,) = rig.outputs[request.request_id]
        assert output.finish_reason == "error"
        assert output.error == "the engine failed to encode a picture: RuntimeError"
    rig.encoder.fails = False
    again = ask(TEXT, RED, [9])
    rig.engine.add(again)
    rig.run()
    assert rig.encoder.parts[4:6] == [0, 1]
    assert rig.said(again) == alone(TEXT, RED, [9])
    assert rig.said(stream) == alone(*STREAM, max_tokens=400)


def test_pictures_that_fail_beside_a_stream_never_stop_the_engine():
    rig, stream = rig_beside(max_tokens=40)
    rig.encoder.fails = True
    requests = [ask([seed], tile(MEDIA, 10 + seed), [9]) for seed in range(8)]
    for request in requests:
        rig.engine.add(request)
    rig.run()
    assert {rig.outputs[r.request_id][-1].finish_reason for r in requests} == {"error"}
    assert rig.said(stream) == alone(*STREAM, max_tokens=40)


def test_a_step_that_fails_between_parts_makes_the_picture_begin_anew(monkeypatch):
    """What the encoder has by then is not known."""
    rig, stream = rig_beside()
    request = ask(TEXT, RED, [9])
    rig.engine.add(request)
    rig.steps(4)

    def fail(*args: Any) -> None:
        raise RuntimeError("no step")

    with monkeypatch.context() as broken:
        broken.setattr(rig.backend, "execute", fail)
        rig.steps(1)
    assert rig.outputs[stream.request_id][-1].finish_reason == "error"
    rig.run()
    assert rig.said(request) == alone(TEXT, RED, [9])


def test_rows_that_a_failed_step_left_are_given_up(monkeypatch):
    rig = Rig(caching=False)
    request = ask(TEXT, RED, [9])
    rig.engine.add(request)

    def fail(*args: Any) -> None:
        raise RuntimeError("no step")

    with monkeypatch.context() as broken:
        broken.setattr(rig.backend, "execute", fail)
        rig.steps(1)
    assert rig.encoder.encoded == [RED.digest]
    assert rig.outputs[request.request_id][-1].finish_reason == "error"
    rig.run(ask(TEXT, BLUE, [9]))
    assert set(rig.rows) == {BLUE.digest}


def test_a_preempted_sequence_finds_its_picture_as_far_as_it_was():
    rig, _ = rig_beside(max_tokens=400)
    request = ask(TEXT, RED, [9])
    rig.engine.add(request)
    rig.steps(4)
    rig.scheduler._preempt(rig.scheduler.sequences[request.request_id])
    rig.run()
    assert rig.encoder.parts == list(range(256))
    assert rig.said(request) == alone(TEXT, RED, [9])


def test_sleep_gives_up_what_is_under_way():
    rig, stream = rig_beside()
    gone = ask(TEXT, RED, [9])
    rig.engine.add(gone)
    rig.steps(4)
    for request in (gone, stream):
        rig.engine.abort(request.request_id)
    rig.steps(1)
    rig.engine.sleep(on=True)
    rig.engine.sleep(on=False)
    assert rig.run(ask(TEXT, RED, [9])) == [alone(TEXT, RED, [9])]
    assert rig.encoder.parts[4] == 0


@pytest.mark.parametrize(
    "name",
    [
        "llava",
        "gemma3",
        "qwen2vl",
        "qwen2.5vl",
        "qwen3vl",
        "internvl",
        "llava-next",
        "mistral3",
        "llava-onevision",
    ],
)
def test_two_pictures_in_parts_one_after_the_other(name: str):
    media = seeing_model(name).media
    question = (TEXT, tile(media, 0), [8, 9], tile(media, 1), [10, 11, 12])
    rig = Rig(name=name)
    assert rig.scheduler.media is not None
    rig.scheduler.media.expect(1000.0)
    stream = ask([4, 5, 6, 7], media=media, max_tokens=300)
    rig.engine.add(stream)
    rig.steps(2)
    request = ask(*question, media=media)
    rig.run(request)
    truth = Rig(name=name, caching=False).run(ask(*question, media=media))[0]
    assert rig.said(request) == truth


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes_while_parts_are_encoded_changes_no_bit(seed: int):
    """Little memory for KV and for rows, aborts and suspensions, and parts of any number."""
    random = np.random.default_rng(seed)
    row_bytes = MEDIA.num_rows * MEDIA.text_size * 4
    rig = Rig(num_blocks=24, max_tokens=48, cache_bytes=2 * row_bytes)
    pictures = [RED, BLUE, GREEN]
    added: dict[str, tuple[EngineRequest, tuple[Any, ...]]] = {}
    gone: set[str] = set()
    for step in range(300):
        if len(added) < 16 and random.random() < 0.2:
            parts: tuple[Any, ...] = ([int(t) for t in random.integers(3, 40, 4)],)
            for _ in range(random.integers(0, 3)):
                parts += (pictures[random.integers(3)], [int(random.integers(3, 40))])
            request = ask(*parts, max_tokens=int(random.integers(1, 40)))
            added[request.request_id] = request, parts
            rig.engine.add(request)
        if step % 7 == 0:  # what was measured is forgotten: parts are many again
            assert rig.scheduler.media is not None
            rig.scheduler.media.expect(float(random.choice([0.5, 5.0, 20.0])))
        alive = list(rig.scheduler.sequences)
        if alive and random.random() < 0.05:
            gone.add(victim := alive[random.integers(len(alive))])
            rig.engine.abort(victim)
        if alive and random.random() < 0.1:
            rig.engine.suspend(alive[random.integers(len(alive))], on=bool(random.random() < 0.4))
        rig.steps(1)
    for request_id in list(rig.scheduler.sequences):
        rig.engine.suspend(request_id, on=False)
    rig.run()
    assert len(rig.encoder.parts) > 2 * len(rig.encoder.encoded) > 0
    for request_id, (request, parts) in added.items():
        if request_id not in gone:
            assert rig.said(request) == alone(*parts, max_tokens=request.params.max_tokens)
