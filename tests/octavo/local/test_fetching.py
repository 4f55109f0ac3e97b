"""The step that brings weights before the first replica starts, as a child process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from octavo.local.fetching import Fetching
from octavo.local.launch import Launch
from tests.fakes.clock import ManualClock
from tests.fakes.model_store import Store, serving
from tests.fakes.process import environment

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = os.urandom(100_000)


def until(fetching: Fetching, is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, fetching.detail
        fetching.look()
        if fetching._child is not None:
            fetching._child.wait(30)


def test_it_is_tried_again_until_it_succeeds(tmp_path):
    said: list[str] = []
    clock = ManualClock()
    with serving(Store()) as store:
        uri = f"{store.url}/m.gguf"
        launch = Launch("r", {}, fetch=(uri, f"--to={tmp_path / 'to'}"))
        fetching = Fetching(
            launch, tmp_path / "log", environ=environment(), notify=said.append, clock=clock
        )
        until(fetching, lambda: bool(fetching.problem))
        assert fetching.detail == "ModelNotFound: m.gguf does not exist (404); check the address"
        assert said == [f"{uri} could not be fetched; again in 1 s: {fetching.detail}"]
        fetching.look()
        assert fetching._child is None  # not before the pause is over

        store.files["/m.gguf"] = CONTENT
        clock.advance(1.0)
        until(fetching, lambda: fetching.is_done)
    assert said[1:] == [f"fetched {uri}"]
    assert (tmp_path / "to" / "m.gguf").read_bytes() == CONTENT


def test_nothing_to_fetch_is_done_at_once(tmp_path):
    launch = Launch("r", {})
    assert Fetching(
        launch, tmp_path / "log", environ={}, notify=print, clock=ManualClock()
    ).is_done  # fmt: skip
