"""Custom logits processors: how they are found, and what happens when they misbehave."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.errors import InvalidRequest
from octavo_engine.sampling.batch import SAMPLED_NOT_FINITE, SAMPLED_OK, SamplingBatch
from octavo_engine.sampling.processors import (
    GROUP,
    ProcessedRow,
    ProcessorRegistry,
    apply_processors,
)
from octavo_engine.sampling.rows import new_table
from octavo_engine.sampling.sampler import sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLUGIN = """
def halve(token_ids, logits):
    logits /= 2
def ban_the_last(token_ids, logits):
    logits[token_ids[-1]] = float("-inf")
"""


@pytest.fixture
def registry(tmp_path, monkeypatch: pytest.MonkeyPatch) -> ProcessorRegistry:
    (tmp_path / "octavo_test_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {
        "halve": "octavo_test_plugin:halve",
        "ban_the_last": "octavo_test_plugin:ban_the_last",
        "gone": "octavo_test_plugin_that_is_not_there:f",
    }
    return ProcessorRegistry(EntryPoint(name, value, GROUP) for name, value in values.items())


def test_processors_run_in_the_order_of_their_names(registry: ProcessorRegistry) -> None:
    processors = registry.resolve(["ban_the_last", "halve"])
    logits = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    apply_processors([ProcessedRow(1, processors, np.array([0, 2], np.int32))], logits)
    assert logits.tolist() == [[1, 2, 3], [2, 2.5, -np.inf]]
    assert registry.resolve(["halve"]) == processors[1:]  # imported once


def test_an_unknown_name_is_refused_with_what_is_installed(registry: ProcessorRegistry) -> None:
    with pytest.raises(InvalidRequest, match="installed: ban_the_last, gone, halve") as caught:
        registry.resolve(["halve", "double"])
    assert caught.value.param == "logits_processors"


def test_without_plug_ins_the_answer_says_so() -> None:
    with pytest.raises(InvalidRequest, match=r"'x'; installed: none"):
        ProcessorRegistry([]).resolve(["x"])


def test_the_real_environment_is_searched_by_default() -> None:
    with pytest.raises(InvalidRequest, match="there is no logits processor 'no such thing'"):
        ProcessorRegistry().resolve(["no such thing"])


def test_a_plug_in_that_cannot_be_imported_is_refused(registry: ProcessorRegistry) -> None:
    with pytest.raises(InvalidRequest, match=r"'gone' .* cannot be imported"):
        registry.resolve(["gone"])


def test_one_that_raises_spoils_its_own_row_only(caplog: pytest.LogCaptureFixture) -> None:
    def raises(token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        raise ZeroDivisionError("in the plug-in")

    logits = np.array([[1, 2], [4, 3], [5, 6]], np.float32)
    batch = SamplingBatch(
        table=new_table(3),
        rows=np.arange(3, dtype=np.int32),
        positions=np.ones(3, np.int32),
        targets=np.full(3, -1, np.int32),
        history=np.zeros((3, 4), np.int32),
        processed=[ProcessedRow(1, (raises,), np.zeros(1, np.int32))],
    )
    sampled = sample(_native.Team(1), logits, batch)
    assert sampled.status.tolist() == [SAMPLED_OK, SAMPLED_NOT_FINITE, SAMPLED_OK]
    assert sampled.tokens.tolist() == [1, -1, 1]
    assert "ZeroDivisionError" in caplog.text
