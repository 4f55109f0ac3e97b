"""`--help` of every command: short, examples first; `--help=all` has everything."""

from __future__ import annotations

import re

import pytest

from octavo import cli
from octavo.commands.bench import KINDS
from octavo.options.flags import ENGINE_FLAGS, SERVER_FLAGS
from octavo.options.help import HELP

MOST_LINES = 75
COMMANDS = [*cli.COMMANDS, *(f"bench {kind}" for kind in KINDS)]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def shown(capsys, command: str, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main((*command.split(), *arguments))
    assert ended.value.code == 0
    out: str = capsys.readouterr().out
    return out


def test_every_command_has_two_examples():
    assert set(HELP) == set(COMMANDS)
    for command, text in HELP.items():
        assert len(text.examples) == 2
        assert all(example.startswith(f"octavo {command}") for example in text.examples)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_starts_with_examples(capsys, command):
    out = shown(capsys, command, "--help")
    assert len(out.splitlines()) <= MOST_LINES
    assert out.startswith(f"usage: octavo {command} ")
    assert out.index("\nexamples:\n") < out.index("\n  -h")
    for example in HELP[command].examples:
        assert f"\n  {example}\n" in out
    assert "[OCTAVO_" not in out and "(default: )" not in out


@pytest.mark.parametrize("command", COMMANDS)
def test_common_options_and_those_of_examples_exist(capsys, command):
    everything = set(FLAG.findall(shown(capsys, command, "--help=all")))
    assert {f"--{name}" for name in HELP[command].common} <= everything
    named = {flag for example in HELP[command].examples for flag in FLAG.findall(example)}
    assert named <= everything


@pytest.mark.parametrize("command", [name for name, text in HELP.items() if text.common])
def test_the_number_of_other_options_is_true(capsys, command):
    short, everything = shown(capsys, command, "--help"), shown(capsys, command, "--help=all")
    match = re.search(rf"octavo {command} --help=all shows (\d+) more options", short)
    assert match is not None
    options = re.compile(r"^  (?:-\w(?: \w+)?, )?(--[a-z-]+)", re.M)
    hidden = set(options.findall(everything)) - set(options.findall(short))
    assert int(match[1]) == len(hidden)


def test_all_names_the_variable_of_every_flag(capsys):
    out = re.sub(r"\s+", " ", shown(capsys, "serve", "--help=all"))
    for flag in (*ENGINE_FLAGS, *SERVER_FLAGS):
        assert f"[{flag.env}]" in out.replace("- ", "-")
    assert "(default: )" not in out


def test_chat_hides_the_simulator(capsys):
    assert "--sim-" not in shown(capsys, "chat", "--help")
    assert "--sim-" in shown(capsys, "chat", "--help=all")


def test_a_command_with_few_options_takes_all_too(capsys):
    assert shown(capsys, "down", "--help") == shown(capsys, "down", "--help=all")
