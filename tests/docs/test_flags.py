"""Flags, fields and paths that the pages name are those of the code."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import yaml

from octavo.cli import COMMANDS
from octavo.commands import bundle
from octavo.commands.bench import KINDS
from octavo.options.vllm_flags import ALWAYS_SO, IGNORED, RENAMED, REPLACED
from octavo_operator.spec import LLMDeployment
from tests.docs.pages import DOCS, GENERATED, ROOT, blocks, name, pages, prose

if TYPE_CHECKING:
    from pathlib import Path

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_COMMAND = re.compile(r"(?<![\w/-])octavo +(" + "|".join(sorted(COMMANDS)) + r")\b([^\n|;&`]*)")
# Of other programs, in prose; in blocks they are told by the program's name.
FOREIGN = frozenset(
    (
        "--strict",  # mypy
        "--rolling-minutes",  # pytest, of e2e/
        "--ignore-missing",  # sha256sum
        "--set", "--create-namespace", "--take-ownership", "--reuse-values",  # helm
        "--server-side",  # kubectl
        "--no-deps",  # pip
        "--install",  # wsl
        "--target", "--build-arg", "--reproducible",  # docker, kaniko
    )
)  # fmt: skip
# Theirs, in the tables that say what becomes of them here.
TABLES_OF_OTHERS = ("migration.md", "comparison.md")


@cache
def flags_of(command: str) -> frozenset[str]:
    """From its --help, and that of its own sub-commands."""
    main = import_module(f"octavo.commands.{command.replace('-', '_')}").main
    said = _said(main, command, [])
    subs = {"bench": tuple(KINDS), "bundle": tuple(bundle.COMMANDS)}
    for sub in subs.get(command, ()):
        said += _said(main, command, [sub])
    known = set(_FLAG.findall(said))
    if command == "serve":
        known |= {*RENAMED, *REPLACED, *IGNORED, *ALWAYS_SO}
    return frozenset(known)


def _said(main, command: str, words: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(f"octavo {command}", [*words, "--help=all"])
    return re.sub(r"-\n\s+", "-", said.getvalue())  # argparse breaks long words at their dashes


def named(text: str) -> list[tuple[str, str]]:
    """(command, flag) of every `octavo COMMAND … --flag …`."""
    text = text.replace("\\\n", " ")
    return [
        (command, flag)
        for command, rest in _COMMAND.findall(text)
        for flag in _FLAG.findall(rest.partition("#")[0])
    ]


def test_the_flags_of_a_command_are_found():
    assert {"--port", "--tool-call-parser", "--no-docs"} <= flags_of("serve")
    assert "--upstreams" in flags_of("router")
    assert "--trace" in flags_of("bench")
    assert named("octavo serve m --port 1 \\\n  --nope | octavo chat --url x") == [
        ("serve", "--port"), ("serve", "--nope"), ("chat", "--url")
    ]  # fmt: skip


@pytest.mark.parametrize("page", [page for page in pages() if page.name not in GENERATED], ids=name)
def test_commands_have_the_flags_that_are_given_to_them(page: Path):
    for command, flag in named(page.read_text(encoding="utf-8")):
        assert flag in flags_of(command), f"octavo {command} has no {flag}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_flags_in_prose_are_somebodys(page: Path):
    if page.name in TABLES_OF_OTHERS or page.parent.name == "adr":
        return
    ours = frozenset[str]().union(*map(flags_of, COMMANDS))
    spans = re.findall(r"`([^`\n]+)`", prose(page))
    words = {
        flag
        for span in spans
        if not re.match(r"(kubectl|helm|docker|buildah|kaniko|python|pip|BuildKit) ", span)
        for flag in _FLAG.findall(span)
    }
    assert words - FOREIGN - ours == set()


@pytest.mark.parametrize("page", pages(), ids=name)
def test_deployments_in_examples_are_accepted(page: Path):
    for block in blocks(page):
        if block.language != "yaml" or "kind: LLMDeployment" not in block.text:
            continue
        for document in yaml.safe_load_all(block.text):
            if not isinstance(document, dict) or document.get("kind") != "LLMDeployment":
                continue
            document["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
            assert LLMDeployment.parse(document).model.uri, block.where


def test_fields_of_the_resource_that_are_named_exist():
    crd = yaml.safe_load((ROOT / "crds" / "llmdeployments.octavo.dev.yaml").read_text())
    top = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for page in pages():
        for path in re.findall(r"`spec\.([a-zA-Z.]+)`", page.read_text(encoding="utf-8")):
            node = top
            for part in path.split("."):
                if node.get("x-kubernetes-preserve-unknown-fields") or "properties" not in node:
                    break
                assert part in node["properties"], f"{name(page)}: spec.{path}"
                node = node["properties"][part]


def test_our_columns_of_the_migration_page_are_true():
    """A row's last cell is ours: flags in backticks there exist."""
    ours = frozenset[str]().union(*map(flags_of, COMMANDS))
    for line in (DOCS / "migration.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and line.count("|") >= 3:
            cells = line.strip("| \n").split(" | ")
            last = cells[1] if len(cells) > 1 else ""
            assert set(_FLAG.findall(" ".join(re.findall(r"`([^`]+)`", last)))) <= ours, line
