"""/v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.core.pooling.async_pooling import WrongTask
from octavo_engine.server.generation.inflight import names_of
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.multipart import check_form
from octavo_engine.server.http.sse import DONE
from octavo_engine.server.openai.audio.form import AudioFields, read_form
from octavo_engine.server.openai.audio.transcriber import Transcriber, TranscriptJob
from octavo_engine.server.service import Service  # noqa: TC001
from octavo_engine.speech.decode import decode_audio
from octavo_engine.speech.languages import LANGUAGES
from octavo_engine.speech.mel import SAMPLE_RATE
from octavo_engine.speech.transcript import Segment, cut_sections, srt, vtt
from octavo_engine.state.request import BACKGROUND

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import numpy as np
    from numpy.typing import NDArray

_PLAIN = (b"content-type", b"text/plain; charset=utf-8")
_VTT = (b"content-type", b"text/vtt; charset=utf-8")
MAX_SECTIONS_AT_ONCE = 4


async def transcriptions(exchange: Exchange, service: Service) -> None:
    await _answer(exchange, service, translates=False)


async def translations(exchange: Exchange, service: Service) -> None:
    await _answer(exchange, service, translates=True)


async def _answer(exchange: Exchange, service: Service, *, translates: bool) -> None:
    check_form(exchange.header(b"content-type"))
    info = service.engine.info
    if info.speech is None:
        raise WrongTask(
            f"the model {info.names[0]} is not a speech model; it supports {', '.join(info.tasks)}",
            param="model",
        )
    limit_s = exchange.time_left_s(service.settings.request_timeout_s)
    deadline_at = None if limit_s is None else time.monotonic() + limit_s
    fields = await read_form(exchange)
    service.model.check_name(fields.model)
    job = TranscriptJob(
        request_id=f"transcript-{exchange.request_id}",
        group=exchange.group or f"transcript-{exchange.request_id}",
        translates=translates,
        language=fields.language,
        prompt=fields.prompt,
        temperature=fields.temperature,
        has_words="word" in fields.granularities,
        priority=BACKGROUND if exchange.is_background else 0,
        deadline_at=deadline_at,
    )
    transcriber = Transcriber(service.engine, job)
    samples = await asyncio.to_thread(decode_audio, fields.file)
    async with exchange.while_present():
        work = asyncio.ensure_future(_work(exchange, transcriber, job, fields, samples))

        async def stop() -> None:
            work.cancel()

        with service.running.track(tuple(names_of(job.request_id)), stop):
            try:
                await work
            finally:
                work.cancel()


async def _work(
    exchange: Exchange,
    transcriber: Transcriber,
    job: TranscriptJob,
    fields: AudioFields,
    samples: NDArray[np.float32],
) -> None:
    segments: list[Segment] = []
    if fields.stream:
        await _stream(exchange, transcriber, samples)
        return
    async with aclosing(_segments(transcriber, samples)) as windows:
        async for window in windows:
            segments += window
    payload, kind = _written(segments, job, fields, len(samples) / SAMPLE_RATE)
    await exchange.reply(payload, headers=kind)


async def _segments(
    transcriber: Transcriber, samples: NDArray[np.float32]
) -> AsyncGenerator[list[Segment], None]:
    """Of all sections in their order; the next few are computed meanwhile."""
    sections = cut_sections(samples)
    begins = [0]
    for section in sections:
        begins.append(begins[-1] + len(section))
    room = asyncio.Semaphore(MAX_SECTIONS_AT_ONCE)

    async def whole(index: int) -> list[Segment]:
        async with room:
            runs = transcriber.run(sections[index], begins[index] / SAMPLE_RATE)
            async with aclosing(runs) as windows:
                return [segment async for window in windows for segment in window]

    # The first one goes alone as far as its windows are shown at once.
    async with aclosing(transcriber.run(sections[0])) as windows:
        if len(sections) == 1:
            async for window in windows:
                yield window
            return
        first = [segment async for window in windows for segment in window]
    yield first
    others = [asyncio.ensure_future(whole(index)) for index in range(1, len(sections))]
    try:
        for other in others:
            yield await other
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _stream(
    exchange: Exchange, transcriber: Transcriber, samples: NDArray[np.float32]
) -> None:
    """A delta for each window, then all of it."""
    text, is_open = "", False
    async with aclosing(_segments(transcriber, samples)) as windows:
        async for window in windows:
            if not is_open:
                await exchange.open_stream()
                is_open = True
            delta = _text(window, has_before=bool(text))
            text += delta
            await exchange.write(_event({"type": "transcript.text.delta", "delta": delta}))
    if not is_open:
        await exchange.open_stream()
    done = {"type": "transcript.text.done", "text": text, "usage": _usage(samples)}
    await exchange.write(_event(done))
    await exchange.close(DONE)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _text(segments: list[Segment], *, has_before: bool = False) -> str:
    text = "".join(segment.text for segment in segments)
    return text if has_before else text.lstrip()


def _usage(samples: NDArray[np.float32]) -> dict[str, Any]:
    return {"type": "duration", "seconds": -(-len(samples) // SAMPLE_RATE)}


def _written(
    segments: list[Segment], job: TranscriptJob, fields: AudioFields, duration: float
) -> tuple[bytes, list[tuple[bytes, bytes]] | None]:
    text = _text(segments).rstrip()
    usage = {"type": "duration", "seconds": -int(-duration // 1)}
    match fields.response_format:
        case "text":
            return f"{text}\n".encode(), [_PLAIN]
        case "srt":
            return srt(segments).encode(), [_PLAIN]
        case "vtt":
            return vtt(segments).encode(), [_VTT]
        case "json":
            return msgspec.json.encode({"text": text, "usage": usage}), None
    answer: dict[str, Any] = {
        "task": "translate" if job.translates else "transcribe",
        "language": LANGUAGES[job.language or "en"],
        "duration": duration,
        "text": text,
        "usage": usage,
    }
    if fields.granularities != {"word"}:
        answer["segments"] = [_shown(index, segment) for index, segment in enumerate(segments)]
    if job.has_words:
        answer["words"] = [
            {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
            for segment in segments
            for word in segment.words
        ]
    return msgspec.json.encode(answer), None


def _shown(index: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
