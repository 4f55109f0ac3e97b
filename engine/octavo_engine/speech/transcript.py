"""What tokens of a window say, when, and how sure: pure functions after Whisper's own method.

A window of 30 seconds is answered by text between times. The next window begins where the last
whole segment ended, so that no word is cut in two.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.speech.mel import SAMPLE_RATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.speech.alignment import Word

SECONDS_PER_TIME = 0.02  # a step of a timestamp
MAX_INITIAL_TIMESTAMP = 50  # steps: the first text of a window begins within its first second
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION = 2.4  # beyond it a text repeats itself
MIN_LOGPROB = -1.0  # below it a text is a guess
MAX_NO_SPEECH = 0.6
PROMPT_RESET_TEMPERATURE = 0.5  # what was drawn hotter is no context for what follows

SECTION_SECONDS = 300.0  # of a long file, which are transcribed side by side
_CUT_SEARCH_SECONDS = 30.0  # the quietest place is looked for so far on either side
_QUIET_SECONDS = 0.1


class SpeechTokens(NamedTuple):
    """Special tokens of a Whisper vocabulary."""

    start: int
    end: int
    transcribe: int
    translate: int
    no_speech: int
    no_timestamps: int
    previous: int
    languages: dict[str, int]  # by code; empty: the model knows English only

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1


class Segment(NamedTuple):
    """A stretch of text; times in seconds from the file's beginning."""

    start: float
    end: float
    tokens: list[int]  # times included
    text: str
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0
    seek: int = 0  # where its window began, in hundredths of a second
    words: tuple[Word, ...] = ()  # where they were requested


class DecodedWindow(NamedTuple):
    """One window's answer at one temperature."""

    tokens: list[int]  # without the end
    text: str
    avg_logprob: float
    temperature: float
    no_speech_prob: float

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


def find_tokens(find: Callable[[str], int | None], vocab_size: int) -> SpeechTokens:
    """`find` has the id of a special token's text. Raises KeyError that names a missing one."""

    def need(*names: str) -> int:
        for name in names:
            token = find(name)
            if token is not None:
                return token
        raise KeyError(names[0])

    languages: dict[str, int] = {}
    if vocab_size >= MULTILINGUAL_VOCABULARY:
        from octavo_engine.speech.languages import LANGUAGES

        found = {code: find(f"<|{code}|>") for code in LANGUAGES}
        languages = {code: token for code, token in found.items() if token is not None}
    return SpeechTokens(
        start=need("<|startoftranscript|>"),
        end=need("<|endoftext|>"),
        transcribe=need("<|transcribe|>"),
        translate=need("<|translate|>"),
        no_speech=need("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=need("<|notimestamps|>"),
        previous=need("<|startofprev|>"),
        languages=languages,
    )


MULTILINGUAL_VOCABULARY = 51865  # smaller ones are of models for English


def prompt_tokens(
    tokens: SpeechTokens,
    *,
    language: str,
    translates: bool,
    previous: Sequence[int] = (),
    max_length: int = 448,
) -> list[int]:
    """What a window's answer begins with; of the text before it as much as half the context has
    room for."""
    prompt = [tokens.previous, *previous[-(max_length // 2 - 1) :]] if previous else []
    prompt.append(tokens.start)
    if tokens.languages:
        prompt.append(tokens.languages[language])
        prompt.append(tokens.translate if translates else tokens.transcribe)
    return prompt


def compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def is_silence(said: DecodedWindow) -> bool:
    """Nothing was said in this window, and what was decoded is a guess."""
    return said.no_speech_prob > MAX_NO_SPEECH and said.avg_logprob <= MIN_LOGPROB


def is_doubtful(said: DecodedWindow) -> bool:
    """Another temperature may do better."""
    if is_silence(said):
        return False
    return said.compression_ratio > MAX_COMPRESSION or said.avg_logprob < MIN_LOGPROB


def cut_segments(
    said: DecodedWindow,
    tokens: SpeechTokens,
    *,
    seek: int,
    frames: int,
    decode: Callable[[list[int]], str],
) -> tuple[list[Segment], int]:
    """The segments of a window from hundredth of a second `seek` on that has so many, and where
    the next window begins."""
    first = tokens.first_timestamp
    is_time = [token >= first for token in said.tokens]
    ends_alone = len(is_time) >= 2 and is_time[-1] and not is_time[-2]
    cuts = [i for i in range(1, len(is_time)) if is_time[i - 1] and is_time[i]]
    begin_s = seek / 100

    def made(own: list[int], start: float, end: float) -> Segment:
        text = decode([token for token in own if token < tokens.end])
        return Segment(
            begin_s + start,
            begin_s + max(start, end),
            own,
            text,
            said.temperature,
            said.avg_logprob,
            said.compression_ratio,
            said.no_speech_prob,
            seek,
        )

    if not cuts:
        times = [token - first for token in said.tokens if token >= first]
        end = times[-1] * SECONDS_PER_TIME if times and times[-1] > 0 else frames / 100
        start = times[0] * SECONDS_PER_TIME if len(times) > 1 else 0.0
        segment = made(list(said.tokens), start, min(end, frames / 100))
        return ([segment] if segment.text.strip() else []), seek + frames
    cuts += [len(said.tokens)] if ends_alone else []
    segments, last = [], 0
    for cut in cuts:
        own = said.tokens[last:cut]
        start, end = ((token - first) * SECONDS_PER_TIME for token in (own[0], own[-1]))
        segments.append(made(own, start, end))
        last = cut
    spoken = [segment for segment in segments if segment.text.strip()]
    if ends_alone:
        return spoken, seek + frames
    step = 2 * (said.tokens[last - 1] - first)
    return spoken, seek + (min(step, frames) if step > 0 else frames)


def cut_sections(samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """A long file cut where it is quietest, near every fifth minute; a short one whole."""
    length = int(SECTION_SECONDS * SAMPLE_RATE)
    reach = int(_CUT_SEARCH_SECONDS * SAMPLE_RATE)
    quiet = int(_QUIET_SECONDS * SAMPLE_RATE)
    sections, begin = [], 0
    while len(samples) - begin > length + reach:
        around = samples[begin + length - reach : begin + length + reach]
        blocks = around[: len(around) // quiet * quiet].reshape(-1, quiet)
        loudness = np.square(blocks, dtype=np.float32).mean(axis=1)
        quietest = int(np.argmin(loudness)) * quiet + quiet // 2
        end = begin + length - reach + quietest
        sections.append(samples[begin:end])
        begin = end
    sections.append(samples[begin:])
    return sections


def srt(segments: Iterable[Segment]) -> str:
    parts = [
        f"{i}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{_line(s)}\n"
        for i, s in enumerate(segments, 1)
    ]
    return "\n".join(parts)


def vtt(segments: Iterable[Segment]) -> str:
    parts = [f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{_line(s)}\n" for s in segments]
    return "\n".join(["WEBVTT\n", *parts])


def _line(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    total = round(seconds * 1000)
    minutes, millis = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{millis // 1000:02}{point}{millis % 1000:03}"
