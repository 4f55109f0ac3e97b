"""A window of audio in a request: what the encoder reads, its name, and rules for what is said."""

from __future__ import annotations

import msgspec


class TranscriptRules(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens may come next in a transcript; see sampling.transcript."""

    end_of_text: int
    first_timestamp: int  # it and all tokens behind it are times; 0: none may come
    no_timestamps: int
    max_initial_timestamp: int  # in steps of a timestamp
    suppressed: tuple[int, ...] = ()
    suppressed_at_begin: tuple[int, ...] = ()


class AudioWindow(msgspec.Struct, frozen=True, array_like=True):
    """Equal digests are equal windows: what is encoded already is not encoded again."""

    digest: bytes  # 16 bytes of the features
    features: bytes  # float32, [rows, columns] as the backend's `feature_shape` says
    rules: TranscriptRules | None = None
    slot: int = -1  # of the backend, once it is encoded; then `features` are empty
    # Rows of the window to which attention comes with the prompt's log-probabilities; 0: none.
    aligned_rows: int = 0
