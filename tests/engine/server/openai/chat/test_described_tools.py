"""Conversations about tools, for templates that know none."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.server.openai.chat.described_tools import described, takes_system
from octavo_engine.tokenization.chat_template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(("template", "takes"), [(PLAIN, True), (ALTERNATING, False),
                                                 (SILENT, False)])  # fmt: skip
def test_whether_a_template_takes_system_messages_is_tried(template, takes):
    assert takes_system(ChatTemplate(template)) is takes


def test_the_description_stands_behind_what_the_system_says():
    messages = described(
        [{"role": "system", "content": "Be kind."}, user("a")], TOOLS, takes_system=True
    )
    assert messages[0]["content"].startswith("Be kind.\n\nYou may call functions")
    assert '{"name": "f", "parameters": {}}' in messages[0]["content"]
    assert messages[1:] == [user("a")]


def test_without_system_messages_the_user_says_it_first():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    history = [
        user("a"), {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"}, user("b"),
    ]  # fmt: skip
    messages = described(history, TOOLS, takes_system=False)
    text = ChatTemplate(ALTERNATING).render(messages)
    assert text.startswith("[user:You may call functions")
    assert text.endswith(
        '\n\na][assistant:<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>]'
        "[user:<tool_response>\n1\n</tool_response>\nb]"
    )
    assert history[0] == user("a")  # what was given is not changed


def test_two_messages_of_the_user_that_are_no_results_stay_two():
    messages = [user("a"), user("b")]
    assert described(messages, None, takes_system=True) == messages
