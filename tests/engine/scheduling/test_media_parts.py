"""Pictures are encoded in parts that fit into steps beside sequences that decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.media import MAX_PARTS, MediaLimits
from octavo_engine.scheduling.scheduler import ALONE, STRETCH, Scheduler
from octavo_engine.state.media import MediaItem, MediaSpan
from octavo_engine.state.outputs import StepResult
from tests.fakes.clock import ManualClock
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.request import EngineRequest

NUM_ROWS = 20
DECODE_S, TOKEN_S, MAX_STEP_S = 0.02, 0.001, 0.1


class Machine:
    """A machine whose steps take as long as its tokens and its pictures say."""

    def __init__(self, picture_s: float, *, expected_s: float | None = None) -> None:
        config = SchedulerConfig(max_num_seqs=8, max_step_ms=1e3 * MAX_STEP_S)
        limits = MediaLimits(row_bytes=4, cache_bytes=1 << 20)
        self.clock = ManualClock()
        self.scheduler = Scheduler(config, num_blocks=256, media=limits, now=self.clock)
        assert self.scheduler.media is not None
        expected_s = picture_s if expected_s is None else expected_s
        self.scheduler.media.expect(expected_s / NUM_ROWS)
        self.picture_s = picture_s
        self.batches: list[ScheduledBatch] = []
        self.times: list[float] = []  # of the steps

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        num_decodes = batch.num_decodes
        model_s = DECODE_S * (num_decodes > 0) + TOKEN_S * (batch.num_tokens - num_decodes)
        encode_s = 0.0 if batch.encode is None else self.picture_s * batch.encode_parts.share
        self.clock.advance(model_s + encode_s)
        result = StepResult([5 if samples else -1 for samples in batch.samples], encode_s=encode_s)
        self.scheduler.update(batch, result, model_s + encode_s)
        self.batches.append(batch)
        self.times.append(model_s + encode_s)
        return batch

    def decode(self, num_streams: int) -> list[EngineRequest]:
        streams = [make_request(40, max_tokens=10_000) for _ in range(num_streams)]
        for stream in streams:
            self.scheduler.add(stream)
        while not (batch := self.step()).num_decodes == len(batch.sequences) == num_streams:
            pass
        for _ in range(10):
            self.step()
        del self.batches[:], self.times[:]
        return streams


def picture(seed: int, *, text: int = 8) -> EngineRequest:
    """Text, a picture and text."""
    digest = bytes([seed]) * 16
    span = MediaSpan(digest, text, NUM_ROWS)
    item = MediaItem(digest, 1, 1, b"\0\0\0")
    tokens = [100 + seed] * text + [1] * NUM_ROWS + [2] * text
    return make_request(tokens, media=(span,), media_items=(item,), max_tokens=50)


@pytest.mark.parametrize("picture_s", [0.05, 1.0, 6.0])
def test_streams_get_their_token_in_steps_of_the_usual_length(picture_s: float) -> None:
    machine = Machine(picture_s)
    streams = machine.decode(3)
    request = picture(1)
    machine.scheduler.add(request)
    sequence = machine.scheduler.sequences[request.request_id]
    while not sequence.token_ids[len(request.prompt_token_ids) :]:
        batch = machine.step()
        ids = {s.request_id for s in batch.sequences}
        assert ids.issuperset(s.request_id for s in streams)
    assert max(machine.times) <= 1.5 * DECODE_S
    parts = [batch.encode_parts for batch in machine.batches if batch.encode is not None]
    assert parts[0].first == 0 and parts[-1].is_last
    assert [p.first for p in parts[1:]] == [p.end for p in parts[:-1]]
    # A step has room for 8 ms; the first leave half of it to the text. They are used, or nearly.
    room_s = (STRETCH - 1) * DECODE_S
    assert len(parts) <= 4 + picture_s / (0.7 * room_s)
    # So the picture and its text take a fixed share of the time, however many streams there are.
    wait_s = sum(machine.times)
    alone_s = picture_s + len(request.prompt_token_ids) * TOKEN_S
    assert wait_s <= 3 * DECODE_S + alone_s * STRETCH / (0.7 * (STRETCH - 1))


def test_texts_beside_pictures_have_the_steps_of_texts() -> None:
    machine = Machine(0.05)
    machine.decode(1)
    machine.scheduler.add(picture(1))
    text = make_request(400, max_tokens=5)
    machine.scheduler.add(text)
    batch = machine.step()
    assert 0.6 * MAX_STEP_S < machine.times[0] <= 1.2 * MAX_STEP_S
    assert batch.encode is not None and max(batch.counts) > 30


def test_a_prompt_with_a_picture_advances_whatever_the_streams_take() -> None:
    """Steps are as good as full already, by what is known of them."""
    machine = Machine(0.0)
    machine.decode(1)
    request = picture(1, text=200)
    machine.scheduler.add(request)
    sequence = machine.scheduler.sequences[request.request_id]
    while len(sequence.token_ids) == len(request.prompt_token_ids):
        before = sequence.num_computed_tokens
        batch = machine.step()
        assert sequence.num_computed_tokens > before or batch.encode is not None
    chunks = [batch.counts[1] for batch in machine.batches if len(batch.counts) > 1]
    assert max(chunks) * TOKEN_S <= (STRETCH - 1) * DECODE_S + TOKEN_S


def test_a_short_picture_is_encoded_and_read_in_one_step_where_nothing_decodes() -> None:
    machine = Machine(0.15)
    machine.scheduler.add(picture(1))
    batch = machine.step()
    assert batch.encode_parts.share == 1.0 and batch.reads_encoded
    assert batch.num_tokens == 36


def test_a_long_picture_has_longer_steps_where_nothing_decodes() -> None:
    machine = Machine(6.0)
    machine.scheduler.add(picture(1))
    first = machine.step()
    assert first.num_tokens == 8  # its text
    while (batch := machine.step()).num_tokens == 0:
        assert not batch.is_empty
    assert batch.reads_encoded and batch.encode_parts.is_last
    assert 3 * MAX_STEP_S < max(machine.times[1:]) <= ALONE * MAX_STEP_S
    assert len(machine.times) <= 2 + 6.0 / (3 * MAX_STEP_S)


def test_a_text_that_arrives_while_a_long_picture_is_encoded_waits_for_a_step() -> None:
    machine = Machine(60.0)
    machine.scheduler.add(picture(1))
    for _ in range(3):
        machine.step()
    text = make_request(60, max_tokens=5)
    machine.scheduler.add(text)
    began_at = machine.clock.now
    while text.request_id in machine.scheduler.sequences:
        machine.step()
    assert machine.clock.now - began_at < 2 * ALONE * MAX_STEP_S + 5 * 2 * MAX_STEP_S


def test_the_step_behind_the_last_part_reads_the_rows() -> None:
    machine = Machine(0.003)
    machine.decode(1)
    machine.scheduler.add(picture(1, text=2))
    first, second = machine.step(), machine.step()
    assert first.encode_parts.share == 1.0 and not first.reads_encoded
    assert first.counts == [1, 2]
    assert second.encode is None and second.counts[1] > 4


def test_one_picture_is_under_way_at_a_time_and_each_gets_its_turn() -> None:
    machine = Machine(1.0)
    machine.decode(2)
    requests = [picture(seed) for seed in range(1, 5)]
    for request in requests:
        machine.scheduler.add(request)
    while len({b.encode.digest for b in machine.batches if b.encode is not None}) < 4:
        machine.step()
    assert max(machine.times) <= 1.5 * DECODE_S
    order = [batch.encode.digest[0] for batch in machine.batches if batch.encode is not None]
    assert list(dict.fromkeys(order)) == [1, 2, 3, 4] and order == sorted(order)


def test_texts_that_arrive_meanwhile_go_on_and_are_done_before() -> None:
    machine = Machine(6.0)
    machine.decode(1)
    machine.scheduler.add(picture(1))
    machine.step()
    text = make_request(60, max_tokens=5)
    machine.scheduler.add(text)
    while text.request_id in machine.scheduler.sequences:
        assert machine.step().encode is not None


def test_what_parts_took_corrects_the_estimate() -> None:
    """A picture that takes longer than was thought is cut finer the next time."""
    machine = Machine(4.0, expected_s=0.4)
    machine.decode(1)
    totals = []
    for seed in range(1, 6):
        request = picture(seed)
        machine.scheduler.add(request)
        sequence = machine.scheduler.sequences[request.request_id]
        while len(sequence.token_ids) == len(request.prompt_token_ids):
            batch = machine.step()
            if batch.encode is not None and batch.encode_parts.first == 0:
                totals.append(batch.encode_parts.total)
    assert totals == sorted(set(totals)) and totals[-1] >= 6 * totals[0]


def test_the_number_of_parts_is_bounded() -> None:
    machine = Machine(10_000.0)
    machine.decode(1)
    machine.scheduler.add(picture(1))
    while (batch := machine.step()).encode is None:
        pass
    assert batch.encode_parts == (0, 1, MAX_PARTS)
