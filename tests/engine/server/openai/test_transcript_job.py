"""The time limit of a transcription: that of the whole file."""

from __future__ import annotations

import pytest

from octavo_engine.errors import DeadlineExceeded
from octavo_engine.server.openai.audio.transcriber import TranscriptJob


def make_job(deadline_at: float | None) -> TranscriptJob:
    return TranscriptJob(
        request_id="a", group="a", translates=False, language=None, prompt="", temperature=None,
        deadline_at=deadline_at,
    )  # fmt: skip


def test_each_window_has_what_the_ones_before_it_left() -> None:
    job = make_job(10.0)
    assert [job.time_left_s(now) for now in (4.0, 9.5)] == [6.0, 0.5]
    with pytest.raises(DeadlineExceeded, match="within the request's time limit"):
        job.time_left_s(10.0)
    assert make_job(None).time_left_s(99.0) is None
