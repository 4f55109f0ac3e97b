"""Who reads a request's news, and when: the task that waits, and the tap that spares it the way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.text.output_processor import OutputProcessor, SettledSubmission
from octavo_engine.core.text.output_stream import InlineSink, OutputReader, OutputSink
from octavo_engine.core.text.submission import Submission
from octavo_engine.errors import GenerationFailed
from octavo_engine.state.outputs import SequenceOutput
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from tests.engine.core.test_async_engine import Gate, Running, run
from tests.fakes.backend import FakeBackend

if TYPE_CHECKING:
    from octavo_engine.core.text.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


class Desk:
    """One request in flight, its reader, and what came out on which way."""

    def __init__(
        self, *, silent: bool = False, is_open: bool = True, taps: bool = True, interval: int = 1
    ) -> None:
        self.processor = OutputProcessor(ByteTokenizer(512))
        requested = SettledSubmission(
            request_id="r", prompt=None, prompt_token_ids=[1], params=PARAMS, seed=1
        )  # fmt: skip
        self.request, (sequence,) = self.processor.add(requested)
        self.sequence_id = sequence.request_id
        self.is_open = is_open
        self.tapped: list[list[int]] = []
        self.read: list[list[int]] = []
        tap: Any = InlineSink(lambda: self.is_open, lambda news: self.tell(news)) if taps else None
        self.reader = OutputReader(self.request, silent=silent, inline=tap, interval=interval)

    def tell(self, news: RequestOutput) -> None:
        self.tapped.append(news.outputs[0].token_ids)

    def step(self, *token_ids: int, finish_reason: Any = None) -> None:
        """What a step says, and the reader told of it."""
        news = SequenceOutput(
            request_id=self.sequence_id, token_ids=list(token_ids), finish_reason=finish_reason
        )
        for request in self.processor.process([news]).touched:
            assert request is self.request
            self.reader.wake()

    async def take(self) -> None:
        news = await self.reader.next()
        self.read.append(news.outputs[0].token_ids)

    async def waits(self) -> asyncio.Task[None]:
        """A task that has nothing to read yet."""
        task = asyncio.create_task(self.take())
        await asyncio.sleep(0)
        return task


def test_a_tap_takes_news_while_the_reader_waits_but_not_the_last():
    async def test():
        desk = Desk()
        task = await desk.waits()
        desk.step(5)
        desk.step(6, 7)
        assert desk.tapped == [[5], [6, 7]] and not task.done()
        desk.step(8, finish_reason="length")
        await task
        assert desk.tapped == [[5], [6, 7]] and desk.read == [[8]]

    run(test())


def test_what_a_closed_tap_leaves_is_read_in_order_with_what_comes_before_the_reader_wakes():
    async def test():
        desk = Desk(is_open=False)
        task = await desk.waits()
        desk.step(5)
        desk.is_open = True
        desk.step(6)  # the reader was woken for 5 and has not run: nothing may overtake that
        await task
        assert desk.tapped == [] and desk.read == [[5, 6]]
        desk.step(7)  # nobody waits
        desk.step(8)
        await desk.take()
        assert desk.tapped == [] and desk.read == [[5, 6], [7, 8]]

    run(test())


def test_a_tap_that_breaks_fails_its_request_at_the_reader():
    async def test():
        desk = Desk()
        desk.tell = lambda news: 1 // 0  # type: ignore[method-assign,assignment]
        task = await desk.waits()
        desk.step(5)
        with pytest.raises(ZeroDivisionError):
            await task

    run(test())


def test_a_silent_reader_is_left_alone_until_the_end():
    async def test():
        desk = Desk(silent=True)
        task = await desk.waits()
        desk.step(5)
        desk.step(6)
        await asyncio.sleep(0)
        assert not task.done() and desk.tapped == []
        desk.step(7, finish_reason="length")
        await task
        assert desk.read == [[5, 6, 7]]

    run(test())


@pytest.mark.parametrize("taps", [True, False])
def test_after_the_first_token_so_many_make_a_piece(taps):
    async def test():
        desk = Desk(interval=3, taps=taps)
        desk.step(1)
        await desk.take()
        assert desk.read == [[1]]
        task = await desk.waits()
        desk.step(2)
        desk.step(3)
        await asyncio.sleep(0)
        assert desk.tapped == [] and not task.done()
        desk.step(4)
        if not taps:
            await task
            task = await desk.waits()
        assert (desk.tapped or desk.read[1:]) == [[2, 3, 4]]
        desk.step(5, finish_reason="length")
        await task
        assert desk.read[-1] == [5]

    run(test())


def test_an_error_comes_after_what_was_said_before_it():
    async def test():
        desk = Desk(taps=False)
        desk.step(5)
        desk.step(finish_reason="error")
        await desk.take()
        assert desk.read == [[5]]
        with pytest.raises(GenerationFailed):
            await desk.take()

    run(test())


@pytest.mark.parametrize("opens", ["always", "never", "now and then"])
def test_tap_and_iterator_together_tell_every_token_once_and_in_order(opens):
    async def test():
        backend = FakeBackend(256)
        async with Running(backend) as engine:
            reported: list[int] = []
            calls = 0

            def is_open() -> bool:
                nonlocal calls
                calls += 1
                return opens == "always" or (opens == "now and then" and calls % 3 == 0)

            def tell(news: RequestOutput) -> None:
                assert not news.finished
                reported.extend(news.outputs[0].token_ids)

            async def put(output: RequestOutput) -> None:
                reported.extend(output.outputs[0].token_ids)

            submission = Submission(request_id="r", prompt=[1, 2, 3], params=PARAMS)
            await engine.deliver(submission, OutputSink(put, InlineSink(is_open, tell)))
            assert reported == backend.continuation([1, 2, 3], 64)
            assert isinstance(engine, AsyncEngine) and engine.num_in_flight == 0

    run(test())


def test_steps_that_come_together_leave_as_one_piece():
    """Where a server falls behind, it must write less often, not later and later."""

    async def test():
        backend = FakeBackend(256)
        gate = Gate(backend)
        async with Running(backend) as engine:
            gate.closed = True
            pieces: list[list[int]] = []
            tap: InlineSink[RequestOutput] = InlineSink(
                lambda: True, lambda news: pieces.append(news.outputs[0].token_ids)
            )

            async def put(output: RequestOutput) -> None:
                pieces.append(output.outputs[0].token_ids)

            submission = Submission(request_id="r", prompt=[1], params=PARAMS)
            task = asyncio.ensure_future(engine.deliver(submission, OutputSink(put, tap)))
            await asyncio.sleep(0)
            (sequence_id,) = engine._outputs.sequence_ids
            for token in (5, 6, 7):
                step = SequenceOutput(request_id=sequence_id, token_ids=[token])
                engine._apply(engine._outputs.process([step]))
            await asyncio.sleep(0)
            assert pieces == [[5, 6, 7]]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()

    run(test())
