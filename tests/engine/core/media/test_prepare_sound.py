"""Sounds become the rows that transformers' processor makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.core.media.prepare_sound import BadSound, prepare_samples, prepare_sound
from octavo_engine.core.media.spec import SoundSpec
from tests.engine.models.tiny_seeing import seeing_model
from tests.engine.speech.test_decode import wav

RATE = 16_000
SPEC = SoundSpec(seeing_model("qwen2audio").media)  # hears half a second


def noise(count: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(count) * 0.1
    return np.round(np.clip(values, -1, 1) * 32767) / 32768


@pytest.mark.parametrize("count", [481, 640, 641, 3200, 5000, 7999, 8000])
def test_rows_and_tokens_are_those_of_transformers(count: int) -> None:
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor(feature_size=16, n_fft=400, hop_length=160, chunk_length=1)
    extract.n_samples, extract.nb_max_frames = 8000, 50
    samples = noise(count)
    given = extract(
        samples, sampling_rate=RATE, return_attention_mask=True, padding="max_length",
        return_tensors="np",
    )  # fmt: skip
    num_frames = int(given["attention_mask"].sum())
    prepared = prepare_sound(wav(samples.astype(np.float32), RATE), SPEC).picture
    assert prepared is not None
    (item,) = prepared.tiles
    assert item.height == (num_frames - 1) // 2 + 1
    assert SPEC.media.rows_of(item) == ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
    rows = np.frombuffer(item.pixels, np.float32).reshape(item.height, 4, 16)
    frames = given["input_features"][0].T
    np.testing.assert_allclose(rows[:, 1:3].reshape(-1, 16), frames[: 2 * item.height], atol=2e-5)


def test_sounds_that_are_too_short_or_too_long_are_refused() -> None:
    for count, said in ((320, "has 0.02 seconds; more than 0.02 are read"), (8001, "is longer")):
        result = prepare_sound(wav(noise(count).astype(np.float32), RATE), SPEC)
        assert result.picture is None
        assert said in result.problem
    assert prepare_sound(b"", SPEC).problem == "is empty"
    assert "cannot be read as audio" in prepare_sound(b"RIFF....WAVE", SPEC).problem


def test_samples_of_a_caller_are_those_of_a_file() -> None:
    samples = noise(3200).astype(np.float32)
    of_file = prepare_sound(wav(samples, RATE), SPEC).picture
    assert of_file is not None
    assert prepare_samples(samples, RATE, SPEC).tiles[0].height == of_file.tiles[0].height
    slower = prepare_samples(samples[::2], RATE // 2, SPEC)
    assert slower.tiles[0].height == of_file.tiles[0].height
    for bad in (np.zeros((2, 3200), np.float32), np.full(3200, np.nan, np.float32)):
        with pytest.raises(BadSound, match="one channel of finite samples"):
            prepare_samples(bad, RATE, SPEC)
    with pytest.raises(BadSound, match=r"longer than 0\.5 seconds"):
        prepare_samples(samples, 4000, SPEC)


def test_another_sound_has_another_digest() -> None:
    digests = {
        prepare_samples(noise(3200, seed).astype(np.float32), RATE, SPEC).tiles[0].digest
        for seed in (1, 2, 2)
    }
    assert len(digests) == 2
