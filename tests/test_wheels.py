"""`make wheels`: what it checks of a wheel, and when an answer counts as streamed."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest

from release import wheels

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("octavo_engine/_native", "octavo_router/_fast")


def elf(machine: int) -> bytes:
    return b"\x7fELF\x02\x01" + bytes(12) + machine.to_bytes(2, "little") + bytes(44)


def wheel_of(folder: Path, target: wheels.Target, machine: int, names=NAMES) -> Path:
    wheel = folder / "octavo-0-py3-none-any.whl"
    with ZipFile(wheel, "w") as files:
        for name in names:
            files.writestr(f"{name}{target.suffix}", elf(machine))
    return wheel


@pytest.mark.parametrize("target", wheels.TARGETS.values(), ids=str)
def test_a_wheel_has_both_modules_for_its_processor(tmp_path: Path, target: wheels.Target):
    machine = wheels.ELF_MACHINES[target.machine]
    wheels.check_wheel(wheel_of(tmp_path, target, machine), target)
    (other,) = set(wheels.ELF_MACHINES.values()) - {machine}
    with pytest.raises(SystemExit, match=f"ELF machine {other}, not {target.machine}"):
        wheels.check_wheel(wheel_of(tmp_path, target, other), target)
    with pytest.raises(SystemExit, match=r"has \['octavo_engine/_native"):
        wheels.check_wheel(wheel_of(tmp_path, target, machine, NAMES[:1]), target)


@pytest.mark.parametrize(
    "header", [b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(14), b"MZ" + bytes(18)]
)
def test_what_is_no_64_bit_elf_file_has_no_machine(header: bytes):
    assert wheels.elf_machine(header) == 0


def test_the_machine_of_this_python_is_known():
    with open(sys.executable, "rb") as file:
        assert wheels.elf_machine(file.read(20)) in wheels.ELF_MACHINES.values()


def test_make_installs_the_tools_that_are_needed():
    makefile = (wheels.ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^release-tools:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    for tool in wheels.TOOLS:
        assert tool in recipe
    project = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text())
    assert set(project["build-system"]["requires"]) <= set(wheels.TOOLS)


def event(text: str) -> str:
    return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


def test_a_streamed_answer_has_parts_and_an_end():
    whole = event("The ") + event("capital") + 'data: {"choices": []}\n\ndata: [DONE]\n\n'
    assert wheels.text_of_stream(whole) == "The capital"
    with pytest.raises(SystemExit, match="has no end"):
        wheels.text_of_stream(event("The ") + event("capital"))
    with pytest.raises(SystemExit, match="was not streamed"):
        wheels.text_of_stream(event("The capital") + "data: [DONE]\n\n")
