"""From a sound file's bytes to the rows that the encoder reads. Runs in worker processes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.core.media.prepare import PreparationResult, PreparedPicture, prepare
from octavo_engine.core.media.spec import SoundSpec
from octavo_engine.errors import InvalidRequest
from octavo_engine.models.vision_config import ROWS_A_SOUND_TOKEN
from octavo_engine.speech.decode import AudioLimits, decode_audio
from octavo_engine.speech.mel import HOP, SAMPLE_RATE, feature_rows, log_mel
from octavo_engine.speech.resample import resample
from octavo_engine.state.media import MediaItem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.core.media.spec import MediaSpec

FRAMES_A_ROW = 2
DECODE_TIMEOUT_S = 15.0  # less than a worker has
VERSION = b"octavo-sound-1"  # raise it when preprocessing changes: old and new must never meet


class BadSound(ValueError):
    """What is wrong with it, for its sender."""


def prepare_media(data: bytes, spec: MediaSpec) -> PreparationResult:
    """Of a file. Never raises for what is in it."""
    return prepare_sound(data, spec) if isinstance(spec, SoundSpec) else prepare(data, spec)


def prepare_sound(data: bytes, spec: SoundSpec) -> PreparationResult:
    limits = AudioLimits(max_seconds=spec.max_seconds, decode_timeout_s=DECODE_TIMEOUT_S)
    try:
        return PreparationResult(_prepared(decode_audio(data, limits), spec))
    except InvalidRequest as error:  # of a parameter that has another name here
        return PreparationResult(None, str(error).removeprefix("file "))
    except BadSound as error:
        return PreparationResult(None, str(error))


def prepare_samples(samples: NDArray[np.float32], rate: int, spec: SoundSpec) -> PreparedPicture:
    """Of a caller's own sound, one channel. Raises BadSound."""
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise BadSound("must be one channel of finite samples")
    if len(samples) > spec.max_seconds * rate:
        raise BadSound(f"is longer than {spec.max_seconds:g} seconds; send it in parts")
    return _prepared(resample(samples.astype(np.float32), rate, SAMPLE_RATE), spec)


def _prepared(samples: NDArray[np.float32], spec: SoundSpec) -> PreparedPicture:
    """Rows as far as there is sound: what the model was trained to mask is left out."""
    vision = spec.media.vision
    num_rows = -(-len(samples) // (HOP * FRAMES_A_ROW))
    if num_rows < ROWS_A_SOUND_TOKEN:
        least = (ROWS_A_SOUND_TOKEN - 1) * FRAMES_A_ROW * HOP / SAMPLE_RATE
        raise BadSound(f"has {len(samples) / SAMPLE_RATE:g} seconds; more than {least:g} are read")
    frames = log_mel(samples, vision.num_mels, FRAMES_A_ROW * vision.num_tokens)
    data = feature_rows(frames)[:num_rows].tobytes()
    digest = hashlib.blake2b(VERSION + data, digest_size=16).digest()
    item = MediaItem(digest=digest, height=num_rows, width=vision.input_columns, pixels=data)
    return PreparedPicture((item,))
