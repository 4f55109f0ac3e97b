"""`octavo chat` on a real terminal: banner, commands, speed, Ctrl-C, history."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from octavo.chat.terminal import ChatDialogue, command_reply, describe_speed
from tests.fakes.process import serving
from tests.fakes.terminal import PATIENCE_S, Terminal


@pytest.fixture(scope="module")
def server():
    with serving("m", "--served-model-name", "sim") as server:
        yield server


@pytest.fixture
def chat(server, tmp_path):
    arguments = ("chat", "--url", server.url, "--max-tokens", "20", "--seed", "3")
    terminal = Terminal(*arguments, OCTAVO_HOME=str(tmp_path))
    try:
        terminal.wait_for(r"Ctrl-C stops an answer\.\n\n> ")
        yield terminal
    finally:
        terminal.close()


def test_it_opens_with_the_model_and_the_server(chat, server):
    assert f"sim at {server.url}" in chat.screen


def test_an_answer_is_followed_by_its_speed(chat):
    chat.type("hi\n")
    chat.wait_for(r"\(20 tokens, \d+\.\d tokens per second\)\n\n> $")


def test_commands_are_listed_and_do_what_they_say(chat):
    chat.type("/help\n")
    chat.wait_for(r"/system TEXT +set the system message")
    chat.type("/system Be brief.\n")
    chat.wait_for(r"\(system message set\)")
    chat.type("/reset\n")
    chat.wait_for(r"\(forgotten\)")
    chat.type("/hlep\n")
    chat.wait_for("/hlep is no command; /help lists them")
    chat.type("/exit\n")
    assert chat.process.wait(PATIENCE_S) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(server, tmp_path):
    terminal = Terminal("chat", "--url", server.url, "--max-tokens", "1500",
                        OCTAVO_HOME=str(tmp_path))  # fmt: skip
    try:
        terminal.wait_for(r"> $")
        terminal.type("hi\n")
        terminal.wait_for(r"> hi\n.{5}")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(r"\(stopped\)\n\n> $")
        assert terminal.process.poll() is None
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(r"\(Ctrl-C again, or /exit, ends the program\)\n> $")
        terminal.type("/help\n")  # the line that was waited for is still read
        terminal.wait_for(r"/exit +end the program")
        for _ in range(2):
            terminal.wait_for(r"> $")
            terminal.process.send_signal(signal.SIGINT)
            if terminal.process.poll() is None:
                terminal.wait_for(r"ends the program\)\n> $")
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()


def test_a_server_that_is_gone_ends_the_answer_and_not_the_program(tmp_path):
    with serving("m", "--served-model-name", "sim") as server:
        terminal = Terminal("chat", "--url", server.url, OCTAVO_HOME=str(tmp_path))
        terminal.wait_for(r"> $")
    try:
        terminal.type("hi\n")
        terminal.wait_for(r"octavo: no server answers at .*\n\n> $")
    finally:
        terminal.close()


def test_lines_are_remembered_for_the_next_time(server, tmp_path):
    arguments = ("chat", "--url", server.url, "--max-tokens", "4")
    for typed in ("an unlikely line\n/exit\n", "\033[A\033[A\n/exit\n"):
        terminal = Terminal(*arguments, OCTAVO_HOME=str(tmp_path))
        try:
            terminal.wait_for(r"> $")
            terminal.type(typed)
            assert terminal.process.wait(PATIENCE_S) == 0
            terminal.wait_for("an unlikely line")
        finally:
            terminal.close()
    history = tmp_path / "chat_history"
    assert "an unlikely line" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_system_message_leads_and_survives_a_reset():
    class Talker:
        def chat(self, messages, options):
            return messages

    dialogue: Any = ChatDialogue("Be brief.")
    talker: Any = Talker()
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "a"}
    assert dialogue.ask(talker, "a", {}) == [system, question]
    dialogue.answered("a", "b")
    dialogue.reset()
    assert dialogue.ask(talker, "a", {}) == [system, question]
    assert command_reply("/system", dialogue) == "(no system message)"
    assert dialogue.ask(talker, "a", {}) == [question]


@pytest.mark.parametrize("line", ["/usr/bin is a folder", "/a/b", "hello /help", "1/2"])
def test_what_only_looks_like_a_command_is_for_the_model(line):
    assert command_reply(line, ChatDialogue()) is None


@pytest.mark.parametrize(
    ("tokens", "seconds", "is_whole", "text"),
    [
        (11, 2.0, True, "(11 tokens, 5.0 tokens per second)"),
        (1, 0.0, True, "(1 token)"),
        (0, 0.0, True, "(0 tokens)"),
        (None, 1.25, True, "(1.2 s)"),
        (None, 1.0, False, "(stopped)"),
    ],
)
def test_the_speed_leaves_out_the_wait_for_the_first_token(tokens, seconds, is_whole, text):
    assert describe_speed(tokens, seconds, is_whole=is_whole) == text
