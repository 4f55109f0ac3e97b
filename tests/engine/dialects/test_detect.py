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
    ("{% set ns_token = ']<]minimax[>[' %}{{ ns_token ~ '<tool_call>' }} <mm:think>", "minimax_m3",
     "minimax_m3"),
    ("{% set toolcall_begin_token = '<minimax:tool_call>' %}<think>", "minimax_m2", "qwen3"),
    ("<seed:tool_call>\n<function=f>\n<parameter=p> <seed:think>", "seed_oss", "seed_oss"),
    ('<function name="f"><param name="p">', "minicpm5", None),
    ("<|tool_call>call:{{ name }}{ <|channel>thought\n<channel|>", "gemma4", "gemma4"),
    ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "cohere", "cohere"),
    ("Action:\n```json\n[{'tool_name': x}]", "command_r", None),
    ("<|tool_call_start|>[{{ calls }}]<|tool_call_end|><think>", "lfm2", "qwen3"),
    ("<|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "lfm2", None),
    ("List of tools: [{{ tools }}]", "lfm2", None),
    ("<|inner_prefix|><|inner_suffix|><|tools_prefix|>[", "apertus", "apertus"),
    ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", "nemotron", None),
    ("<|role_sep|><|function_call|>", "gigachat31", None),
    ("<|role_sep|>{{ 'function call' }}<|message_sep|>", "gigachat3", None),
    ("<|start_header_id|>{{ tools }}<function=f>{}</function><|python_tag|>", "functionary_v31",
     None),
    ("<|start_header_id|>{{ tools }}>>>${recipient}\n>>>all\n", "functionary_v32", None),
    ("<|tool_call:begin|>{{ id }}<|tool_call:name|>", "solar", None),
    (f"{{% set token = '{marks.DSML}' %}}{{{{ '<' + token + 'function_calls>' }}}}",
     "deepseek_v32", None),
    (f"{{% set token = '{marks.DSML}' %}}{{{{ '<' + token + 'tool_calls>' }}}}", "deepseek_v4",
     None),
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
