"""Every parser of outside bytes reads or refuses what is hostile: a share of `make fuzz`.

Red when: a parser raises what is no refusal of its own, dies, hangs, or takes unbounded memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hostile import hunt
from tests.hostile.hunt import CORPUS, PARSERS, kept_inputs

if TYPE_CHECKING:
    from pathlib import Path

_FILES = 1500
_SECONDS = 6.0


def _folders() -> set[str]:
    return {path.name for path in CORPUS.iterdir() if path.is_dir()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_mutated_inputs_are_read_or_refused(name: str) -> None:
    counts = hunt.hunt(name, count=_FILES, seconds=_SECONDS, seed=1)
    assert not counts.failure, counts.failure
    assert counts.tried > 5
    assert counts.read, "no input is valid: nothing behind the first check was tried"
    assert counts.read + counts.refused == counts.tried


def test_each_folder_of_the_corpus_is_some_parsers() -> None:
    known = {name for name in PARSERS if kept_inputs(name)}
    assert len(known) == len(_folders()) > 0


@pytest.mark.parametrize("name", [name for name in PARSERS if kept_inputs(name)])
def test_inputs_that_once_failed_are_read_or_refused(name: str, tmp_path: Path) -> None:
    read, _, refusals = PARSERS[name].open(tmp_path)
    for path in kept_inputs(name):
        try:
            read(path.read_bytes())
        except refusals:
            continue


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("os.kill(os.getpid(), 11)", "crashes: SIGSEGV"),
        ("while True: pass", "hangs: SIGPROF"),
        ("bytearray(8 << 30)", "MemoryError"),
        ("kept.append(bytearray(1 << 20))", "growth_mib"),
    ],
)
def test_the_search_finds(
    body: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A parser with such a fault, at one input in some."""
    monkeypatch.setattr(hunt, "CORPUS", tmp_path)
    module = tmp_path / "faulty_parser.py"
    module.write_text(
        "import os\nfrom tests.hostile import hunt\n"
        "from tests.hostile.parser import HostileParser\n"
        f"kept = []\ndef read(data):\n    if len(data) % 5 == 0:\n        {body}\n"
        "hunt.PARSERS['faulty'] = HostileParser(open=lambda folder: (read, [b'1234'], ()))\n"
        "hunt._CPU_S = 0.3\nhunt.main()\n"
    )
    counts = hunt.hunt("faulty", count=2000, seconds=60, seed=1, program=(str(module),))
    assert shown in counts.failure
    assert counts.kept.startswith(str(tmp_path))
