"""Every command of README, quick starts and how-tos that this machine can run is run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT, Block, blocks, name, prose
from tests.docs.shell import Newcomer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

STRICT = [ROOT / "README.md", *sorted(DOCS.glob("quickstart-*.md"))]
FOLLOWED = [
    *STRICT, DOCS / "structured-output.md", DOCS / "embeddings.md", DOCS / "run-batch.md",
    DOCS / "keys-and-tls.md", DOCS / "dialect-plugin.md",
]  # fmt: skip
# What a machine without a cluster, a GPU, or another hour lacks.
ELSEWHERE = re.compile(
    r"\b(kubectl|helm|kind|docker|skopeo|make|pip|git|nvidia-smi|--device cuda)\b"
)


def marked(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.mark in ("run", "start", "save")]


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    person = Newcomer(tmp_path)
    yield person
    person.leave()


@pytest.mark.parametrize("page", [page for page in FOLLOWED if marked(page)], ids=name)
def test_a_page_can_be_followed(page: Path, newcomer: Newcomer):
    for block in marked(page):
        newcomer.follow(block)


@pytest.mark.parametrize("page", STRICT, ids=name)
def test_every_command_is_run_or_needs_more_than_this_machine(page: Path):
    for block in blocks(page):
        if block.language in ("sh", "python") and block.mark not in ("run", "start"):
            assert block.mark == "cluster", f"{block.where}: mark it run, start or cluster"
            assert ELSEWHERE.search(block.text), f"{block.where} could be run"


def test_a_shell_block_that_fails_is_seen(newcomer: Newcomer):
    broken = Block(ROOT / "README.md", 1, "sh", "octavo serve --no-such-flag\n", "run")
    with pytest.raises(AssertionError, match=r"README.md:1 failed"):
        newcomer.follow(broken)


def test_files_that_commands_name_are_there():
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        for block in blocks(page):
            if block.language == "sh":
                found = re.findall(
                    r"(?<![\w/.-])(?:manifests|charts|crds|images|e2e)/[\w./-]+", block.text
                )
                for path in found:
                    assert (ROOT / path).exists(), f"{block.where}: {path}"


def test_make_targets_that_are_named_exist():
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]:
        shell = "".join(block.text for block in blocks(page))
        spans = "\n".join(re.findall(r"`([^`\n]+)`", prose(page)))
        for target in re.findall(r"(?:^|=1 )make ([a-z0-9-]+)", f"{shell}\n{spans}", re.M):
            assert target in known, f"{name(page)}: make {target}"


def made(target: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(shutil.which("make")), "--no-print-directory", target]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_make_lists_its_targets():
    makefile = (ROOT / "Makefile").read_text()
    described = re.findall(r"^([a-z0-9-]+):.*  ## ", makefile, re.M)
    listed = [line.split()[0] for line in made("help").stdout.splitlines()]
    assert listed == described
    assert {"demo", "test", "test-arm64", "release", "cluster-up"} <= set(listed)


def test_kind_up_without_kind_names_what_does(tmp_path: Path):
    (tmp_path / "bash").symlink_to("/bin/bash")
    done = made("kind-up", PATH=f"{tmp_path}:/nowhere")
    assert done.returncode == 2
    assert "kind-up needs Docker and kind >= 0.24; without them: make cluster-up" in done.stderr


def test_values_that_are_set_are_in_the_chart():
    values = yaml.safe_load((ROOT / "charts" / "octavo" / "values.yaml").read_text())
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        for block in blocks(page):
            if "charts/octavo" not in block.text and "octavo-0.1.0.tgz" not in block.text:
                continue
            for key in re.findall(r"--set(?:-string)? ([\w.]+)=", block.text):
                node = values
                for part in key.split("."):
                    assert isinstance(node, dict) and part in node, f"{block.where}: {key}"
                    node = node[part]


def test_a_cluster_gives_its_first_token_after_four_commands():
    """What the tests on a real cluster execute word for word."""
    (block,) = [
        block
        for block in blocks(ROOT / "README.md")
        if (block.mark, block.argument) == ("cluster", "first token")
    ]
    programs = [shlex.split(command)[0] for command in block.commands]
    assert programs == ["helm", "kubectl", "kubectl", "curl"]
