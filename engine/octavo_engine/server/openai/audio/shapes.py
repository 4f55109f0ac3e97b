"""Shapes of transcripts, for the description of the API."""

from __future__ import annotations

from typing import Literal

import msgspec


class TranscriptUsage(msgspec.Struct, kw_only=True):
    type: Literal["duration"]
    seconds: int


class TranscriptWord(msgspec.Struct, kw_only=True):
    """Of timestamp_granularities word; times in seconds."""

    word: str
    start: float
    end: float


class TranscriptSegment(msgspec.Struct, kw_only=True):
    """Of response_format verbose_json; times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcript(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What has a default is of response_format verbose_json only."""

    text: str
    usage: TranscriptUsage
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptSegment] | None = None
    words: list[TranscriptWord] | None = None


class TranscriptEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`delta` is of delta events, `text` and `usage` of the last one."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: TranscriptUsage | None = None
