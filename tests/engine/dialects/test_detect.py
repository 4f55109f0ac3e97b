"""The dialect is told from what a template writes around calls and thoughts."""

from __future__ import annotations

import pytest

from octavo_engine.dialects import marks
from octavo_engine.dialects.detect import detect
from octavo_engine.dialects.formats import (
    REASONING_ALIASES,
    REASONING_FORMATS,
    TOOL_ALIASES,
    TOOL_FORMATS,
)

QWEN = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}"
    '{% endfor %}</tools>\nreturn <tool_call>\\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\\n</tool_call>{% endif %}"
)
TEMPLATES: list[tuple[str, str | None, str | None]] = [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", None, None),
    (QWEN, "hermes", None),
    (QWEN + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "hermes", "qwen3"),
    (QWEN + "<function=f>\n<parameter=p>", "qwen3_coder", None),
    ("{{ '[TOOL_CALLS] [' + calls + ']' }}", "mistral", None),
    ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }} [THINK]", "mistral_args", "mistral"),
    (f"{marks.DEEPSEEK_CALLS}function\n```json\n", "deepseek_v3", None),
    (f"{marks.DEEPSEEK_CALLS}{marks.DEEPSEEK_CALL}{{ name }}{marks.DEEPSEEK_SEPARATOR}"
     f"{marks.DEEPSEEK_ASSISTANT}{{% if thinking %}}<think>{{% endif %}}", "deepseek_v31", "qwen3"),
    (f"{marks.DEEPSEEK_CALLS}```json{marks.DEEPSEEK_ASSISTANT}<think>\n", "deepseek_v3",
     "deepseek_r1"),
    (marks.KIMI_CALLS, "kimi_k2", None),
    ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key> <think>", "glm45", "qwen3"),
    ("<|start_header_id|>{% if tools %}\"parameters\": dictionary{% endif %}", "llama3_json", None),
    ("<|python_start|>[{{ call }}]<|python_end|>", "llama4_pythonic", None),
    ("<|start_header_id|>{% if tools %}[func(a=1)]{% endif %}", "pythonic", None),
    ("<|tool_call|>{{ calls | tojson }}", "granite", None),
    ("<tool_calls>[{{ calls }}]</tool_calls>", "jamba", None),
    ("<|action_start|><|plugin|>", "internlm", None),
    ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json", None),
    ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("Here is my thought process: Here is my response:", None, "granite"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES, ids=lambda v: str(v)[:40])
def test_detection(template, tools, reasoning):
    assert detect(template) == (tools, reasoning)
    assert tools is None or tools in TOOL_FORMATS
    assert reasoning is None or reasoning in REASONING_FORMATS


def test_other_names_lead_to_formats_that_exist():
    assert set(TOOL_ALIASES.values()) <= set(TOOL_FORMATS)
    assert set(REASONING_ALIASES.values()) <= set(REASONING_FORMATS)
    assert not set(TOOL_ALIASES) & set(TOOL_FORMATS)
