"""A window of audio in a request: what the encoder reads, and its name."""

from __future__ import annotations

import msgspec


class AudioWindow(msgspec.Struct, frozen=True, array_like=True):
    """Equal digests are equal windows: what is encoded already is not encoded again."""

    digest: bytes  # 16 bytes of the features
    features: bytes  # float32, [rows, columns] as the backend's `feature_shape` says
