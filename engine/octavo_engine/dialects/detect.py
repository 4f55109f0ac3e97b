"""Which dialect a model speaks, read from its chat template: the words it puts around calls."""

from __future__ import annotations

from typing import NamedTuple

from octavo_engine.dialects import marks


class Detected(NamedTuple):
    """Names of formats; None where the template does not show one."""

    tools: str | None
    reasoning: str | None


def detect(chat_template: str) -> Detected:
    """Pure; the first sign found wins, so the more particular ones come first."""
    return Detected(_tools(chat_template), _reasoning(chat_template))


# Signs that must all be there, the more particular ones first.
_SIGNS = (
    (("]<]minimax[>[",), "minimax_m3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<function name=", "<param name="), "minicpm5"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|START_ACTION|>",), "cohere"),
    (("Action:", "```json", "tool_name"), "command_r"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    (("<|tools_prefix|>",), "apertus"),
    (("<TOOLCALL>",), "nemotron"),
    (("<|function_call|>", "<|role_sep|>"), "gigachat31"),
    (("function call", "<|role_sep|>"), "gigachat3"),
    ((">>>all", ">>>${recipient}"), "functionary_v32"),
    (("<|tool_call:begin|>",), "solar"),
    (("<function=", "</function>"), "functionary_v31"),
)


def _is_harmony(text: str) -> bool:
    return "<|channel|>" in text and "<|start|>assistant" in text


def _tools(text: str) -> str | None:
    if _is_harmony(text):
        return "openai"
    if "[TOOL_CALLS]" in text:
        return "mistral_args" if "[ARGS]" in text else "mistral"
    if marks.DSML in text:
        return "deepseek_v32" if "function_calls" in text else "deepseek_v4"
    if marks.DEEPSEEK_CALLS in text:
        return "deepseek_v3" if "```json" in text else "deepseek_v31"
    if marks.KIMI_CALLS in text:
        return "kimi_k2"
    if "<arg_key>" in text:
        return "glm45"
    for signs, name in _SIGNS:
        if all(sign in text for sign in signs):
            return name
    if "<|action_start|>" in text:
        return "internlm"
    if "functools[" in text or ("<|tool|>" in text and "<|/tool|>" in text):
        return "phi4_mini_json"
    if "<tool_calls>" in text:
        return "jamba"
    if "<|tool_call|>" in text:
        return "granite"
    if "<|python_start|>" in text:
        return "llama4_pythonic"
    if "<tool_call>" in text:
        return "hermes"
    if "<function_call>" in text:
        return "granite-20b-fc"
    if "<|start_header_id|>" in text and "tools" in text:
        if '"parameters"' in text or "<|python_tag|>" in text:
            return "llama3_json"
        return "pythonic"
    return None


def _reasoning(text: str) -> str | None:
    if _is_harmony(text):
        return "openai_gptoss"
    if "[THINK]" in text:
        return "mistral"
    if "<seed:think>" in text:
        return "seed_oss"
    if "<mm:think>" in text:
        return "minimax_m3"
    if "<|START_THINKING|>" in text:
        return "cohere"
    if "<|channel>" in text and "<channel|>" in text:
        return "gemma4"
    if "<|inner_prefix|>" in text:
        return "apertus"
    if "</think>" in text or "<think>" in text:
        # These drop the reasoning of earlier turns and let the model think in every one.
        return (
            "deepseek_r1"
            if marks.DEEPSEEK_ASSISTANT in text and "thinking" not in text
            else "qwen3"
        )
    if "Here is my thought process" in text:
        return "granite"
    return None
