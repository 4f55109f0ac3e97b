"""Log-mel spectrograms against the library's."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from octavo_engine.speech.mel import feature_rows, log_mel


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.02, 3.7, 30.0, 34.0])
def test_equals_the_library(num_mels: int, seconds: float) -> None:
    random = np.random.default_rng(int(seconds * 10))
    times = np.arange(int(seconds * 16000)) / 16000
    tones = 0.3 * np.sin(2 * np.pi * (200 + 900 * times) * times)
    samples = (tones + random.normal(0, 0.01, len(times))).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    padded = np.zeros(480_000, np.float32)
    padded[: len(samples)] = samples[:480_000]
    # The one in numpy computes in 64 bits as ours does; the one in torch has errors of its own.
    theirs = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    ours = log_mel(samples, num_mels, 3000)
    assert ours.shape == (3000, num_mels)
    np.testing.assert_allclose(ours, theirs.T, atol=1e-5)
    rough = extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(ours, rough.T, atol=2e-4)


def test_silence_is_finite() -> None:
    ours = log_mel(np.zeros(16000, np.float32), 80, 3000)
    assert np.isfinite(ours).all() and np.ptp(ours) == 0


def test_rows_have_their_frames_and_those_beside() -> None:
    frames = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
    rows = feature_rows(frames)
    assert rows.tolist() == [
        [0, 0, 1, 2, 3, 4, 5, 6],
        [3, 4, 5, 6, 7, 8, 9, 10],
        [7, 8, 9, 10, 11, 12, 0, 0],
    ]
