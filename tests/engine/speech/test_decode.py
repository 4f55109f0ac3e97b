"""Files to samples: formats, limits, and bytes that are no audio."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.speech.decode import AudioLimits, decode_audio
from octavo_engine.speech.resample import resample


def tone(rate: int, seconds: float = 0.5, hz: float = 440.0) -> np.ndarray:
    times = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * hz * times)).astype(np.float32)


def wav(samples: np.ndarray, rate: int, *, kind: int = 1, bits: int = 16) -> bytes:
    """[frames] or [frames, channels]."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    if kind == 3:
        body = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        body = np.round(samples * 127 + 128).astype(np.uint8).tobytes()
    else:
        words = np.round(samples.astype(np.float64) * (2 ** (bits - 1) - 1)).astype("<i4")
        body = words.reshape(-1, 1).view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    step = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * step, step, bits)
    parts = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WAVE" + parts


def encoded(form: str, codec: str, rate: int = 48000) -> bytes:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        both = np.stack([tone(rate)] * 2)
        for place in range(0, both.shape[1], 1024):
            part = np.ascontiguousarray(both[:, place : place + 1024])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = rate, place
            resampler = av.AudioResampler(stream.format, "stereo", rate)
            for each in resampler.resample(frame):
                each.pts = None
                container.mux(stream.encode(each))
        container.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "bits", "accuracy"),
    [(1, 8, 0.01), (1, 16, 1e-4), (1, 24, 1e-6), (1, 32, 1e-6), (3, 32, 1e-6), (3, 64, 1e-6)],
)
def test_wav_of_every_form(kind: int, bits: int, accuracy: float) -> None:
    samples = tone(16000)
    read = decode_audio(wav(samples, 16000, kind=kind, bits=bits))
    np.testing.assert_allclose(read, samples, atol=accuracy)


def test_channels_are_averaged() -> None:
    both = np.stack([tone(16000), -tone(16000), np.full(8000, 0.3, np.float32)], axis=1)
    np.testing.assert_allclose(decode_audio(wav(both, 16000)), np.full(8000, 0.1), atol=1e-3)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    ours = resample(tone(rate), rate, 16000)
    assert abs(len(ours) - 8000) <= 1
    middle = slice(200, 7800)
    np.testing.assert_allclose(ours[middle], tone(16000)[middle], atol=2e-3)


def test_resampling_removes_what_is_too_high() -> None:
    ours = resample(tone(48000, hz=11000.0), 48000, 16000)
    assert np.abs(ours[200:-200]).max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "codec"), [("flac", "flac"), ("mp3", "mp3"), ("ogg", "libopus"), ("mp4", "aac")]
)
def test_other_formats_are_read_by_the_decoder(form: str, codec: str) -> None:
    read = decode_audio(encoded(form, codec))
    assert 0.45 < len(read) / 16000 < 0.65
    spectrum = np.abs(np.fft.rfft(read[1000:7000]))
    assert abs(np.argmax(spectrum) * 16000 / 6000 - 440) < 5
    assert 0.3 < np.abs(read[1000:7000]).max() < 0.75


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "file is empty"),
        (b"RIFF\0\0\0\0WAVE", "no samples"),
        (wav(tone(16000), 16000)[:30], "format of the WAV file is cut off"),
        (wav(tone(16000), 16000, kind=1, bits=16).replace(b"\x01\0\x01\0", b"\x11\0\x01\0", 1),
         "format 17"),
        (wav(tone(16000), 10), "10 samples a second"),
        (wav(tone(16000)[:80], 16000), "less than 0.01 seconds"),
        (wav(np.full(900, np.nan, np.float32), 16000, kind=3, bits=32), "not finite"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as info:
        decode_audio(data)
    assert info.value.param == "file"


def test_limits_of_bytes_and_seconds() -> None:
    data = wav(tone(16000, 2.0), 16000)
    with pytest.raises(InvalidRequest, match="at most 1000 are accepted"):
        decode_audio(data, AudioLimits(max_bytes=1000))
    with pytest.raises(InvalidRequest, match="longer than 1 seconds"):
        decode_audio(data, AudioLimits(max_seconds=1.0))


@pytest.mark.slow
def test_the_decoder_has_the_same_limits() -> None:
    data = encoded("flac", "flac")
    with pytest.raises(InvalidRequest, match=r"longer than 0\.1 seconds"):
        decode_audio(data, AudioLimits(max_seconds=0.1))
    with pytest.raises(InvalidRequest, match="file cannot be read as audio"):
        decode_audio(b"no audio at all" * 100)


@pytest.mark.slow
def test_mutated_wav_files_are_read_or_refused() -> None:
    rng = random.Random(4)
    whole = wav(tone(16000, 0.05), 16000)
    for _ in range(3000):
        data = bytearray(whole[: rng.randrange(12, len(whole) + 1)])
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(12, min(len(data), 60)) if len(data) > 12 else 0] = rng.randrange(
                256
            )
        try:
            samples = decode_audio(bytes(b"RIFF" + data[4:8] + b"WAVE" + data[12:]))
        except InvalidRequest:
            continue
        assert np.isfinite(samples).all() and len(samples) <= 16 * len(whole)


@pytest.mark.slow
def test_mutated_files_of_other_formats_are_read_or_refused() -> None:
    rng = random.Random(4)
    for form, codec in (("flac", "flac"), ("mp3", "mp3"), ("mp4", "aac")):
        whole = encoded(form, codec)
        for _ in range(4):
            data = bytearray(whole)
            for _ in range(20):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                assert np.isfinite(decode_audio(bytes(data))).all()
            except InvalidRequest:
                continue
